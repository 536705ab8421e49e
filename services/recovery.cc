// How class Job comes back after a restart: the chunks from their newest durable versions; the step machine and the
// later versions from the log. Asks nothing of other servers.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/replaying.h"
#include "ballast/storage/faults/failpoint.h"
#include "ballast/storage/faults/seeded_bugs.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::services {

namespace {

constexpr absl::Duration kProgressEvery = absl::Seconds(2);

absl::Status LogMissing(const std::string& name, size_t chunks, const absl::Status& cause) {
  return model::Error(absl::StatusCode::kDataLoss, model::kStateLost,
                      absl::StrCat("job '", name, "' has ", chunks, " durable chunks and no gradient log: ",
                                   cause.message(), "; was the data directory copied in part, or a drop interrupted?"));
}

}  // namespace

// A name may have stood for several jobs, one after the other, whose files must not be mixed.
absl::Status Job::CheckLife(const JobEntry& entry, uint64_t life, absl::string_view whose) {
  const auto refuse = [&](absl::string_view what, uint64_t other) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat(whose, " is of life ", ShowLife(life), " of job '", name_, "', and ", what,
                                     " of life ", ShowLife(other),
                                     ": one of the two is a copy from before the job was dropped and made again. Bring "
                                     "back what belongs together; `ballastctl verify` lists it"));
  };
  if (entry.life.value_or(life) != life) return refuse("the catalog's entry", *entry.life);
  for (const storage::DurableChunk& chunk : entry.chunks) {
    if (chunk.life != life) return refuse(absl::StrCat("the catalog's chunk ", chunk.id), chunk.life);
  }
  for (const v1::PinnedVersion& pin : entry.pins) {
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      if (chunk.life != life) return refuse(absl::StrCat("the catalog's pin of version ", pin.version()), chunk.life);
    }
  }
  life_ = life;
  return absl::OkStatus();
}

