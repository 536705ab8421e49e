#include "ballast/services/journal/job_journal.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <random>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/journal/data_files.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {

absl::Status RemoveLog(storage::Tiers& tiers, const std::string& job) {
  return tiers.disk()->Remove(LogPath(tiers.directory(), job));
}

uint64_t JobJournal::NewLife() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

std::string JobJournal::log_path() const { return LogPath(core_->around.tiers->directory(), core_->name); }
std::string JobJournal::spill_path() const { return SpillPath(core_->around.tiers->directory(), core_->name); }

JobJournal::Segments JobJournal::segments() const {
  JobMutexLock lock(&core_->mu);
  return {journal_, journal_->state().segment_bytes, journal_->free_segments()};
}

JobJournal::Use JobJournal::use() const {
  Use use;
  const JournalState state = journal_->state();
  use.capacity_bytes = state.bytes;
  use.used_bytes = state.bytes - journal_->free_segments() * state.segment_bytes;
  use.waited = waited_ + (waits_for_cut_ ? absl::Now() - waits_since_ : absl::ZeroDuration());
  return use;
}

uint64_t JobJournal::Append(const StepRecord& record) {
  core_->mu.AssertHeld();
  const auto* slice = std::get_if<SliceRecord>(&record);
  if (slice == nullptr) core_->Moved();
  if (std::holds_alternative<PromiseRecord>(record)) core_->Fenced();
  const uint64_t lsn = slice == nullptr ? promises_.Append(record) : promises_.Skip();
  if (!journal_->Keeps(record)) return lsn;
  storage::LogRecord out = EncodeRecord(record);
  out.lsn = lsn;
  // Lent slices have no bytes here, and are lent only to jobs without a log.
  if (slice != nullptr && slice->bytes != nullptr) AddSlice(slice->bytes, slice->header, &out);
  // No slice of a restore keeps its step in the log until the chunks are flushed.
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record);
      prepared != nullptr && prepared->prepared.header().kind() == v1::STEP_KIND_RESTORE) {
    out.keep_for = prepared->prepared.step();
  }
  journal_->log()->Append(std::move(out));
  if (std::holds_alternative<PreparedStepRecord>(record)) core_->counters.steps.Appended();
  return lsn;
}

void JobJournal::AddSlice(PushedSlice* slice, const v1::PushRequest& header, storage::LogRecord* out) {
  NoteAttempt(header.step(), header.attempt());
  slice->appended = true;
  const Intake::Receipt& receipt = slice->receipt;
  out->payload = {receipt.to, slice->bytes};
  out->payload_crc32c = slice->crc32c;
  out->parity = std::move(slice->parity);
  out->keep_for = header.step();
  out->written = [this, chunk = slice->chunk, receipt = slice->receipt](const storage::PayloadPlace* place) mutable {
    core_->LockedOnWorker([&](Replies* replies) {
      core_->mu.AssertHeld();
      chunk->intake.Written(receipt, place);
      receipt.buffer.reset();
      if (receipt.logged) room_->Returned(replies);
      core_->WakePushes(chunk.get(), replies);
    });
  };
}

// Once a rank has pushed a higher attempt, no lower attempt can be prepared: the rank has replaced its slices. Drops in
// a row would fill the log with slices of lower attempts.
void JobJournal::NoteAttempt(int64_t step, uint64_t attempt) {
  const std::pair<int64_t, uint64_t> arrived(step, attempt);
  if (arrived <= attempt_) return;
  if (step == attempt_.first) journal_->Release(core_->machine->committed());
  attempt_ = arrived;
}

void JobJournal::Sync(uint64_t lsn) {
  core_->mu.AssertHeld();
  promises_.Sync(lsn);
  journal_->Sync(lsn);
}

void JobJournal::Opened(bool keeps_slices) {
  if (!keeps_slices) {
    // Slices of older epochs are void, the log need not keep them.
    journal_->Release(core_->machine->committed());
    attempt_ = {-1, 0};
  }
  norm_bytes_max_ = sealed_bytes_max_ = step_bytes_ = values_bytes_ = 0;
  for (const auto& chunk : core_->state.chunks()) {
    values_bytes_ += storage::RecordCostMax(kSliceBodyBytesMax, chunk->elements * sizeof(float));
    if (chunk->is_frozen()) continue;
    norm_bytes_max_ += NormBytesMax(chunk->layout());
    step_bytes_ += storage::RecordCostMax(kSliceBodyBytesMax,
                                          chunk->elements * core_->state.store()->layout().gradient_element_bytes());
  }
}

