// What comes of the copies that filling.cc begins: their states are checked, wait for the step machine, and are stored.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {
namespace {

// A copy whose version is ahead waits for the commit here.
constexpr absl::Duration kMachinePatience = absl::Seconds(30);

constexpr char kNothingLeft[] =
    "Nothing is left of that part of the state: drop the job and start it from a checkpoint, or bring back a data "
    "directory of one of these servers as it was";

absl::Status TooLate(int64_t version, int64_t applied) {
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kVersionGone,
      absl::StrCat("the copy is of version ", version, ", and step ", applied, " has been applied without the chunk"));
}

// The chunk that the holder has lost, by its answer.
std::string LostOf(const absl::Status& status) {
  const model::Details details = model::DetailsOf(status);
  const auto lost = details.find(model::kLostChunk);
  return lost == details.end() ? "" : lost->second;
}

}  // namespace

bool Filling::IsBadCopy(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || model::ReasonOf(status) == model::kChecksum;
}

storage::WholeState Filling::TakeState(v1::ExportResponse* message) {
  storage::WholeState state;
  for (v1::ExportResponse::Array& array : *message->mutable_arrays()) {
    const std::string bytes = std::move(*array.mutable_payload());
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
    state.arrays.push_back({{begin, begin + bytes.size()}, array.crc32c()});
  }
  return state;
}

void Filling::NoteLost(const CopyPtr& copy, Replies* replies) {
  if (std::exchange(lost_in_, copy->plan) != copy->plan) lost_by_.clear();
  std::set<std::string>& lost = lost_by_[copy->chunk];
  lost.insert(copy->from.server_id());
  const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
  if (!core_->Refusal().ok() || !core_->machine->IsHolder(copy->chunk)) return;
  const model::EpochPlan& plan = *core_->state.plan();
  for (const uint32_t holder : plan.holders_of(copy->chunk)) {
    const std::string& server = plan.members()[static_cast<int>(holder)].server_id();
    if (server != core_->around.server_id && !lost.contains(server)) return;
  }
  absl::Status nowhere =
      model::Error(absl::StatusCode::kDataLoss, model::kStateLost,
                   absl::StrCat("chunk ", copy->chunk, " is damaged on all servers that hold it, here and on '",
                                absl::StrJoin(lost, "', '"), "': ", chunk->damage().message()));
  model::SetDetail(model::kLostChunk, absl::StrCat(copy->chunk), &nowhere);
  core_->Fail(nowhere, kNothingLeft, replies);
}

void Filling::Arrive(const CopyPtr& copy, absl::StatusOr<v1::ExportResponse> state) {
  if (state.ok()) copy->state = *std::move(state);
  core_->Enter([this, copy, status = state.status()](Replies* replies) {
    core_->mu.AssertHeld();
    if (copy->request.tell_kept()) return TakeKept(copy, status);
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    if (chunk == nullptr) return End(copy);
    if (copy->kept.has_value() && !status.ok()) return FailKept(copy, *chunk, status);
    if (LostOf(status) == absl::StrCat(copy->chunk)) NoteLost(copy, replies);
    if (!status.ok()) return Fail(copy, status);
    lost_by_.erase(copy->chunk);
    if (copy->state.elements() != chunk->elements) {
      return Fail(copy, model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                                     absl::StrCat("it has ", copy->state.elements(), " elements there, and ",
                                                  chunk->elements, " here")));
    }
    sources_.Answered(copy->from.server_id());
    if (copy->kept.has_value()) {
      return core_->worker->Post([this, copy] { copy->mends ? MendKept(copy) : InstallKept(copy); });
    }
    AwaitMachine(copy, replies);
  });
}

void Filling::AwaitMachine(const CopyPtr& copy, Replies* replies) {
  Waiter waiter;
  waiter.limit = absl::Now() + kMachinePatience;
  waiter.attempt = [this, copy](Replies*) {
    core_->mu.AssertHeld();
    return Try(copy);
  };
  waiter.expire = [this, copy](Replies*) {
    core_->mu.AssertHeld();
    End(copy);
  };
  waiter.refuse = [this, copy](const absl::Status& status, Replies*) {
    core_->mu.AssertHeld();
    Fail(copy, status);
  };
  core_->SubmitToMachine(std::move(waiter), replies);
}

absl::Status Filling::Check(const CopyPtr& copy, const HeldChunk& chunk) {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  const int64_t version = copy->state.version();
  if (version < *chunk.version()) return TooLate(version, *chunk.version());
  if (!kept_copies_->NextOf(chunk).newest) return absl::CancelledError("what kept versions have of it comes first");
  return core_->machine->CheckImport(copy->chunk, version);
}

bool Filling::Try(const CopyPtr& copy) {
  const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
  const absl::Status status = chunk == nullptr ? absl::CancelledError("") : Check(copy, *chunk);
  const std::string reason = model::ReasonOf(status);
  if (core_->Refusal().ok() && (reason == model::kBehind || reason == model::kBusy)) return false;
  if (status.ok()) {
    core_->worker->Post([this, copy] { Install(copy); });
  } else {
    Repeat(copy, status);
  }
  return true;
}

void Filling::Install(const CopyPtr& copy) {
  std::shared_ptr<storage::ChunkStore> store;
  storage::ChunkUpdate update;
  absl::Status status;
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    status = chunk == nullptr ? absl::CancelledError("") : Check(copy, *chunk);
    if (!status.ok()) {
      // A step may have been decided meanwhile, and nothing more.
      return model::ReasonOf(status) == model::kBusy ? AwaitMachine(copy, replies) : Repeat(copy, status);
    }
    store = core_->state.store();
    update.chunk = chunk->store_index;
  });
  if (!status.ok()) return;
  const storage::WholeState state = TakeState(&copy->state);
  update.version = copy->state.version();
  update.flush = store->durable();
  update.imported = &state;
  status = store->Run({&update, 1}, [](size_t) {});
  if (status.ok() && store->durable()) status = store->Harden();
  bool counts = false;
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    counts = Installed(copy, status, replies);
    if (!counts) return;
    for (const storage::WholeState::Array& array : state.arrays) {
      core_->counters.imported_bytes.fetch_add(array.bytes.size(), std::memory_order_relaxed);
    }
  });
  if (!counts && status.ok()) store->Void({&update.chunk, 1});
}

bool Filling::Installed(const CopyPtr& copy, const absl::Status& status, Replies* replies) {
  if (!status.ok()) {
    if (IsBadCopy(status)) {
      Fail(copy, status);
      return false;
    }
    core_->Fail(model::Annotate(status, absl::StrCat("a copy of chunk ", copy->chunk, " could not be stored")),
                core_->Remedy(), replies);
    End(copy);
    return false;
  }
  const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
  const int64_t version = copy->state.version();
  // Slices of a later step may have been missing when it was prepared.
  absl::Status filled = chunk == nullptr ? absl::CancelledError("") : core_->Refusal();
  if (filled.ok()) filled = core_->machine->MarkFilled(copy->chunk, version);
  if (filled.ok()) {
    missing_.Filled(copy->chunk);
    kept_copies_->Filled(*chunk);
    chunk->Fill(version, std::max(chunk->changed(), std::min(copy->state.changed(), version)));
    core_->waiting.Wake(&chunk->pulls, replies);
    core_->Moved();
    if (!copy->holds_steps) late_ = 0;
    ++filled_chunks_;
    filled_bytes_ += BytesOf(*chunk);
    TellProgress(absl::Now());
  }
  Repeat(copy, filled);
  return filled.ok();
}

}  // namespace ballast::services
