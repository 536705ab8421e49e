#include "ballast/services/durability/job_journal.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <random>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/records/data_files.h"
#include "ballast/services/records/job_entry.h"

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

std::shared_ptr<Journal> JobJournal::journal() const {
  JobMutexLock lock(&core_->mu);
  return journal_;
}

JobJournal::Use JobJournal::use() const {
  Use use;
  if (journal_ != nullptr) {
    const storage::GradientLog& log = journal_->log();
    use.capacity_bytes = log.file_bytes();
    use.used_bytes = log.file_bytes() - log.free_segments() * log.segment_bytes();
  }
  use.waited = waited_ + (waits_for_cut_ ? absl::Now() - waits_since_ : absl::ZeroDuration());
  return use;
}

uint64_t JobJournal::Append(const StepRecord& record) {
  const auto* slice = std::get_if<SliceRecord>(&record);
  if (slice == nullptr) core_->moved = true;
  const uint64_t lsn = slice == nullptr ? core_->promises.Append(record) : core_->promises.Skip();
  // Lent slices have no bytes here, and are lent only to jobs without a log.
  const bool bytes = slice != nullptr && slice->bytes != nullptr;
  if (journal_ == nullptr || (!logs() && !(bytes && slice->bytes->receipt.logged))) return lsn;
  storage::LogRecord out = EncodeRecord(record);
  out.lsn = lsn;
  if (bytes) AddSlice(slice->bytes, slice->header, &out);
  // No slice of a restore keeps its step in the log until the chunks are flushed.
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record);
      prepared != nullptr && prepared->prepared.header().kind() == v1::STEP_KIND_RESTORE) {
    out.keep_for = prepared->prepared.step();
  }
  journal_->log().Append(std::move(out));
  if (std::holds_alternative<PreparedStepRecord>(record)) core_->counters.steps.Appended();
  return lsn;
}

void JobJournal::AddSlice(PushedSlice* slice, const v1::PushRequest& header, storage::LogRecord* out) {
  NoteAttempt(header.step(), header.attempt());
  slice->appended = true;
  const Intake::Receipt& receipt = slice->receipt;
  out->payload = {receipt.to, slice->bytes};
  out->payload_crc32c = header.crc32c();
  out->parity = std::move(slice->parity);
  out->keep_for = header.step();
  slice->chunk->intake.BeginLogging(receipt);
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
  if (step == attempt_.first) journal_->log().Release(core_->machine->committed());
  attempt_ = arrived;
}

bool JobJournal::IsSuperseded(const v1::PushRequest& header) const {
  return journal_ != nullptr && header.step() == attempt_.first && header.attempt() < attempt_.second;
}

void JobJournal::Sync(uint64_t lsn) {
  core_->promises.Sync(lsn);
  if (logs()) journal_->log().Sync(lsn);
}

void JobJournal::Opened() {
  // Slices of older epochs are void, the log need not keep them.
  if (journal_ != nullptr) journal_->log().Release(core_->machine->committed());
  attempt_ = {-1, 0};
  norm_bytes_max_ = sealed_bytes_max_ = step_bytes_ = values_bytes_ = 0;
  for (const auto& chunk : core_->chunks) {
    values_bytes_ += storage::RecordCostMax(Journal::kSliceBodyBytesMax, chunk->elements * sizeof(float));
    if (chunk->is_frozen()) continue;
    norm_bytes_max_ += NormBytesMax(chunk->layout);
    step_bytes_ += storage::RecordCostMax(Journal::kSliceBodyBytesMax,
                                          chunk->elements * core_->store->layout().gradient_element_bytes());
  }
}

storage::LogRecord JobJournal::Snapshot() {
  SnapshotRecord record;
  if (core_->recoverable) {
    record.snapshot = core_->machine->Snapshot();
    std::vector<int64_t> changed;
    for (const auto& chunk : core_->chunks) changed.push_back(chunk->changed);
    EncodeChanged(changed, &record.snapshot);
  }
  storage::LogRecord snapshot = EncodeRecord(record);
  snapshot.lsn = core_->promises.Append(record);
  return snapshot;
}

absl::Status JobJournal::MakeRoom(uint64_t records, uint64_t bytes, uint64_t payload_bytes) {
  bool rolls = false;
  const absl::Status made = journal_->MakeRoom(records, bytes, payload_bytes, [&] {
    core_->mu.AssertHeld();
    rolls = true;
    return Snapshot();
  });
  // Slices never use the reserve; fences and Opens without a step between them would use it up.
  if (rolls && logs() && core_->store != nullptr && journal_->IsShort()) post_flush_();
  return made;
}

absl::Status JobJournal::MakeRoom(uint64_t records, uint64_t bytes) {
  return logs() ? MakeRoom(records, bytes, 0) : absl::OkStatus();
}

absl::Status JobJournal::MakeRoomForSeal(const v1::SealRequest& seal) {
  // The written record has the seal of the first rank, whichever rank seals last.
  const uint64_t sealed_bytes = std::max<uint64_t>(sealed_bytes_max_, seal.ByteSizeLong());
  constexpr uint64_t kStepCountBytesMax = 10;  // a step count of a restore, as protobuf encodes it
  const uint64_t step_counts = core_->machine->tensor_steps().size() * kStepCountBytesMax;
  return MakeRoom(1, sealed_bytes + norm_bytes_max_ + step_counts + kSmallRecordBytesMax);
}