absl::Status Job::Recover(const JobEntry& entry) {
  storage::ScannedLog scanned;
  auto log = storage::GradientLog::Recover(around_.tiers->disk(), journal_path(), &scanned);
  const absl::Time began = absl::Now();
  if (absl::IsNotFound(log.status()) && entry.chunks.empty() && entry.pins.empty() && !entry.life.has_value()) {
    // The log was still being made: no step was ever prepared.
    if (entry.promised.has_value()) return Replay(PromiseRecord{*entry.promised});
    return absl::OkStatus();
  }
  if (absl::IsNotFound(log.status())) return LogMissing(name_, entry.chunks.size(), log.status());
  BALLAST_RETURN_IF_ERROR(log.status());
  if (scanned.name != name_) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat(journal_path(), " is the log of job '", scanned.name, "', not of '", name_, "'"));
  }
  BALLAST_RETURN_IF_ERROR(CheckLife(entry, scanned.life, journal_path()));
  const uint64_t file_bytes = (*log)->file_bytes();
  BALLAST_RETURN_IF_ERROR(around_.tiers->Take(storage::TierKind::kNvme, file_bytes, "the gradient log"));
  journal_bytes_ = file_bytes;
  for (const storage::DurableChunk& chunk : entry.chunks) durable_chunks_[chunk.id] = chunk;
  RememberPins(entry.pins);
  {
    absl::MutexLock lock(&mu_);
    for (const v1::PinnedVersion& pin : entry.pins) machine_->Pinned(pin);
    recovering_ = true;
    durable_ = true;
    log_.KeptElsewhere(scanned.records.empty() ? 1 : scanned.records.back().lsn + 1);
  }
  Replaying replaying;
  replaying.file = &(*log)->file();
  std::vector<int64_t> keep(scanned.live.size(), -1);
  size_t segment = 0;
  for (size_t i = 0; i < scanned.records.size(); ++i) {
    while (segment + 1 < scanned.live.size() && scanned.live[segment + 1].first_record <= i) ++segment;
    BALLAST_ASSIGN_OR_RETURN(const StepRecord record, DecodeRecord(scanned.records[i]));
    if (const auto* slice = std::get_if<SliceRecord>(&record)) {
      keep[segment] = std::max(keep[segment], slice->header.step());
    }
    // A restore has no slices: a replay needs its prepared record.
    if (const auto* prepared = std::get_if<PreparedStepRecord>(&record);
        prepared != nullptr && prepared->prepared.header().kind() == v1::STEP_KIND_RESTORE) {
      keep[segment] = std::max(keep[segment], prepared->prepared.step());
    }
    // Slices of older epochs are void.
    if (const auto* open = std::get_if<OpenRecord>(&record)) {
      for (size_t j = 0; j <= segment; ++j) keep[j] = std::min(keep[j], open->open.base());
    }
    BALLAST_RETURN_IF_ERROR(ReplayRecord(record, scanned.records[i].payload, &replaying));
  }
  const bool forgotten = Seeded(storage::StorageBug::kSegmentsForgotten);
  for (size_t i = 0; i < keep.size(); ++i) (*log)->Keep(scanned.live[i].incarnation, forgotten ? -1 : keep[i]);
  // The slices pushed for the step in flight: without their bytes the machine would count slices that are missing.
  int64_t committed = -1;
  std::optional<v1::PreparedRecord> prepared;
  std::set<uint64_t> attempts;
  for (const Replaying::Slice& slice : replaying.slices) attempts.insert(slice.header.attempt());
  {
    absl::MutexLock lock(&mu_);
    committed = machine_->committed();
    if (v1::GetJobResponse job = machine_->Describe(); job.has_prepared())
      prepared = std::move(*job.mutable_prepared());
  }
  if (Seeded(storage::StorageBug::kUndecidedForgotten)) attempts.clear();
  for (const uint64_t attempt : attempts) {
    // A rank that has not heard that all servers prepared the step keeps its gradients, and is told what is missing.
    const bool needed = prepared.has_value() && prepared->attempt() == attempt;
    BALLAST_RETURN_IF_ERROR(
        LoadSlices(attempt, committed + 1, needed ? SliceUse::kPrepared : SliceUse::kPushed, &replaying));
  }
  if (!attempts.empty()) {
    // Otherwise a lower attempt would count as the step's first, and the next higher attempt would have the log release
    // this attempt's slices.
    absl::MutexLock lock(&mu_);
    logged_attempt_ = {committed + 1, *attempts.rbegin()};
  }
  BALLAST_RETURN_IF_ERROR(replaying.FinishUpdates());
  if (prepared.has_value()) {
    absl::MutexLock lock(&mu_);
    for (const auto& chunk : chunks_) BALLAST_RETURN_IF_ERROR(CheckHeld(*chunk, *prepared));
  }
  BALLAST_RETURN_IF_ERROR(CheckLogReaches(entry));
  if (!durable_chunks_.empty() || !pinned_chunks_.empty()) {
    const uint64_t first = durable_chunks_.empty() ? pinned_chunks_.begin()->first : durable_chunks_.begin()->first;
    return model::Error(
        absl::StatusCode::kDataLoss, model::kDiverged,
        absl::StrCat("the catalog knows ", durable_chunks_.size(), " chunks of job '", name_, "' and ",
                     pinned_chunks_.size(), " that are pinned, which its log does not register, the first is ", first,
                     "; run `ballastctl verify`"));
  }
  // The log may have the newer promise: each is written on its own.
  if (entry.promised.has_value() && model::Compare(*entry.promised, promised()) > 0) {
    BALLAST_RETURN_IF_ERROR(Replay(PromiseRecord{*entry.promised}));
  }
  applied_ = committed;
  storage::Pass("recovery/replayed");
  {
    absl::MutexLock lock(&mu_);
    recovering_ = false;
  }
  NoteLeastDram(0);
  StartJournal(*std::move(log), /*durable=*/true);
  spdlog::info("job '{}': recovered step {} in {:.2f} s: {} chunks, {} steps and {} MiB of slices replayed{}", name_,
               committed, absl::ToDoubleSeconds(absl::Now() - began), entry.chunks.size(), replaying.steps,
               replaying.payload_bytes >> 20,
               scanned.repaired_blocks > 0
                   ? absl::StrCat(", ", scanned.repaired_blocks, " damaged blocks of the log read from their copies")
                   : "");
  absl::MutexLock lock(&mu_);
  return failure_;
}

