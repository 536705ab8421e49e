// The job's thread of class Job: moves chunks, between steps, to where new budgets want them. The thread's queue is
// first in, first out, and a batch puts the next batch behind the queued tasks. So a step waits for one batch at most.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"

namespace ballast::services {

using storage::TierKind;

namespace {

// Chunks moved to each tier in a batch: four of 12 MiB take a disk some tens of milliseconds.
constexpr int kMovesAtOnce = 4;

}  // namespace

std::optional<storage::JobHolding> Job::Holding() const {
  std::shared_ptr<storage::ChunkStore> store;
  storage::JobHolding holding;
  {
    absl::MutexLock lock(&mu_);
    // Chunks of a job that takes no more steps cannot be moved.
    if (store_ == nullptr || !Refusal().ok()) return std::nullopt;
    store = store_;
  }
  holding.name = name_;
  holding.chunks = store->placed();
  holding.layout = store->layout();
  holding.durable = store->durable();
  holding.staging_bytes_missing = store->staging_bytes_missing();
  holding.flush_buffer_bytes_missing = store->flush_buffer_bytes_missing();
  holding.shape = ShapeOf(*store);
  return holding;
}

void Job::MoveTo(const storage::Plan& plan, v1::JobMoves* answer) {
  absl::MutexLock lock(&mu_);
  // An Open of a different spec may have thrown the chunks away; new chunks come only when the planning lock is free.
  if (store_ == nullptr || store_->chunk_count() != plan.chunks.size()) return;
  auto moves = std::make_shared<Moves>();
  moves->store = store_;
  const std::vector<storage::PlacedChunk> placed = store_->placed();
  // Chunks in DRAM first: chunks that leave HBM may need their room.
  for (const TierKind from : {TierKind::kDram, TierKind::kHbm, TierKind::kNvme}) {
    for (uint64_t i = 0; i < placed.size(); ++i) {
      const TierKind to = plan.chunks[i].state;
      if (placed[i].placement.state == from && to != from) moves->To(to).push_back(i);
    }
  }
  const uint64_t down = moves->To(TierKind::kNvme).size(), up = moves->To(TierKind::kHbm).size();
  const uint64_t dram = moves->To(TierKind::kDram).size();
  answer->set_chunks_to_nvme(down);
  answer->set_chunks_to_dram(dram);
  answer->set_chunks_to_hbm(up);
  prediction_ = plan.prediction;
  moves_ = nullptr;  // where an earlier change wanted them counts no more
  if (moves->left() == 0) return;
  spdlog::info("job '{}': {} chunks move to nvme, {} to dram, {} to hbm. {}", name_, down, dram, up, plan.Explain());
  moves_ = std::move(moves);
  ResumeMoves();
}

void Job::ResumeMoves() {
  if (moves_ == nullptr || std::exchange(moves_->posted, true)) return;
  stage_->Post([this] { MoveSome(); });
}

void Job::MoveSome() {
  std::shared_ptr<Moves> moves;
  std::vector<uint64_t> down;
  {
    absl::MutexLock lock(&mu_);
    if (moves_ == nullptr) return;
    moves_->posted = false;
    if (!Refusal().ok() || moves_->store != store_) {
      moves_ = nullptr;
      return;
    }
    moves = moves_;
    const std::deque<uint64_t>& all = moves->To(TierKind::kNvme);
    down.assign(all.begin(), all.begin() + std::min<std::ptrdiff_t>(std::ssize(all), kMovesAtOnce));
  }
  // Durable state goes down by being flushed; then the memory is dropped.
  std::erase_if(down, [&](uint64_t chunk) { return !moves->store->dirty(chunk); });
  if (const absl::Status flushed = Flush(moves->store.get(), down, applied_); !flushed.ok()) {
    LockedOnStage([&](Replies* replies) {
      mu_.AssertHeld();
      moves_ = nullptr;
      Fail(model::Annotate(flushed, "chunks that move to nvme could not be flushed"), Remedy(), replies);
    });
    return;
  }
  if (!down.empty()) CutJournal(*moves->store, applied_);
  const uint64_t before = moves->moved;
  absl::Status status;  // why chunks did not move: first of all an error that more room would not heal
  // Chunks that go down make room for chunks that come up.
  for (const TierKind to : {TierKind::kNvme, TierKind::kDram, TierKind::kHbm}) {
    const absl::Status moved = MoveBatch(moves, to);
    if (status.ok() || (absl::IsResourceExhausted(status) && !moved.ok())) status = moved;
  }
  EndBatch(moves, moves->moved > before, status);
}

// Moves up to kMovesAtOnce chunks; ends at a chunk that finds no room or fails.
absl::Status Job::MoveBatch(const std::shared_ptr<Moves>& moves, TierKind to) {
  std::deque<uint64_t>* const chunks = &moves->To(to);
  for (int i = 0; i < kMovesAtOnce; ++i) {
    // Nobody may plan meanwhile with space that the chunk is about to take or give back.
    absl::MutexLock planning(around_.planning);
    uint64_t chunk = 0;
    {
      absl::MutexLock lock(&mu_);
      if (moves_ != moves || chunks->empty()) return absl::OkStatus();
      chunk = chunks->front();
    }
    // Durable chunks of this batch have been flushed; a dirty chunk belongs to the next batch.
    if (to == TierKind::kNvme && moves->store->dirty(chunk)) return absl::OkStatus();
    BALLAST_RETURN_IF_ERROR(moves->store->Move(chunk, to));
    absl::MutexLock lock(&mu_);
    chunks->pop_front();
    ++moves->moved;
    ++chunks_moved_;
  }
  return absl::OkStatus();
}

void Job::EndBatch(const std::shared_ptr<Moves>& moves, bool progress, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  if (moves_ != moves) return;
  const uint64_t left = moves->left();
  if (!status.ok() && !absl::IsResourceExhausted(status)) {
    // All chunks are where they were: training goes on.
    spdlog::error("job '{}': {} chunks stay where they are, not where the budgets want them: {}", name_, left,
                  std::string(status.message()));
    moves_ = nullptr;
    return;
  }
  if (left == 0) {
    spdlog::info("job '{}': moved {} chunks in {:.1f} s", name_, moves->moved,
                 absl::ToDoubleSeconds(absl::Now() - moves->began));
    moves_ = nullptr;
    return;
  }
  if (progress) return ResumeMoves();
  // The next step may bring room, when other jobs' chunks or pinned copies have gone.
  if (!std::exchange(moves->said_stalled, true)) {
    spdlog::warn("job '{}': {} chunks wait for room before they move: {}", name_, left, std::string(status.message()));
  }
}

}  // namespace ballast::services