void JobJournal::NoteSealed(const v1::SealRequest& seal) {
  sealed_bytes_max_ = std::max<uint64_t>(sealed_bytes_max_, seal.ByteSizeLong());
}

JobJournal::RecordNeeds JobJournal::NeedsOfSlice() const {
  if (!logs()) return {1, Journal::kSliceBodyBytesMax};
  // The slice may be the last for a sealed step, whose prepared record then comes along.
  return {2, 2 * Journal::kSliceBodyBytesMax + sealed_bytes_max_ + norm_bytes_max_};
}

bool JobJournal::HasRoomForSlice(uint64_t payload_bytes, bool logged) const {
  if (journal_ == nullptr || !(logs() || logged)) return true;
  const auto [records, record_bytes] = NeedsOfSlice();
  return journal_->HasRoomForSlice(records, record_bytes, payload_bytes);
}

void JobJournal::WaitForCut() {
  if (!std::exchange(waits_for_cut_, true)) waits_since_ = absl::Now();
  post_flush_();
}

absl::Status JobJournal::MakeRoomForSlice(uint64_t payload_bytes, bool logged) {
  if (journal_ == nullptr || !(logs() || logged)) return absl::OkStatus();
  const auto [records, record_bytes] = NeedsOfSlice();
  return MakeRoom(records, record_bytes, payload_bytes);
}

absl::Status JobJournal::CheckFits(uint64_t snapshot_bytes, uint64_t slice_bytes) const {
  return logs() ? journal_->CheckFits(snapshot_bytes, slice_bytes) : absl::OkStatus();
}

std::optional<uint64_t> JobJournal::StepsFree() const {
  if (!logs()) return std::nullopt;
  return journal_->StepsFree(step_bytes_);
}

std::optional<uint64_t> JobJournal::StepsHeld() const {
  if (!logs() || step_bytes_ == 0) return std::nullopt;
  return journal_->StepsHeld(step_bytes_, values_bytes_);
}

void JobJournal::Cut(int64_t version) {
  if (journal_ == nullptr) return;
  journal_->log().Cut(version);
  if (!journal_->log().cut_lacks_room()) return;
  // Slices may wait for the room that the cut frees, and nothing else may begin another log segment.
  if (const absl::Status made = MakeRoom(1, 2 * storage::kLogBlock, 1); !made.ok()) {
    spdlog::warn("job '{}': a cut of its gradient log waits: {}", core_->name, std::string(made.message()));
  }
}

const storage::BlockFile* JobJournal::file() const { return journal_ == nullptr ? nullptr : &journal_->log().file(); }

uint64_t JobJournal::segment_bytes() const { return journal_ == nullptr ? 0 : journal_->log().segment_bytes(); }

bool JobJournal::Holds(const JournalSize& size) const {
  JobMutexLock lock(&core_->mu);
  if (core_->recovering) return true;  // the log is being read
  return journal_ != nullptr && journal_->log().file_bytes() >= size.bytes();
}

absl::StatusOr<JobJournal::Growth> JobJournal::TakeBudget(const JournalSize& size, bool logged) {
  Growth growth{.size = size, .logged = logged};
  if (Holds(size)) return growth;
  {
    JobMutexLock lock(&core_->mu);
    growth.bytes = size.bytes() - (journal_ == nullptr ? 0 : journal_->log().file_bytes());
  }
  BALLAST_RETURN_IF_ERROR(core_->around.tiers->Take(storage::TierKind::kNvme, growth.bytes, "the gradient log",
                                                    storage::TierPart::kLog, core_->around.account.get()));
  return growth;
}

absl::Status JobJournal::Grow(const Growth& growth) {
  if (growth.bytes == 0) return absl::OkStatus();
  absl::Status status;
  if (const std::shared_ptr<Journal> there = journal(); there != nullptr) {
    status = there->log().Extend(growth.bytes / there->log().segment_bytes(), [this] { return core_->Interrupted(); });
  } else {
    auto log = Create(growth);
    status = log.status();
    if (status.ok()) status = Start(*std::move(log), growth.logged);
  }
  if (!status.ok()) {
    core_->around.tiers->Return(storage::TierKind::kNvme, growth.bytes, storage::TierPart::kLog,
                                core_->around.account.get());
    return status;
  }
  bytes_ += growth.bytes;
  return absl::OkStatus();
}