storage::LogRecord JobJournal::Snapshot(bool whole) {
  SnapshotRecord record;
  if (whole) {
    record.snapshot = core_->machine->Snapshot();
    std::vector<int64_t> changed;
    for (const auto& chunk : core_->state.chunks()) changed.push_back(chunk->changed());
    EncodeChanged(changed, &record.snapshot);
  }
  storage::LogRecord snapshot = EncodeRecord(record);
  snapshot.lsn = promises_.Append(record);
  return snapshot;
}

absl::Status JobJournal::MakeRoomIn(absl::FunctionRef<absl::Status(Journal::Begin)> make) {
  bool rolls = false;
  const absl::Status made = make([&](bool whole) {
    core_->mu.AssertHeld();
    rolls = true;
    return Snapshot(whole);
  });
  // Slices never use the reserve; fences and Opens without a step between them would use it up.
  if (rolls && core_->state.store() != nullptr && journal_->IsShort()) post_flush_();
  return made;
}

absl::Status JobJournal::MakeRoom(uint64_t records, uint64_t bytes) {
  return MakeRoomIn([&](Journal::Begin begin) {
    core_->mu.AssertHeld();
    return journal_->MakeRoom(records, bytes, begin);
  });
}

absl::Status JobJournal::MakeRoomForSeal(const v1::SealRequest& seal) {
  // The written record has the seal of the first rank, whichever rank seals last.
  const uint64_t sealed_bytes = std::max<uint64_t>(sealed_bytes_max_, seal.ByteSizeLong());
  constexpr uint64_t kStepCountBytesMax = 10;  // a step count of a restore, as protobuf encodes it
  const uint64_t step_counts = core_->machine->tensor_steps().size() * kStepCountBytesMax;
  return MakeRoom(1, sealed_bytes + norm_bytes_max_ + step_counts + kSmallRecordBytesMax);
}

std::optional<ReservedRoom::Lease> JobJournal::Reserve(uint64_t payload_bytes, bool leaves_memory) {
  if (!journal_->HasRoomFor(NeedsOf(payload_bytes, leaves_memory))) return std::nullopt;
  if (!durable() && !leaves_memory) return ReservedRoom::Lease();
  return reserved_.Take(storage::RecordCostMax(kSliceBodyBytesMax, payload_bytes));
}

void JobJournal::GiveBack(ReservedRoom::Lease room, Replies* replies) {
  const bool had_room = room.bytes() > 0;
  room = {};
  // What slices reserve is a bound. A push that found too little room beside them may find enough without them, and
  // perhaps nothing is left to be cut.
  if (had_room && reserved_.bytes() == 0) WakeWaiting(replies);
}

void JobJournal::WaitForCut() {
  if (!std::exchange(waits_for_cut_, true)) waits_since_ = absl::Now();
  post_flush_();
}

void JobJournal::WakeWaiting(Replies* replies) {
  if (!std::exchange(waits_for_cut_, false)) return;
  waited_ += absl::Now() - waits_since_;
  for (const auto& chunk : core_->state.chunks()) core_->WakePushes(chunk.get(), replies);
}

absl::Status JobJournal::BeginRecord(const PushedSlice& slice) {
  SliceNeeds alone = NeedsOf(slice.bytes, slice.receipt.logged);
  alone.reserved_bytes = 0;
  if (!journal_->HasRoomFor(alone)) {  // other records took what the slice had reserved; the rest is theirs
    WaitForCut();
    return model::Error(
        absl::StatusCode::kUnavailable, model::kBusy,
        "the gradient log is full: chunks are flushed so that it can be cut; send the same slice again");
  }
  return MakeRoomIn([&](Journal::Begin begin) {
    core_->mu.AssertHeld();
    return journal_->MakeRoomFor(NeedsOf(slice.bytes, slice.receipt.logged), begin);
  });
}

JournalState JobJournal::state() const {
  JournalState state = journal_->state();
  state.steps_held = StepsHeld();
  return state;
}

void JobJournal::Cut(int64_t version) {
  const absl::Status made = MakeRoomIn([&](Journal::Begin begin) {
    core_->mu.AssertHeld();
    return journal_->Cut(version, begin);
  });
  if (!made.ok()) {
    spdlog::warn("job '{}': a cut of its gradient log waits: {}", core_->name, std::string(made.message()));
  }
}

