// How class Job comes back after a restart: chunks from their newest durable versions, the step machine and the later
// versions from the log. Nothing is asked of other servers.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/io/seeded_bugs.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::services {

// Where the replay of a log is.
struct Job::Replaying {
  struct Slice {
    v1::PushRequest header;
    storage::PayloadPlace payload;
  };
  const storage::BlockFile* file = nullptr;
  // Of the step that is not decided yet, in the epoch that is open.
  std::vector<Slice> slices;
  uint64_t steps = 0;
  uint64_t payload_bytes = 0;
  // The updates of the last decided step, if slices of the next one are read meanwhile.
  std::thread updates;
  bool updating = false;  // guarded by the job's lock
  absl::Status updated;

  ~Replaying() { (void)FinishUpdates(); }
  absl::Status FinishUpdates() {
    if (updates.joinable()) updates.join();
    return updated;
  }
  absl::Time said = absl::Now();
};

// A slice on its way from the log to its chunk.
struct Job::SliceLoad {
  std::shared_ptr<HeldChunk> chunk;
  Intake::Receipt receipt;
  storage::PayloadPlace payload;
  absl::Status status;
};

namespace {

constexpr absl::Duration kProgressEvery = absl::Seconds(2);
// Slices that are read together: of chunks that the last step's update is through with, while it goes on.
constexpr size_t kLoadsMax = 16;

absl::Status LogMissing(const std::string& name, size_t chunks, const absl::Status& cause) {
  return model::Error(absl::StatusCode::kDataLoss, model::kStateLost,
                      absl::StrCat("job '", name, "' has ", chunks, " durable chunks and no gradient log: ",
                                   cause.message(), "; was the data directory copied in part, or a drop interrupted?"));
}

}  // namespace

absl::Status Job::Recover(const CatalogEntry& entry) {
  storage::ScannedLog scanned;
  auto log = storage::GradientLog::Recover(around_.tiers->disk(), journal_path(), &scanned);
  const absl::Time began = absl::Now();
  if (absl::IsNotFound(log.status()) && entry.chunks.empty() && !entry.has_log) {
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
  const uint64_t file_bytes = (*log)->file_bytes();
  BALLAST_RETURN_IF_ERROR(around_.tiers->Take(storage::TierKind::kNvme, file_bytes, "the gradient log"));
  journal_bytes_ = file_bytes;
  for (const storage::DurableChunk& chunk : entry.chunks) durable_chunks_[chunk.id] = chunk;
  {
    absl::MutexLock lock(&mu_);
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
    // Slices of older epochs are void.
    if (const auto* open = std::get_if<OpenRecord>(&record)) {
      for (size_t j = 0; j <= segment; ++j) keep[j] = std::min(keep[j], open->open.base());
    }
    BALLAST_RETURN_IF_ERROR(ReplayRecord(record, scanned.records[i].payload, &replaying));
  }
  const bool forgotten = Seeded(storage::StorageBug::kSegmentsForgotten);
  for (size_t i = 0; i < keep.size(); ++i) (*log)->Keep(scanned.live[i].incarnation, forgotten ? -1 : keep[i]);
  // What was pushed for the step in flight; without its bytes the machine would count slices that are not there.
  int64_t committed = -1;
  std::set<uint64_t> attempts;
  for (const Replaying::Slice& slice : replaying.slices) attempts.insert(slice.header.attempt());
  {
    absl::MutexLock lock(&mu_);
    committed = machine_->committed();
  }
  if (Seeded(storage::StorageBug::kUndecidedForgotten)) attempts.clear();
  for (const uint64_t attempt : attempts) BALLAST_RETURN_IF_ERROR(LoadSlices(attempt, committed + 1, &replaying));
  BALLAST_RETURN_IF_ERROR(replaying.FinishUpdates());
  {
    absl::MutexLock lock(&mu_);
    if (const v1::GetJobResponse job = machine_->Describe(); job.has_prepared()) {
      for (const auto& chunk : chunks_) BALLAST_RETURN_IF_ERROR(CheckHeld(*chunk, job.prepared()));
    }
  }
  if (!durable_chunks_.empty()) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("the catalog knows ", durable_chunks_.size(), " chunks of job '", name_,
                                     "' that its log does not register, the first is ", durable_chunks_.begin()->first,
                                     "; run `ballastctl verify`"));
  }
  if (entry.promised.has_value()) BALLAST_RETURN_IF_ERROR(Replay(PromiseRecord{*entry.promised}));
  applied_ = committed;
  storage::Pass("recovery/replayed");
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    recovering_ = false;
    store = store_;
  }
  StartJournal(*std::move(log));
  BALLAST_RETURN_IF_ERROR(ExtendForRestart());
  // A restart takes a segment. Where few are left, what came before goes to the chunks, so that restarts in a row
  // cannot fill the log.
  bool few = false;
  {
    absl::MutexLock lock(&mu_);
    BALLAST_RETURN_IF_ERROR(MakeJournalRoom(1, 0));
    few = journal_->log().free_segments() < Journal::kSegmentsReserved;
  }
  storage::Pass("recovery/rolled");
  if (store != nullptr && few) FlushAll();
  spdlog::info("job '{}': recovered step {} in {:.2f} s: {} chunks, {} steps and {} MiB of slices replayed{}", name_,
               committed, absl::ToDoubleSeconds(absl::Now() - began), entry.chunks.size(), replaying.steps,
               replaying.payload_bytes >> 20,
               scanned.repaired_blocks > 0
                   ? absl::StrCat(", ", scanned.repaired_blocks, " damaged blocks of the log read from their copies")
                   : "");
  absl::MutexLock lock(&mu_);
  return failure_;
}

