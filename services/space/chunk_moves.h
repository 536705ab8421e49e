// Moves a job's chunks, between steps, to where new budgets want them. The worker's queue is first in, first out, and a
// batch puts the next batch behind the queued tasks. So a step waits for one batch at most.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/storage/placement/rebalance.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

class Flushes;
class JobCore;
class Prediction;

class ChunkMoves {
 public:
  ChunkMoves(JobCore* core, Flushes* flushes, Prediction* prediction)
      : core_(core), flushes_(flushes), prediction_(prediction) {}

  // The job's state that may move, for planning new budgets; none if nothing may. Call while holding the planning lock.
  std::optional<storage::JobHolding> Holding() const ABSL_LOCKS_EXCLUDED(job_lock);
  // Moves chunks to where `plan` puts them, and counts them in `answer`. Replaces the moves of an earlier call.
  void MoveTo(const storage::Plan& plan, v1::JobMoves* answer) ABSL_LOCKS_EXCLUDED(job_lock);

  // Lets the worker go on with moves, if there are any: they may have found no room before.
  void Resume() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The chunks are gone.
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { moves_ = nullptr; }
  uint64_t left() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return moves_ == nullptr ? 0 : moves_->left(); }
  uint64_t moved() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return moved_; }

 private:
  // Chunks that are not where new budgets want them, and working copies that find no room. Guarded by the job's lock.
  struct Moves {
    std::shared_ptr<storage::ChunkStore> store;
    // Indices in the store, by the TierKind of the target.
    std::array<std::deque<uint64_t>, storage::kTierKinds> to;
    std::deque<uint64_t>& To(storage::TierKind tier) { return to[static_cast<size_t>(tier)]; }
    std::vector<uint64_t> copies;     // working copies to drop, once they are not leased
    std::shared_ptr<void> no_leases;  // until they are dropped
    uint64_t left() const { return to[0].size() + to[1].size() + to[2].size() + copies.size(); }
    bool posted = false;    // a batch is queued
    bool kept_out = false;  // a plan keeps moves out; afterwards the moves go on
    bool said_stalled = false;
    uint64_t moved = 0;
    absl::Time began = absl::Now();
  };
  // On the worker.
  void MoveSome();
  // Moves up to kMovesAtOnce chunks. Ends at a chunk that finds no room or fails, or if a plan keeps moves out.
  absl::Status MoveBatch(const std::shared_ptr<Moves>& moves, storage::TierKind to);
  // True while copies are to be dropped and some are leased; afterwards Resume is called.
  bool AwaitLeases();
  // False while a plan keeps moves out; afterwards Resume is called.
  bool BeginMove();
  void EndBatch(const std::shared_ptr<Moves>& moves, bool progress, const absl::Status& status);

  JobCore* const core_;
  Flushes* const flushes_;
  Prediction* const prediction_;
  std::shared_ptr<Moves> moves_ ABSL_GUARDED_BY(job_lock);  // null: no chunk has to move
  uint64_t moved_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast::services
