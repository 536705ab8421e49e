// Versions in a group's life: pins, unpins, and a restore to begin with.
#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/tests/sim/sim_group.h"

namespace ballast::sim {

void SimGroup::TickPins(std::vector<Request>* requests) {
  if (pin_ >= 0 && (--pin_patience_ < 0 || ranks_[0].step != pin_ + 1)) pin_ = -1;
  for (int server = 0; server < kServers && pin_ >= 0; ++server) {
    if (pinned_on_[server] || around_.random->Percent(50)) continue;
    auto pin = std::make_shared<v1::PinRequest>();
    pin->set_job(kJob);
    pin->set_version(pin_);
    pin->set_durable(true);
    *pin->mutable_epoch() = intent_.epoch;
    requests->push_back(Make(0, server, std::shared_ptr<const v1::PinRequest>(std::move(pin))));
  }
  const bool restored = ranks_[0].step == intent_.restore_at + 1;
  if (!around_.random->Percent(restored ? 25 : 1) || ranks_[0].step < 2) return;
  // Somebody's pin, wherever it is; after a restore, that version.
  auto unpin = std::make_shared<v1::UnpinRequest>();
  unpin->set_job(kJob);
  unpin->set_version(restored && around_.random->Percent(50)
                         ? intent_.restored
                         : static_cast<int64_t>(around_.random->Below(static_cast<uint64_t>(ranks_[0].step))));
  unpin->set_durable(true);
  *unpin->mutable_epoch() = intent_.epoch;
  for (int server = 0; server < kServers; ++server) {
    requests->push_back(Make(0, server, std::shared_ptr<const v1::UnpinRequest>(unpin)));
  }
}

void SimGroup::OnPin(const Response& response) {
  const int server = response.request.server;
  if (std::get<6>(response.request.body)->version() != pin_) return;
  if (response.status.ok()) {
    if (!std::exchange(pinned_on_[server], true)) ++around_.tally->pins;
    if (std::all_of(pinned_on_, pinned_on_ + kServers, [](bool pinned) { return pinned; })) pin_ = -1;
  } else if (model::ReasonOf(response.status) == model::kBehind) {
    ranks_[0].commits[server] = Sent::kNo;
  }
}

void SimGroup::MaybeRestore(int64_t base, const std::vector<v1::GetJobResponse>& answers) {
  std::map<int64_t, size_t> pinned;  // version -> on how many servers
  for (const v1::GetJobResponse& answer : answers) {
    for (const int64_t version : answer.durable_versions()) ++pinned[version];
  }
  // A mistaken group asks for what not all have.
  if (!around_.random->Percent(10)) std::erase_if(pinned, [](const auto& pin) { return pin.second < kServers; });
  if (pinned.empty() || !around_.random->Percent(80)) return;
  auto pin = pinned.begin();
  std::advance(pin, static_cast<ptrdiff_t>(around_.random->Below(pinned.size())));
  WillRestore(base, pin->first);
}

void SimGroup::WillRestore(int64_t base, int64_t version) {
  const auto& blobs = around_.oracle->decision(version).blobs();
  intent_.restore_at = base + 1;
  intent_.restored = version;
  intent_.restored_blobs.assign(blobs.begin(), blobs.end());
}

}  // namespace ballast::sim
