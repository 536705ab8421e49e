// How class Filling copies what kept versions have of missing chunks.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {
namespace {

// The next member is asked which versions it keeps.
constexpr absl::Duration kAskAgain = absl::Milliseconds(500);

}  // namespace

void Filling::AskForKept(const std::shared_ptr<const model::EpochPlan>& plan, std::vector<CopyPtr>* begun) {
  if (plan == nullptr || asking_ == plan) return;
  const bool mine = plan->FindMember(core_->around.server_id).ok();
  const auto member = mine ? kept_copies_->ToAsk(*plan, asks_failed_) : std::nullopt;
  if (!member.has_value()) return;
  asking_ = plan;
  const auto ask = std::make_shared<Copy>();
  ask->plan = plan;
  ask->from = plan->members()[static_cast<int>(*member)];
  ask->request = RequestTo(*plan);
  ask->request.set_tell_kept(true);
  begun->push_back(ask);
}

void Filling::TakeKept(const CopyPtr& ask, const absl::Status& status) {
  if (asking_ != ask->plan) return;
  if (ask->plan != core_->state.plan()) {
    asking_ = nullptr;
    return Resume();
  }
  if (status.ok()) {
    asks_failed_ = 0;
    kept_copies_->Tell(ask->state, kept_->unpinning());
    core_->Moved();
    return Resume();
  }
  ++asks_failed_;
  asking_ = nullptr;
  RunAt(absl::Now() + kAskAgain);
}

void Filling::FailKept(const CopyPtr& copy, const HeldChunk& chunk, const absl::Status& cause) {
  // What the holder cannot read it does not keep any more.
  const bool lacks = model::ReasonOf(cause) == model::kVersionGone || model::ReasonOf(cause) == model::kIo;
  if (!lacks && !absl::IsDataLoss(cause)) return Fail(copy, cause);
  std::vector<std::string> holders;
  for (const uint32_t holder : copy->plan->holders_of(copy->chunk)) {
    const std::string& id = copy->plan->members()[static_cast<int>(holder)].server_id();
    if (id != core_->around.server_id) holders.push_back(id);
  }
  if (!kept_copies_->Lack(*copy->kept, chunk, copy->from.server_id(), holders)) return Fail(copy, cause);
  if (copy->mends) {
    kept_copies_->EndMend(*copy->kept, chunk, cause);
  } else {
    kept_->GiveUpIncomplete(*copy->kept, copy->chunk);
  }
  End(copy);
}

void Filling::ChooseMends(const model::EpochPlan* plan, Round* round, std::vector<CopyPtr>* begun) {
  if (plan == nullptr || !plan->FindMember(core_->around.server_id).ok()) return;
  for (const auto& [version, chunk] : kept_copies_->ToMend()) {
    if (copies_.size() == kCopiesAtOnce || round->paused) return;
    if (copies_.contains({chunk->layout().index, version})) continue;
    const CopyPtr copy = CopyFrom(*chunk, *chunk->version(), CopyNeed::kLacking, round);
    if (copy == nullptr) continue;
    copy->mends = true;
    copy->kept = version;
    copy->request.set_kept_version(version);
    begun->push_back(copies_[KeyOf(*copy)] = copy);
  }
}

void Filling::MendKept(const CopyPtr& copy) {
  std::shared_ptr<storage::ChunkStore> store;
  uint64_t index = 0;
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    if (chunk == nullptr || !kept_copies_->Wants(*copy->kept) || !core_->Refusal().ok()) return End(copy);
    store = core_->state.store();
    index = chunk->store_index;
  });
  if (store == nullptr) return;
  const storage::KeptState kept{.version = copy->state.version(), .state = TakeState(&copy->state)};
  const absl::Status mended = store->MendKept(*copy->kept, index, kept);
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    if (IsBadCopy(mended)) return Fail(copy, mended);
    if (mended.ok()) {
      for (const storage::WholeState::Array& array : kept.state.arrays) {
        core_->counters.imported_bytes.fetch_add(array.bytes.size(), std::memory_order_relaxed);
      }
    }
    if (const std::shared_ptr<HeldChunk> chunk = core_->state.Find(copy->chunk); chunk != nullptr) {
      kept_copies_->EndMend(*copy->kept, *chunk, mended);
    }
    End(copy);
  });
}

void Filling::LackRoom(const CopyPtr& copy, const absl::Status& cause) {
  no_room_.length = std::clamp(2 * no_room_.length, FillSources::kRestMin, FillSources::kRestMax);
  no_room_.until = absl::Now() + no_room_.length;
  if (!std::exchange(no_room_.told, true)) {
    spdlog::warn(
        "job '{}' has no room on this server for version {}, which the copies of its chunks need ({}): they wait. Make "
        "room, or give versions up (`ballastctl unpin`)",
        core_->name, *copy->kept, std::string(cause.message()));
  }
  End(copy);
}

void Filling::InstallKept(const CopyPtr& copy) {
  std::shared_ptr<storage::ChunkStore> store;
  uint64_t index = 0;
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    if (chunk == nullptr || !kept_copies_->Wants(*copy->kept) || !core_->Refusal().ok()) return End(copy);
    store = core_->state.store();
    index = chunk->store_index;
  });
  if (store == nullptr) return;
  storage::KeptState kept{.version = copy->state.version(), .state = TakeState(&copy->state)};
  std::shared_ptr<void> lease;
  uint64_t taken = 0;
  const absl::Status status = store->ImportKept(*copy->kept, index, kept, [&](uint64_t bytes) {
    taken = bytes;
    return core_->MayGrow(storage::TierKind::kNvme, bytes, &lease);
  });
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (absl::IsResourceExhausted(status)) return LackRoom(copy, status);
    if (IsBadCopy(status)) return Fail(copy, status);
    no_room_ = {};
    const std::shared_ptr<HeldChunk> held = core_->state.Find(copy->chunk);
    if (status.ok() && held != nullptr && held->store_index == index) held->SetKeptBytes(held->kept_bytes() + taken);
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    if (!status.ok()) {
      core_->Fail(model::Annotate(status, absl::StrCat("a copy of chunk ", copy->chunk, " could not be stored")),
                  core_->Remedy(), replies);
    } else if (chunk != nullptr && kept_copies_->Wants(*copy->kept)) {
      kept_copies_->Took(*copy->kept, *chunk);
      for (const storage::WholeState::Array& array : kept.state.arrays) {
        core_->counters.imported_bytes.fetch_add(array.bytes.size(), std::memory_order_relaxed);
      }
    }
    End(copy);
  });
}

}  // namespace ballast::services