absl::Status JobJournal::Lengthen(uint64_t steps) {
  JournalSize size;
  {
    JobMutexLock lock(&core_->mu);
    if (journal_ == nullptr) return absl::UnavailableError("the job is being stopped");
    size.segment_bytes = journal_->log().segment_bytes();
    size.segment_count = journal_->log().segments() + SegmentsFor(steps * step_bytes_, size.segment_bytes);
  }
  // Before the lock below: this may take locks of the server's.
  std::shared_ptr<void> lease;
  BALLAST_RETURN_IF_ERROR(
      core_->MayGrow(storage::TierKind::kNvme, size.bytes() - std::min(size.bytes(), bytes()), &lease));
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
  auto journal =
      std::make_shared<Journal>(std::move(log), logged ? Journal::kSegmentsReserved : Journal::kSpillSegmentsReserved);
  // The journal ends with Stop, before the job's end, so its thread may borrow the job.
  BALLAST_RETURN_IF_ERROR(core_->around.foundation->Pump(&journal->log(), [this] { Progressed(); }));
  JobMutexLock lock(&core_->mu);
  journal_ = std::move(journal);
  if (!logged) return absl::OkStatus();
  before_lsn_ = core_->promises.last_lsn();
  core_->journalled_lsn = before_lsn_;
  core_->recoverable = true;
  core_->promises.KeptElsewhere(0);
  return absl::OkStatus();
}

void JobJournal::Progressed() {
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (journal_ == nullptr) return;
    if (logs()) core_->journalled_lsn = std::max(journal_->log().durable_lsn(), before_lsn_);
    if (const absl::Status status = journal_->log().status(); !status.ok()) {
      core_->Fail(status, core_->Remedy(), replies);
    }
    if (!std::exchange(waits_for_cut_, false)) return;
    waited_ += absl::Now() - waits_since_;
    for (const auto& chunk : core_->chunks) core_->WakePushes(chunk.get(), replies);
  });
}

void JobJournal::Stop() {
  std::shared_ptr<Journal> journal;  // destroyed without the lock, which its thread takes
  bool spilt = false;
  {
    JobMutexLock lock(&core_->mu);
    journal.swap(journal_);
    spilt = journal != nullptr && !core_->recoverable;
    // A recoverable job without its journal is stopping: nothing more is reported as durable.
    if (core_->recoverable) core_->journalled_lsn = 0;
  }
  if (journal != nullptr) core_->around.foundation->StopPumping(&journal->log());
  journal.reset();
  if (!spilt) return;
  core_->around.tiers->Return(storage::TierKind::kNvme, std::exchange(bytes_, 0), storage::TierPart::kLog,
                              core_->around.account.get());
}

absl::Status JobJournal::Remove() {
  std::shared_ptr<Journal> journal;
  {
    JobMutexLock lock(&core_->mu);
    journal.swap(journal_);
    core_->recoverable = false;
    core_->journalled_lsn = ~uint64_t{0};
    core_->promises.KeptHere();
  }
  if (journal != nullptr) core_->around.foundation->StopPumping(&journal->log());
  journal.reset();
  core_->around.tiers->Return(storage::TierKind::kNvme, std::exchange(bytes_, 0), storage::TierPart::kLog,
                              core_->around.account.get());
  BALLAST_RETURN_IF_ERROR(RemoveLog(*core_->around.tiers, core_->name));
  return core_->around.catalog->ErasePrefix(absl::StrCat(CatalogPrefix(core_->name), kCatalogLog));
}

absl::Status JobJournal::TakeRecovered(uint64_t life, uint64_t file_bytes) {
  BALLAST_RETURN_IF_ERROR(core_->around.tiers->Take(storage::TierKind::kNvme, file_bytes, "the gradient log",
                                                    storage::TierPart::kLog, core_->around.account.get()));
  life_ = life;
  bytes_ = file_bytes;
  return absl::OkStatus();
}

// An undecided step keeps its log segments however often the server restarts, and each restart takes a further segment.
// Slices must find room again, or the step would never be decided.
absl::Status JobJournal::ExtendForRestart() {
  const std::shared_ptr<Journal> journal = this->journal();
  const uint64_t free = journal->log().free_segments();
  if (free >= kFreeForRestart) return absl::OkStatus();
  const uint64_t bytes = (kFreeForRestart - free) * journal->log().segment_bytes();
  absl::Status status = core_->around.tiers->Take(storage::TierKind::kNvme, bytes, "segments of the gradient log",
                                                  storage::TierPart::kLog, core_->around.account.get());
  if (status.ok()) {
    status = journal->log().Extend(kFreeForRestart - free, [this] { return core_->Interrupted(); });
    if (status.ok()) {
      bytes_ += bytes;
      return absl::OkStatus();
    }
    core_->around.tiers->Return(storage::TierKind::kNvme, bytes, storage::TierPart::kLog, core_->around.account.get());
    if (!absl::IsResourceExhausted(status) || !journal->log().status().ok()) return status;
  }
  if (free == 0) return status;  // nothing more can be written
  spdlog::warn("job '{}': its gradient log stays short after restarts in a row: {}", core_->name,
               std::string(status.message()));
  return absl::OkStatus();
}

bool JobJournal::IsShortForRestart() const { return logs() && journal_->log().free_segments() < kFreeForRestart; }

absl::StatusOr<bool> JobJournal::RollForRestart() {
  BALLAST_RETURN_IF_ERROR(MakeRoom(1, 0));
  return journal_->log().free_segments() < Journal::kSegmentsReserved;
}

}  // namespace ballast::services