const storage::BlockFile* JobJournal::file() const {
  const storage::GradientLog* const log = journal_->log();
  return log == nullptr ? nullptr : &log->file();
}

bool JobJournal::Holds(const JournalSize& size) const {
  JobMutexLock lock(&core_->mu);
  if (core_->state.recovering()) return true;  // the log is being read
  return journal_->state().bytes >= size.bytes();
}

absl::StatusOr<JobJournal::Growth> JobJournal::TakeBudget(const JournalSize& size, bool logged) {
  Growth growth{.size = size, .logged = logged};
  if (Holds(size)) return growth;
  {
    JobMutexLock lock(&core_->mu);
    growth.bytes = size.bytes() - journal_->state().bytes;
  }
  BALLAST_RETURN_IF_ERROR(core_->around.tiers->Take(storage::TierKind::kNvme, growth.bytes, "the gradient log",
                                                    storage::TierPart::kLog, core_->around.account.get()));
  return growth;
}

void JobJournal::ReturnBudget(uint64_t bytes) {
  core_->around.tiers->Return(storage::TierKind::kNvme, bytes, storage::TierPart::kLog, core_->around.account.get());
}

absl::Status JobJournal::Grow(const Growth& growth) {
  if (growth.bytes == 0) return absl::OkStatus();
  absl::Status status;
  if (const Segments there = segments(); there.bytes > 0) {
    status = there.journal->Extend(growth.bytes / there.bytes, [this] { return core_->Interrupted(); });
  } else {
    auto log = Create(growth);
    status = log.status();
    if (status.ok()) status = Start(*std::move(log), growth.logged);
  }
  if (!status.ok()) {
    ReturnBudget(growth.bytes);
    return status;
  }
  bytes_ += growth.bytes;
  return absl::OkStatus();
}

absl::Status JobJournal::Lengthen(uint64_t steps) {
  JournalSize size;
  {
    JobMutexLock lock(&core_->mu);
    const JournalState state = journal_->state();
    if (state.segment_bytes == 0) return absl::UnavailableError("the job is being stopped");
    size.segment_bytes = state.segment_bytes;
    size.segment_count = journal_->log()->segments() + SegmentsFor(steps * step_bytes_, size.segment_bytes);
  }
  // Before the lock below: this may take locks of the server's.
  std::shared_ptr<void> lease;
  BALLAST_RETURN_IF_ERROR(
      core_->MayGrow(storage::TierKind::kNvme, size.bytes() - std::min(size.bytes(), bytes_), &lease));
  Growth growth;
  {
    // An Open that plans with the free space must find it; a step waits for no Open.
    if (!core_->around.planning->TryLock()) return absl::UnavailableError("the free space is being planned with");
    absl::StatusOr<Growth> taken = TakeBudget(size, /*logged=*/true);
    core_->around.planning->Unlock();
    BALLAST_RETURN_IF_ERROR(taken.status());
    growth = *std::move(taken);
  }
  return Grow(growth);
}

absl::StatusOr<std::unique_ptr<storage::GradientLog>> JobJournal::Create(const Growth& growth) {
  if (growth.logged) {
    spdlog::info("job '{}': reserving {} MiB for a gradient log that never has to wait for space", core_->name,
                 growth.size.bytes() >> 20);
  } else {
    spdlog::info("job '{}': reserving {} MiB of disk for slices that do not fit into memory", core_->name,
                 growth.size.bytes() >> 20);
  }
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<storage::GradientLog> log,
                           storage::GradientLog::Create(core_->around.tiers->disk(),
                                                        {.path = growth.logged ? log_path() : spill_path(),
                                                         .job = core_->name,
                                                         .life = life_,
                                                         .segment_bytes = growth.size.segment_bytes,
                                                         .segment_count = growth.size.segment_count,
                                                         .transient = !growth.logged},
                                                        [this] { return core_->Interrupted(); }));
  if (growth.logged) {
    // A drop that a crash cut short may have left `committed` of an earlier job of this name.
    const absl::Status written =
        core_->around.catalog->PutAll({LogPair(core_->name, life_), CommittedPair(core_->name, -1)});
    if (!written.ok()) {
      core_->LockedOnWorker([&](Replies* replies) {
        core_->mu.AssertHeld();
        core_->Fail(written, kCatalogRemedy, replies);
      });
      return written;
    }
  }
  return log;
}

