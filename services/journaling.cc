// How class Job keeps its journal: its records, and the flushes of chunks that allow the log to be cut.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/durability/flush_pace.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/records/data_files.h"
#include "ballast/storage/faults/failpoint.h"
#include "ballast/storage/faults/seeded_bugs.h"

namespace ballast::services {

std::string Job::journal_path() const { return LogPath(around_.tiers->directory(), name_); }
std::string Job::spill_path() const { return SpillPath(around_.tiers->directory(), name_); }

absl::Status Job::EnsureJournal(const NewChunks& wanted) {
  std::shared_ptr<Journal> journal;
  {
    absl::MutexLock lock(&mu_);
    if (recovering_) return absl::OkStatus();  // the log is being read
    journal = journal_;
  }
  const JournalSize size = JournalSizeOf(wanted, journal == nullptr ? 0 : journal->log().segment_bytes());
  const uint64_t bytes = journal == nullptr ? 0 : journal->log().file_bytes();
  if (bytes >= size.bytes()) return absl::OkStatus();
  const uint64_t missing = size.bytes() - bytes;
  BALLAST_RETURN_IF_ERROR(around_.tiers->Take(storage::TierKind::kNvme, missing, "the gradient log"));
  absl::Status status;
  if (journal != nullptr) {
    const uint64_t segments = missing / journal->log().segment_bytes();
    status = journal->log().Extend(segments);
  } else {
    if (wanted.logged()) {
      spdlog::info("job '{}': writing a gradient log of {} MiB once, so that it never has to wait for space", name_,
                   size.bytes() >> 20);
    } else {
      spdlog::info("job '{}': reserving {} MiB of disk for slices that do not fit into memory", name_,
                   size.bytes() >> 20);
    }
    auto log =
        storage::GradientLog::Create(around_.tiers->disk(), {.path = wanted.logged() ? journal_path() : spill_path(),
                                                             .job = name_,
                                                             .life = life_,
                                                             .segment_bytes = size.segment_bytes,
                                                             .segment_count = size.segment_count,
                                                             .transient = !wanted.logged()});
    status = log.status();
    if (status.ok() && wanted.logged()) {
      // A drop that a crash cut short may have left `committed` of an earlier job of this name.
      status = around_.catalog->PutAll({LogPair(name_, life_), CommittedPair(name_, -1)});
      if (!status.ok()) {
        LockedOnStage([&](Replies* replies) {
          mu_.AssertHeld();
          Fail(status, kCatalogRemedy, replies);
        });
      }
    }
    storage::Pass("create/catalogued");
    if (status.ok()) StartJournal(*std::move(log), wanted.logged());
  }
  if (!status.ok()) {
    around_.tiers->Return(storage::TierKind::kNvme, missing);
    return status;
  }
  journal_bytes_ += missing;
  return absl::OkStatus();
}

void Job::StartJournal(std::unique_ptr<storage::GradientLog> log, bool durable) {
  auto journal =
      std::make_shared<Journal>(std::move(log), durable ? Journal::kSegmentsReserved : Journal::kSpillSegmentsReserved);
  // The journal ends with Stop, before the job's end, so its thread may borrow the job.
  around_.foundation->Pump(&journal->log(), [this] { JournalProgressed(); });
  absl::MutexLock lock(&mu_);
  journal_ = std::move(journal);
  if (!durable) return;
  before_journal_lsn_ = log_.last_lsn();
  durable_ = true;
  log_.KeptElsewhere(0);
}

void Job::JournalProgressed() {
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    if (journal_ == nullptr) return;
    if (const absl::Status status = journal_->log().status(); !status.ok()) {
      Fail(status, Remedy(), replies);
    }
    if (!std::exchange(waits_for_cut_, false)) return;
    for (const auto& chunk : chunks_) WakePushes(chunk.get(), replies);
  });
}

absl::Status Job::MakeJournalRoom(uint64_t records, uint64_t bytes, uint64_t payload_bytes) {
  if (journal_ == nullptr || (!durable_ && payload_bytes == 0)) return absl::OkStatus();
  bool rolls = false;
  const absl::Status made = journal_->MakeRoom(records, bytes, payload_bytes, [&] {
    mu_.AssertHeld();
    rolls = true;
    SnapshotRecord record;
    if (durable_) {
      record.snapshot = machine_->Snapshot();
      std::vector<int64_t> changed;
      for (const auto& chunk : chunks_) changed.push_back(chunk->changed);
      EncodeChanged(changed, &record.snapshot);
    }
    storage::LogRecord snapshot = EncodeRecord(record);
    snapshot.lsn = log_.Append(record);
    return snapshot;
  });
  // Slices never use the reserve; fences and Opens without a step between them would use it up.
  if (rolls && durable_ && store_ != nullptr && journal_->IsShort()) PostFlush();
  return made;
}