// Without this check steps would pass over chunks that seem to have had them.
absl::Status Job::CheckLogReaches(const JobEntry& entry) const {
  absl::MutexLock lock(&mu_);
  int64_t applied = entry.committed;
  for (const auto& chunk : chunks_) applied = std::max(applied, chunk->version.value_or(-1));
  const int64_t committed = machine_->committed();
  // The decision behind a durable prepared record need not be durable.
  if (applied <= committed + (machine_->Describe().has_prepared() ? 1 : 0)) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kDataLoss, model::kDiverged,
      absl::StrCat("the log of job '", name_, "' ends at step ", committed, ", and the server had applied step ",
                   applied,
                   ": the log is an older copy, or its end is damaged. Bring the newer one back, or drop the job; "
                   "`ballastctl verify` tells more"));
}

absl::Status Job::EndRecovery() {
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    if (journal_ == nullptr) return absl::OkStatus();
    store = store_;
  }
  BALLAST_RETURN_IF_ERROR(ExtendForRestart());
  // A restart takes a log segment. If few are left, all chunks are flushed, so that restarts in a row cannot fill the
  // log.
  bool few = false;
  {
    absl::MutexLock lock(&mu_);
    flush_posted_ = true;  // the store has one user at a time: now this thread
    BALLAST_RETURN_IF_ERROR(MakeJournalRoom(1, 0));
    few = journal_->log().free_segments() < Journal::kSegmentsReserved;
  }
  storage::Pass("recovery/rolled");
  if (store != nullptr && few) FlushAll();
  absl::MutexLock lock(&mu_);
  flush_posted_ = false;
  return failure_;
}

// An undecided step keeps its log segments however often the server restarts, and each restart takes a further segment.
// Slices must find room again, or the step would never be decided.
absl::Status Job::ExtendForRestart() {
  std::shared_ptr<Journal> journal;
  {
    absl::MutexLock lock(&mu_);
    journal = journal_;
  }
  constexpr uint64_t kWanted = Journal::kSegmentsReserved + 2;  // for this restart, and for slices
  const uint64_t free = journal->log().free_segments();
  if (free >= kWanted) return absl::OkStatus();
  const uint64_t bytes = (kWanted - free) * journal->log().segment_bytes();
  if (absl::Status taken = around_.tiers->Take(storage::TierKind::kNvme, bytes, "segments of the gradient log");
      !taken.ok()) {
    if (free == 0) return taken;  // nothing more can be written
    spdlog::warn("job '{}': its gradient log stays short after restarts in a row: {}", name_,
                 std::string(taken.message()));
    return absl::OkStatus();
  }
  if (const absl::Status extended = journal->log().Extend(kWanted - free); !extended.ok()) {
    around_.tiers->Return(storage::TierKind::kNvme, bytes);
    if (free == 0 || !absl::IsResourceExhausted(extended) || !journal->log().status().ok()) return extended;
    spdlog::warn("job '{}': its gradient log stays short after restarts in a row: {}", name_,
                 std::string(extended.message()));
    return absl::OkStatus();
  }
  journal_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status Job::ReplayRecord(const StepRecord& record, const storage::PayloadPlace& payload, Replaying* replaying) {
  // Pushes and the prepared record of the next step leave the chunks alone; other records find the last step applied.
  const bool waits = std::holds_alternative<OpenRecord>(record) || std::holds_alternative<SnapshotRecord>(record) ||
                     std::holds_alternative<PromiseRecord>(record);
  if (waits) BALLAST_RETURN_IF_ERROR(replaying->FinishUpdates());
  if (const auto* open = std::get_if<OpenRecord>(&record)) {
    if (!Seeded(storage::StorageBug::kOldEpochReplayed)) replaying->slices.clear();
    return ReplayOpen(open->open, record);
  }
  if (const auto* snapshot = std::get_if<SnapshotRecord>(&record)) {
    bool first = false;
    {
      absl::MutexLock lock(&mu_);
      first = plan_ == nullptr;
    }
    if (!first || !snapshot->snapshot.has_open()) {
      absl::MutexLock lock(&mu_);
      return machine_->Replay(record);
    }
    BALLAST_RETURN_IF_ERROR(ReplayOpen(snapshot->snapshot.open(), record));
    absl::MutexLock lock(&mu_);
    BALLAST_RETURN_IF_ERROR(CheckChanged(snapshot->snapshot));
    // The chunks have the steps that were cut from the log.
    for (const auto& chunk : chunks_) chunk->version = std::max(*chunk->version, snapshot->snapshot.committed());
    return absl::OkStatus();
  }
  if (const auto* slice = std::get_if<SliceRecord>(&record)) replaying->slices.push_back({slice->header, payload});
  const auto* decision = std::get_if<DecisionRecord>(&record);
  if (decision == nullptr) {
    absl::MutexLock lock(&mu_);
    return machine_->Replay(record);
  }
  const int64_t step = decision->decision.step();
  BALLAST_RETURN_IF_ERROR(LoadSlices(decision->decision.attempt(), step, SliceUse::kDecided, replaying));
  storage::Pass("recovery/slices_loaded");
  replaying->slices.clear();
  BALLAST_RETURN_IF_ERROR(replaying->FinishUpdates());
  std::shared_ptr<StepWork> work;
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    BALLAST_RETURN_IF_ERROR(machine_->Replay(record));
    work = std::exchange(replayed_, nullptr);
    BALLAST_RETURN_IF_ERROR(work->incomplete);
    store = store_;
    for (const auto& chunk : work->untouched) chunk->version = step;
  }
  BALLAST_RETURN_IF_ERROR(PrepareReadBack(work.get()));
  applied_ = step;
  ++replaying->steps;
  if (absl::Now() - replaying->said > kProgressEvery) {
    replaying->said = absl::Now();
    spdlog::info("job '{}': recovering, at step {}, {} MiB of slices replayed", name_, step,
                 replaying->payload_bytes >> 20);
  }
  const auto update = [this, store, work, log = replaying->file] {
    const absl::Status status = RunUpdates(store.get(), work.get(), log);
    storage::Pass("recovery/step_replayed");
    return status;
  };
  if (around_.compute->threads() == 1) return update();
  {
    absl::MutexLock lock(&mu_);
    replaying->updating = true;
  }
  replaying->updates = std::thread([this, update, replaying] {
    replaying->updated = update();
    absl::MutexLock lock(&mu_);
    replaying->updating = false;
  });
  return absl::OkStatus();
}