absl::Status JobJournal::Start(std::unique_ptr<storage::GradientLog> log, bool logged) {
  // The journal ends with Stop, before the job's end, so its thread may borrow the job.
  BALLAST_RETURN_IF_ERROR(core_->around.foundation->Pump(log.get(), [this] { Progressed(); }));
  JobMutexLock lock(&core_->mu);
  const uint64_t before_lsn = promises_.last_lsn();
  journal_ = logged ? LogJournal(std::move(log), before_lsn) : SpillJournal(std::move(log));
  if (!logged) return absl::OkStatus();
  promises_.KeptElsewhere(0);
  promises_.DurableElsewhere(before_lsn);
  return absl::OkStatus();
}

void JobJournal::Progressed() {
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (const std::optional<uint64_t> lsn = journal_->durable_lsn()) promises_.DurableElsewhere(*lsn);
    if (const absl::Status status = journal_->status(); !status.ok()) core_->Fail(status, core_->Remedy(), replies);
    WakeWaiting(replies);
  });
}

bool JobJournal::End(absl::FunctionRef<void()> ended) {
  std::shared_ptr<Journal> journal = NoJournal();  // destroyed without the lock, which its thread takes
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    journal.swap(journal_);
    ended();
  });
  if (journal->log() == nullptr) return false;
  core_->around.foundation->StopPumping(journal->log());
  return !journal->durable();
}

void JobJournal::Stop() {
  const bool spilt = End([this] {
    core_->mu.AssertHeld();
    // A recoverable job without its journal is stopping: nothing more is reported as durable.
    if (core_->recoverable()) promises_.DurableElsewhere(0);
  });
  if (spilt) ReturnBudget(std::exchange(bytes_, 0));
}

absl::Status JobJournal::Remove() {
  // At once: a fence waits for its promise in the catalog alone, and not for a log that hangs.
  (void)End([this] {
    core_->mu.AssertHeld();
    promises_.KeptHere();
  });
  ReturnBudget(std::exchange(bytes_, 0));
  BALLAST_RETURN_IF_ERROR(RemoveLog(*core_->around.tiers, core_->name));
  return core_->around.catalog->ErasePrefix(absl::StrCat(CatalogPrefix(core_->name), kCatalogLog));
}

absl::Status JobJournal::TakeRecovered(uint64_t life, uint64_t file_bytes, uint64_t last_lsn) {
  BALLAST_RETURN_IF_ERROR(core_->around.tiers->Take(storage::TierKind::kNvme, file_bytes, "the gradient log",
                                                    storage::TierPart::kLog, core_->around.account.get()));
  life_ = life;
  bytes_ = file_bytes;
  JobMutexLock lock(&core_->mu);
  promises_.KeptElsewhere(last_lsn + 1);
  return absl::OkStatus();
}

// An undecided step keeps its log segments however often the server restarts, and each restart takes a further segment.
// Slices must find room again, or the step would never be decided.
absl::Status JobJournal::ExtendForRestart() {
  const auto [journal, segment_bytes, free] = segments();
  if (free >= kFreeForRestart) return absl::OkStatus();
  const uint64_t bytes = (kFreeForRestart - free) * segment_bytes;
  absl::Status status = core_->around.tiers->Take(storage::TierKind::kNvme, bytes, "segments of the gradient log",
                                                  storage::TierPart::kLog, core_->around.account.get());
  if (status.ok()) {
    status = journal->Extend(kFreeForRestart - free, [this] { return core_->Interrupted(); });
    if (status.ok()) {
      bytes_ += bytes;
      return absl::OkStatus();
    }
    ReturnBudget(bytes);
    JobMutexLock lock(&core_->mu);
    if (!absl::IsResourceExhausted(status) || !journal->status().ok()) return status;
  }
  if (free == 0) return status;  // nothing more can be written
  spdlog::warn("job '{}': its gradient log stays short after restarts in a row: {}", core_->name,
               std::string(status.message()));
  return absl::OkStatus();
}

bool JobJournal::IsShortForRestart() const { return durable() && journal_->free_segments() < kFreeForRestart; }

absl::StatusOr<bool> JobJournal::RollForRestart() {
  BALLAST_RETURN_IF_ERROR(MakeRoom(1, 0));
  return journal_->free_segments() < kLogSegmentsReserved;
}

}  // namespace ballast::services