void Job::PostFlush() {
  if (!std::exchange(flush_posted_, true)) stage_->Post([this] { FlushAll(); });
}

// Once a rank has pushed a higher attempt, no lower attempt can be prepared: the rank has replaced its slices. Drops in
// a row would fill the log with slices of lower attempts.
void Job::NoteAttempt(int64_t step, uint64_t attempt) {
  const std::pair<int64_t, uint64_t> arrived(step, attempt);
  if (arrived <= logged_attempt_) return;
  if (step == logged_attempt_.first) journal_->log().Release(machine_->committed());
  logged_attempt_ = arrived;
}

bool Job::IsSuperseded(const v1::PushRequest& header) const {
  return journal_ != nullptr && header.step() == logged_attempt_.first && header.attempt() < logged_attempt_.second;
}

void Job::Journalise(const StepRecord& record, uint64_t lsn) {
  const auto* slice = std::get_if<SliceRecord>(&record);
  if (!durable_ && (slice == nullptr || !arrived_.receipt->logged)) return;
  storage::LogRecord out = EncodeRecord(record);
  out.lsn = lsn;
  if (slice != nullptr) {
    NoteAttempt(slice->header.step(), slice->header.attempt());
    arrived_.logged = true;
    const Intake::Receipt& receipt = *arrived_.receipt;
    out.payload = {receipt.to, arrived_.bytes};
    out.payload_crc32c = slice->header.crc32c();
    out.keep_for = slice->header.step();
    const std::shared_ptr<HeldChunk> chunk = by_index_.at(arrived_.chunk->layout.index);
    chunk->intake.BeginLogging(receipt);
    out.written = [this, chunk, receipt = receipt](const storage::PayloadPlace* place) mutable {
      LockedOnStage([&](Replies* replies) {
        mu_.AssertHeld();
        chunk->intake.Written(receipt, place);
        receipt.buffer.reset();
        if (receipt.logged) BufferReturned(replies);
        WakePushes(chunk.get(), replies);
      });
    };
  }
  // No slice of a restore keeps its step in the log until the chunks are flushed.
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record);
      prepared != nullptr && prepared->prepared.header().kind() == v1::STEP_KIND_RESTORE) {
    out.keep_for = prepared->prepared.step();
  }
  journal_->Append(std::move(out));
  if (std::holds_alternative<PromiseRecord>(record)) storage::Pass("fence/promise");
  if (std::holds_alternative<OpenRecord>(record)) storage::Pass("fence/open");
  if (std::holds_alternative<SliceRecord>(record)) storage::Pass("journal/slice");
  if (std::holds_alternative<PreparedStepRecord>(record)) storage::Pass("journal/prepared");
  if (std::holds_alternative<DecisionRecord>(record)) storage::Pass("journal/decision");
}

Job::RecordNeeds Job::NeedsOfSlice() const {
  if (!durable_) return {1, Journal::kSliceBodyBytesMax};
  // The slice may be the last for a sealed step, whose prepared record then comes along.
  return {2, 2 * Journal::kSliceBodyBytesMax + sealed_bytes_max_ + norm_bytes_max_};
}

bool Job::TakesSlice(uint64_t payload_bytes, bool logged) {
  if (journal_ == nullptr || !(durable_ || logged)) return true;
  const auto [records, record_bytes] = NeedsOfSlice();
  if (journal_->HasRoomForSlice(records, record_bytes, payload_bytes)) return true;
  waits_for_cut_ = true;
  PostFlush();
  return false;
}

