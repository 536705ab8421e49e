#include "ballast/services/job/read_pins.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

// Each pin may cost a copy of the whole job.
constexpr size_t kPinsMax = 16;

}  // namespace

Outcome<v1::PinResponse> ReadPins::Pin(int64_t version, uint64_t* waiting_for) {
  const auto pin = pins_.find(version);
  if (*waiting_for != 0 && (pin == pins_.end() || pin->second.id != *waiting_for)) {
    return model::Error(absl::StatusCode::kNotFound, model::kBadRequest,
                        absl::StrCat("version ", version, " was unpinned meanwhile; pin it again if it is needed"));
  }
  if (pin != pins_.end()) {
    *waiting_for = pin->second.id;
    if (!pin->second.ready) return std::nullopt;
    BALLAST_RETURN_IF_ERROR(pin->second.status);
    v1::PinResponse response;
    for (const uint64_t t : pin->second.tensor_steps) response.add_tensor_steps(t);
    return response;
  }
  BALLAST_RETURN_IF_ERROR(core_->machine->StateStatus());
  const int64_t committed = core_->machine->committed();
  if (version != committed || version < 0) {
    return model::Error(absl::StatusCode::kFailedPrecondition,
                        version > committed ? model::kBehind : model::kVersionGone,
                        absl::StrCat("only the last decided step can be pinned: server '", core_->around.server_id,
                                     "' is at ", committed, ", asked for ", version));
  }
  BALLAST_RETURN_IF_ERROR(core_->CheckNoneAhead());
  if (pins_.size() >= kPinsMax) {
    return model::Error(
        absl::StatusCode::kResourceExhausted, model::kBudget,
        absl::StrCat("job '", core_->name, "' holds ", pins_.size(), " pins, which is all that it may; unpin version ",
                     pins_.begin()->first, " or another first"));
  }
  State& begun = pins_[version];
  begun.id = ++last_id_;
  begun.tensor_steps.assign(core_->machine->tensor_steps().begin(), core_->machine->tensor_steps().end());
  *waiting_for = begun.id;
  core_->worker->Post([this, version, id = begun.id] { RunPin(version, id); });
  return std::nullopt;
}

void ReadPins::Unpin(int64_t version) {
  if (pins_.erase(version) == 0) return;
  core_->worker->Post([this, version] { RunUnpin(version); });
  core_->moved = true;  // the pin's own request may still wait
}

absl::StatusOr<bool> ReadPins::Readable(int64_t version) const {
  const auto pin = pins_.find(version);
  if (pin == pins_.end() || !pin->second.ready) return false;
  BALLAST_RETURN_IF_ERROR(pin->second.status);
  return true;
}

std::vector<int64_t> ReadPins::Versions() const {
  std::vector<int64_t> versions;
  for (const auto& [version, pin] : pins_) {
    if (pin.ready && pin.status.ok()) versions.push_back(version);
  }
  return versions;
}

void ReadPins::RunPin(int64_t version, uint64_t id) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->store;
  }
  const absl::Status status = store == nullptr ? absl::OkStatus() : store->Pin(version);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    const auto pin = pins_.find(version);
    if (pin == pins_.end() || pin->second.id != id) return;
    pin->second.status = status;
    pin->second.ready = true;
    core_->moved = true;
    if (status.ok()) return;
    core_->waiting.Wake(&core_->machine_queue, replies);
    pins_.erase(version);
  });
}

void ReadPins::RunUnpin(int64_t version) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    store = core_->store;
  }
  if (store != nullptr) store->Unpin(version);
}

bool ReadPins::GiveUpOldest(storage::ChunkStore* store, const absl::Status& cause) {
  int64_t version = -1;
  {
    JobMutexLock lock(&core_->mu);
    for (auto& [pinned, pin] : pins_) {
      if (!pin.ready || !pin.status.ok()) continue;
      version = pinned;
      pin.status = model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                                absl::StrCat("the pin of version ", version,
                                             " was given up so that training could go on: ", cause.message()));
      break;
    }
  }
  if (version < 0) return false;
  store->Unpin(version);
  return true;
}

}  // namespace ballast::services