absl::Status Job::ReplayOpen(const v1::OpenRequest& open, const StepRecord& record) {
  std::vector<std::shared_ptr<HeldChunk>> chunks;
  BALLAST_RETURN_IF_ERROR(TakeChunks(open, &chunks));
  BALLAST_RETURN_IF_ERROR(TakeBackPins(chunks));
  absl::MutexLock lock(&mu_);
  opening_ = std::make_unique<Opening>();
  opening_->chunks = std::move(chunks);
  const absl::Status status = machine_->Replay(record);
  opening_.reset();
  storage::Pass("recovery/opened");
  return status;
}

absl::Status Job::CheckChanged(const v1::LogSnapshot& snapshot) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<int64_t> changed, DecodeChanged(snapshot, chunks_.size()));
  for (size_t i = 0; i < chunks_.size(); ++i) {
    HeldChunk& chunk = *chunks_[i];
    chunk.changed = changed[i];
    const int64_t durable = store_->durable_version(chunk.store_index);
    if (durable >= changed[i]) continue;
    return model::Error(
        absl::StatusCode::kDataLoss, model::kStateLost,
        absl::StrCat("the catalog ", durable < 0 ? "names no state" : absl::StrCat("names version ", durable),
                     " of chunk ", chunk.id, " of job '", name_, "', which step ", changed[i], " changed, and the log ",
                     journal_path(), " begins behind step ", snapshot.committed(),
                     ": the catalog's entry is lost or an older copy. Run `ballastctl verify --rebuild`"));
  }
  return absl::OkStatus();
}

absl::Status Job::CheckHeld(const HeldChunk& chunk, const v1::PreparedRecord& prepared) const {
  const int64_t restored = prepared.header().restored_version();
  if (*chunk.version < prepared.step() && prepared.header().kind() == v1::STEP_KIND_RESTORE &&
      machine_->FindPin(restored) == nullptr) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("version ", restored, ", which step ", prepared.step(),
                                     " restores, is not pinned any more in the catalog of job '", name_, "'"));
  }
  if (*chunk.version >= prepared.step() || chunk.intake.Holds(prepared.header(), prepared.attempt())) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                      absl::StrCat("chunk ", chunk.id, " of job '", name_, "' is at version ", *chunk.version,
                                   ", and the log ", journal_path(), " does not hold all slices that step ",
                                   prepared.step(), " applies to it. Run `ballastctl verify --rebuild`"));
}

}  // namespace ballast::services
