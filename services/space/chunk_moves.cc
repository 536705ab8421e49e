#include "ballast/services/space/chunk_moves.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/space/prediction.h"

namespace ballast::services {

using storage::TierKind;

namespace {

// Chunks moved to each tier in a batch: four of 12 MiB take a disk some tens of milliseconds.
constexpr int kMovesAtOnce = 4;

}  // namespace

std::optional<storage::JobHolding> ChunkMoves::Holding() const {
  std::shared_ptr<storage::ChunkStore> store;
  storage::JobHolding holding;
  {
    JobMutexLock lock(&core_->mu);
    // Chunks of a job that takes no more steps cannot be moved.
    if (core_->state.store() == nullptr || !core_->Refusal().ok()) return std::nullopt;
    store = core_->state.store();
  }
  holding.name = core_->name;
  holding.chunks = store->placed();
  holding.layout = store->layout();
  holding.durable = store->durable();
  holding.staging_bytes_missing = store->staging_bytes_missing();
  holding.flush_buffer_bytes_missing = store->flush_buffer_bytes_missing();
  const bool whole = !holding.layout.keeps_remainder();  // without working copies
  if (core_->around.working_copies && whole && core_->around.tiers->hbm() == nullptr) {
    uint64_t largest = 0;
    for (const storage::PlacedChunk& chunk : holding.chunks) largest = std::max(largest, chunk.elements);
    holding.pull = store->pull_memory_missing(largest, store->present_count());
  }
  holding.shape = prediction_->ShapeOf(*store);
  return holding;
}

void ChunkMoves::MoveTo(const storage::Plan& plan, v1::JobMoves* answer) {
  JobMutexLock lock(&core_->mu);
  // An Open of a different spec may have thrown the chunks away; new chunks come only when the planning lock is free.
  if (core_->state.store() == nullptr || core_->state.store()->chunk_count() != plan.chunks.size()) return;
  auto moves = std::make_shared<Moves>();
  moves->store = core_->state.store();
  const std::vector<storage::PlacedChunk> placed = core_->state.store()->placed();
  // Chunks in DRAM first: chunks that leave HBM may need their room.
  for (const TierKind from : {TierKind::kDram, TierKind::kHbm, TierKind::kNvme}) {
    for (uint64_t i = 0; i < placed.size(); ++i) {
      const TierKind to = plan.chunks[i].state;
      if (!placed[i].gap() && placed[i].placement.state == from && to != from) moves->To(to).push_back(i);
    }
  }
  for (uint64_t i = 0; i < placed.size(); ++i) {
    if (placed[i].placement.working.has_value() && !plan.chunks[i].working.has_value()) moves->copies.push_back(i);
  }
  const uint64_t down = moves->To(TierKind::kNvme).size(), up = moves->To(TierKind::kHbm).size();
  const uint64_t dram = moves->To(TierKind::kDram).size();
  answer->set_chunks_to_nvme(down);
  answer->set_chunks_to_dram(dram);
  answer->set_chunks_to_hbm(up);
  answer->set_working_copies_dropped(moves->copies.size());
  prediction_->Set(plan.prediction);
  moves_ = nullptr;  // where an earlier change wanted them counts no more
  if (moves->left() == 0) return;
  if (!moves->copies.empty()) moves->no_leases = core_->leases->ShutOut();
  spdlog::info("job '{}': {} chunks move to nvme, {} to dram, {} to hbm; {} working copies are dropped. {}",
               core_->name, down, dram, up, moves->copies.size(), plan.Explain());
  moves_ = std::move(moves);
  Resume();
}

void ChunkMoves::Resume() {
  if (moves_ == nullptr || std::exchange(moves_->posted, true)) return;
  core_->worker->Post([this] { MoveSome(); });
}

void ChunkMoves::MoveSome() {
  const Working working(&core_->counters.steps.clock(), Stage::kMove);
  std::shared_ptr<Moves> moves;
  std::vector<uint64_t> down, copies;
  {
    JobMutexLock lock(&core_->mu);
    if (moves_ == nullptr) return;
    moves_->posted = false;
    moves_->kept_out = false;
    if (!core_->Refusal().ok() || moves_->store != core_->state.store()) {
      moves_ = nullptr;
      return;
    }
    moves = moves_;
    const std::deque<uint64_t>& all = moves->To(TierKind::kNvme);
    down.assign(all.begin(), all.begin() + std::min<std::ptrdiff_t>(std::ssize(all), kMovesAtOnce));
    copies = moves->copies;
  }
  // Before the gate: no other job's plan waits for a reader. The job's steps go on meanwhile.
  if (!copies.empty() && AwaitLeases()) return;
  // Asked before chunks are flushed: the next step would make the chunks of a move that is kept out dirty again.
  if (!BeginMove()) {
    JobMutexLock lock(&core_->mu);
    moves->kept_out = true;
    return;
  }
  // Copies make room without any transfer, so they go first, and all at once.
  bool wanted = false;  // or were the budgets changed again?
  {
    JobMutexLock lock(&core_->mu);
    wanted = moves_ == moves;
  }
  const absl::Status dropped = wanted ? moves->store->DropWorkingCopies(copies) : absl::OkStatus();
  core_->around.moving->End();
  if (!wanted) return;
  if (!dropped.ok()) return EndBatch(moves, false, dropped);
  {
    JobMutexLock lock(&core_->mu);
    moves->copies.clear();
    moves->no_leases = nullptr;
  }
  // Durable state goes down by being flushed; then the memory is dropped.
  std::erase_if(down, [&](uint64_t chunk) { return !moves->store->dirty(chunk); });
  if (const absl::Status flushed = flushes_->Run(moves->store.get(), down); !flushed.ok()) {
    core_->LockedOnWorker([&](Replies* replies) {
      core_->mu.AssertHeld();
      moves_ = nullptr;
      core_->Fail(model::Annotate(flushed, "chunks that move to nvme could not be flushed"), core_->Remedy(), replies);
    });
    return;
  }
  if (!down.empty()) flushes_->Cut(*moves->store);
  const uint64_t before = moves->moved;
  absl::Status status;  // why chunks did not move: first of all an error that more room would not heal
  // Chunks that go down make room for chunks that come up.
  for (const TierKind to : {TierKind::kNvme, TierKind::kDram, TierKind::kHbm}) {
    const absl::Status moved = MoveBatch(moves, to);
    if (status.ok() || (absl::IsResourceExhausted(status) && !moved.ok())) status = moved;
  }
  EndBatch(moves, moves->moved > before, status);
}

absl::Status ChunkMoves::MoveBatch(const std::shared_ptr<Moves>& moves, TierKind to) {
  std::deque<uint64_t>* const chunks = &moves->To(to);
  for (int i = 0; i < kMovesAtOnce; ++i) {
    uint64_t chunk = 0;
    {
      JobMutexLock lock(&core_->mu);
      if (moves_ != moves || chunks->empty() || moves->kept_out) return absl::OkStatus();
      chunk = chunks->front();
    }
    // Durable chunks of this batch have been flushed; a dirty chunk belongs to the next batch.
    if (to == TierKind::kNvme && moves->store->dirty(chunk)) return absl::OkStatus();
    if (!BeginMove()) {
      JobMutexLock lock(&core_->mu);
      moves->kept_out = true;
      return absl::OkStatus();
    }
    const absl::Status moved = moves->store->Move(chunk, to);
    core_->around.moving->End();
    BALLAST_RETURN_IF_ERROR(moved);
    JobMutexLock lock(&core_->mu);
    chunks->pop_front();
    ++moves->moved;
    ++moved_;
  }
  return absl::OkStatus();
}

bool ChunkMoves::AwaitLeases() {
  return core_->leases->OnceNone([this, owner = core_->owner()] {
    const std::shared_ptr<const void> job = owner.lock();
    if (job == nullptr) return;
    core_->worker->Post([this] {
      JobMutexLock lock(&core_->mu);
      Resume();
    });
  });
}

bool ChunkMoves::BeginMove() {
  return core_->around.moving->TryBegin(this, [this, owner = core_->owner()] {
    const std::shared_ptr<const void> job = owner.lock();
    if (job == nullptr) return;
    JobMutexLock lock(&core_->mu);
    Resume();
  });
}

void ChunkMoves::EndBatch(const std::shared_ptr<Moves>& moves, bool progress, const absl::Status& status) {
  JobMutexLock lock(&core_->mu);
  if (moves_ != moves) return;
  const uint64_t left = moves->left();
  if (!status.ok() && !absl::IsResourceExhausted(status)) {
    // All chunks are where they were: training goes on.
    spdlog::error("job '{}': {} chunks stay where they are, not where the budgets want them: {}", core_->name, left,
                  std::string(status.message()));
    moves_ = nullptr;
    return;
  }
  if (left == 0) {
    spdlog::info("job '{}': moved {} chunks in {:.1f} s", core_->name, moves->moved,
                 absl::ToDoubleSeconds(absl::Now() - moves->began));
    moves_ = nullptr;
    return;
  }
  if (moves->kept_out) return;
  if (progress) return Resume();
  // The next step may bring room, when other jobs' chunks or pinned copies have gone.
  if (!std::exchange(moves->said_stalled, true)) {
    spdlog::warn("job '{}': {} chunks wait for room before they move: {}", core_->name, left,
                 std::string(status.message()));
  }
}

}  // namespace ballast::services