// A step that is not decided keeps its segments however often the server restarts, and each restart takes one more:
// slices must find room again, or the step would never be decided.
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
    spdlog::warn("job '{}': its gradient log stays short after restarts in a row: {}", name_,
                 std::string(taken.message()));
    return absl::OkStatus();
  }
  if (const absl::Status extended = journal->log().Extend(kWanted - free); !extended.ok()) {
    around_.tiers->Return(storage::TierKind::kNvme, bytes);
    return extended;
  }
  journal_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status Job::ReplayRecord(const StepRecord& record, const storage::PayloadPlace& payload, Replaying* replaying) {
  // What is pushed and prepared for the next step leaves the chunks alone; anything else finds the last one applied.
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
    // What the log was cut of is in the chunks.
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
  BALLAST_RETURN_IF_ERROR(LoadSlices(decision->decision.attempt(), step, replaying));
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
  ++replaying->steps;
  if (absl::Now() - replaying->said > kProgressEvery) {
    replaying->said = absl::Now();
    spdlog::info("job '{}': recovering, at step {}, {} MiB of slices replayed", name_, step,
                 replaying->payload_bytes >> 20);
  }
  const auto update = [this, store, work] {
    const absl::Status status = RunUpdates(store.get(), work.get());
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
  if (*chunk.version >= prepared.step() || chunk.intake.Holds(prepared.header(), prepared.attempt())) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                      absl::StrCat("chunk ", chunk.id, " of job '", name_, "' is at version ", *chunk.version,
                                   ", and the log ", journal_path(), " does not hold all slices that step ",
                                   prepared.step(), " applies to it. Run `ballastctl verify --rebuild`"));
}

absl::Status Job::LoadSlices(uint64_t attempt, int64_t step, Replaying* replaying) {
  std::vector<SliceLoad> loads;
  for (const Replaying::Slice& slice : replaying->slices) {
    if (slice.header.attempt() != attempt || slice.header.step() != step) continue;
    uint32_t index = 0;
    SliceLoad load;
    load.payload = slice.payload;
    bool busy = false;
    {
      absl::MutexLock lock(&mu_);
      load.chunk = FindSliceChunk(slice.header, &index);
      if (load.chunk == nullptr) {
        return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                            absl::StrCat("the log of job '", name_, "' holds a slice of step ", step,
                                         " that its epoch's tiling does not give to this server"));
      }
      if (*load.chunk->version >= step && !Seeded(storage::StorageBug::kReplayedTwice)) continue;
      const uint64_t start = load.chunk->layout.range.begin;
      busy = load.chunk->intake.Busy({slice.header.begin() - start, slice.header.end() - start});
    }
    // Values and gradients of the same elements, one after the other.
    if (busy || loads.size() == kLoadsMax) BALLAST_RETURN_IF_ERROR(ReadSlices(&loads, replaying));
    {
      absl::MutexLock lock(&mu_);
      const auto free = [&] {
        mu_.AssertHeld();
        return load.chunk->updates_pending == 0 || !replaying->updating;
      };
      mu_.Await(absl::Condition(&free));
      BALLAST_ASSIGN_OR_RETURN(load.receipt, load.chunk->intake.BeginReceive(index, slice.header.kind(), attempt));
    }
    loads.push_back(std::move(load));
  }
  return ReadSlices(&loads, replaying);
}

absl::Status Job::ReadSlices(std::vector<SliceLoad>* loads, Replaying* replaying) {
  const uint64_t gradient_bytes = loads->empty() ? 0 : store_->layout().gradient_element_bytes();
  const auto read = [&](uint64_t i) {
    SliceLoad& load = (*loads)[i];
    const bool value = load.receipt.kind == v1::SLICE_KIND_VALUE;
    const uint64_t bytes = load.receipt.range.size() * (value ? sizeof(float) : gradient_bytes);
    load.status = load.payload.bytes == bytes
                      ? storage::ReadPayload(*replaying->file, load.payload, {load.receipt.to, bytes})
                      : model::Error(absl::StatusCode::kDataLoss, model::kBadLength,
                                     absl::StrCat("a slice in the log of job '", name_, "' has ", load.payload.bytes,
                                                  " bytes, expected ", bytes));
  };
  // Several at a time: one is checked while others are on their way from the disk.
  around_.compute->ParallelFor(loads->size(), read);
  absl::Status status;
  absl::MutexLock lock(&mu_);
  for (const SliceLoad& load : *loads) {
    load.chunk->intake.EndRestore(load.receipt);
    replaying->payload_bytes += load.payload.bytes;
    status.Update(load.status);
  }
  loads->clear();
  return status;
}

}  // namespace ballast::services