void Job::MarkFlushes(storage::ChunkStore* store, StepWork* work, std::vector<uint64_t>* others) {
  uint64_t steps_free = 0;
  {
    absl::MutexLock lock(&mu_);
    if (journal_ == nullptr || !durable_) return;
    steps_free = journal_->StepsFree(step_bytes_);
  }
  // Among the chunks that will have changed, the first to go are those that hold up the log's cut.
  struct Candidate {
    int64_t needed_from = -1;
    uint64_t chunk = 0;
    storage::ChunkUpdate* update = nullptr;
  };
  std::vector<Candidate> candidates;
  std::vector<bool> seen(store->chunk_count());
  for (storage::ChunkUpdate& update : work->updates) {
    seen[update.chunk] = true;
    const int64_t from = store->dirty(update.chunk) ? store->needed_from(update.chunk) : work->step - 1;
    candidates.push_back({from, update.chunk, &update});
  }
  for (uint64_t chunk = 0; chunk < seen.size(); ++chunk) {
    if (!seen[chunk] && store->dirty(chunk)) candidates.push_back({store->needed_from(chunk), chunk, nullptr});
  }
  // Chunks of equal age by multiples of the golden ratio: the first n lie evenly among all chunks, for every n. So
  // writes to the disk go on beside the whole update.
  const auto place = [](uint64_t chunk) { return static_cast<uint32_t>(chunk * 2654435769u); };
  std::sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    return std::pair(a.needed_from, place(a.chunk)) < std::pair(b.needed_from, place(b.chunk));
  });
  std::vector<int64_t> needed_from;
  for (const Candidate& candidate : candidates) needed_from.push_back(candidate.needed_from);
  candidates.resize(FlushesDue(needed_from, steps_free));
  for (const Candidate& candidate : candidates) {
    if (candidate.update != nullptr) {
      candidate.update->flush = true;
    } else {
      others->push_back(candidate.chunk);
    }
  }
}

absl::Status Job::Flush(storage::ChunkStore* store, absl::Span<const uint64_t> chunks, int64_t version) {
  std::vector<storage::ChunkUpdate> updates;
  for (const uint64_t chunk : chunks) {
    storage::ChunkUpdate& update = updates.emplace_back();
    update.chunk = chunk;
    update.version = version;
    update.flush = true;
  }
  if (updates.empty()) return absl::OkStatus();
  return store->Run(updates, [](size_t) {});
}

absl::Status Job::HardenForCut(storage::ChunkStore* store) {
  {
    absl::MutexLock lock(&mu_);
    if (journal_ == nullptr || !durable_ || journal_->StepsFree(step_bytes_) > 1) return absl::OkStatus();
  }
  return store->Harden();
}

void Job::CutJournal(const storage::ChunkStore& store, int64_t version) {
  applied_ = version;
  int64_t cut = version;
  for (uint64_t chunk = 0; store.records() && chunk < store.chunk_count(); ++chunk) {
    if (Seeded(storage::StorageBug::kCutAtCommit)) break;
    cut = std::min(cut, store.recoverable_from(chunk).value_or(version));
  }
  absl::MutexLock lock(&mu_);
  if (journal_ == nullptr) return;
  journal_->log().Cut(cut);
  if (!journal_->log().cut_lacks_room()) return;
  // Slices may wait for the room that the cut frees, and nothing else may begin another log segment.
  if (const absl::Status made = MakeJournalRoom(1, 2 * storage::kLogBlock, 1); !made.ok()) {
    spdlog::warn("job '{}': a cut of its gradient log waits: {}", name_, std::string(made.message()));
  }
}

void Job::FlushAll() {
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    if (!Refusal().ok()) return;
    store = store_;
  }
  std::vector<uint64_t> dirty;
  for (uint64_t chunk = 0; store->records() && chunk < store->chunk_count(); ++chunk) {
    if (store->dirty(chunk)) dirty.push_back(chunk);
  }
  absl::Status status = Flush(store.get(), dirty, applied_);
  if (status.ok()) status = store->Harden();
  if (status.ok()) CutJournal(*store, applied_);
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    flush_posted_ = false;
    if (!status.ok()) {
      Fail(model::Annotate(status, "chunks could not be flushed so that the gradient log can be cut"), Remedy(),
           replies);
    }
  });
}

absl::Status RemoveLog(storage::Tiers& tiers, const std::string& job) {
  return tiers.disk()->Remove(LogPath(tiers.directory(), job));
}

absl::Status Job::RemoveJournal() {
  std::shared_ptr<Journal> journal;
  {
    absl::MutexLock lock(&mu_);
    journal.swap(journal_);
    durable_ = false;
    log_.KeptHere();
  }
  if (journal != nullptr) around_.foundation->StopPumping(&journal->log());
  journal.reset();
  around_.tiers->Return(storage::TierKind::kNvme, std::exchange(journal_bytes_, 0));
  BALLAST_RETURN_IF_ERROR(RemoveLog(*around_.tiers, name_));
  storage::Pass("drop/log_removed");
  return around_.catalog->ErasePrefix(absl::StrCat(CatalogPrefix(name_), kCatalogLog));
}

void Job::Discard() {
  absl::MutexLock lock(&mu_);
  if (store_ != nullptr) store_->Discard();
}

}  // namespace ballast::services
