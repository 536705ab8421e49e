#include "ballast/services/journal/flushes.h"

#include <algorithm>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/flush_pace.h"
#include "ballast/services/journal/job_journal.h"

namespace ballast::services {

void Flushes::Post() {
  if (!std::exchange(posted_, true)) core_->worker->Post([this] { FlushAll(); });
}

std::vector<uint64_t> Flushes::Mark(storage::ChunkStore* store, int64_t step,
                                    absl::Span<storage::ChunkUpdate> updates) {
  uint64_t steps_free = 0;
  {
    JobMutexLock lock(&core_->mu);
    const std::optional<uint64_t> free = journal_->StepsFree();
    if (!free.has_value()) return {};
    steps_free = *free;
  }
  // Among the chunks that will have changed, the first to go are those that hold up the log's cut.
  struct Candidate {
    int64_t needed_from = -1;
    uint64_t chunk = 0;
    storage::ChunkUpdate* update = nullptr;
  };
  std::vector<Candidate> candidates;
  std::vector<bool> seen(store->chunk_count());
  for (storage::ChunkUpdate& update : updates) {
    seen[update.chunk] = true;
    const int64_t from = store->dirty(update.chunk) ? store->needed_from(update.chunk) : step - 1;
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
  std::vector<uint64_t> others;
  for (const Candidate& candidate : candidates) {
    if (candidate.update != nullptr) {
      candidate.update->flush = true;
      ++core_->counters.flushed_chunks;
    } else {
      others.push_back(candidate.chunk);
    }
  }
  return others;
}

absl::Status Flushes::Run(storage::ChunkStore* store, absl::Span<const uint64_t> chunks, storage::Interrupt interrupt) {
  std::vector<storage::ChunkUpdate> updates;
  for (const uint64_t chunk : chunks) {
    storage::ChunkUpdate& update = updates.emplace_back();
    update.chunk = chunk;
    update.version = applied_;
    update.flush = true;
  }
  if (updates.empty()) return absl::OkStatus();
  core_->counters.flushed_chunks += updates.size();
  return store->Run(
      updates, [](size_t) {}, /*read_back=*/{}, interrupt);
}

absl::Status Flushes::Harden(storage::ChunkStore* store) {
  {
    JobMutexLock lock(&core_->mu);
    const std::optional<uint64_t> free = journal_->StepsFree();
    if (!free.has_value() || *free > 1) return absl::OkStatus();
  }
  return store->Harden();
}

void Flushes::Cut(const storage::ChunkStore& store) {
  int64_t cut = applied_;
  for (uint64_t chunk = 0; store.records() && chunk < store.chunk_count(); ++chunk) {
    cut = std::min(cut, store.recoverable_from(chunk).value_or(applied_));
  }
  JobMutexLock lock(&core_->mu);
  journal_->Cut(cut);
}

uint64_t Flushes::DirtyBytes(const storage::ChunkStore& store) {
  const std::vector<storage::PlacedChunk> placed = store.placed();
  uint64_t bytes = 0;
  for (uint64_t chunk = 0; store.records() && chunk < placed.size(); ++chunk) {
    if (store.dirty(chunk)) bytes += store.layout().Of(placed[chunk].form).StateBytes(placed[chunk].elements);
  }
  return bytes;
}

void Flushes::FlushAll() {
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
  }
  std::vector<uint64_t> dirty;
  for (uint64_t chunk = 0; store->records() && chunk < store->chunk_count(); ++chunk) {
    if (store->dirty(chunk)) dirty.push_back(chunk);
  }
  const Working working(&core_->counters.steps.clock(), Stage::kFlush);
  absl::Status status = Run(store.get(), dirty, [this] { return core_->Interrupted(); });
  if (status.ok()) status = store->Harden();
  if (status.ok()) Cut(*store);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    posted_ = false;
    if (!status.ok()) {
      core_->Fail(model::Annotate(status, "chunks could not be flushed so that the gradient log can be cut"),
                  core_->Remedy(), replies);
    }
  });
}

absl::Status Flushes::EndRecovery() {
  std::shared_ptr<storage::ChunkStore> store;
  bool few = false;
  {
    JobMutexLock lock(&core_->mu);
    store = core_->state.store();
    posted_ = true;  // the store has one user at a time: now this thread
    BALLAST_ASSIGN_OR_RETURN(few, journal_->RollForRestart());
  }
  if (store != nullptr && few) FlushAll();
  JobMutexLock lock(&core_->mu);
  posted_ = false;
  // Else a job that restarts again and again without a step would take a further segment each time.
  if (store != nullptr && journal_->IsShortForRestart() && DirtyBytes(*store) <= kQuickFlushBytesMax) Post();
  return core_->failure();
}

}  // namespace ballast::services
