// Records the ranks' seals of the step in progress, and checks that all ranks sealed the same plan (rule 5).
//
// Threads: none; the step machine's caller serialises.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::services {

class SealLedger {
 public:
  // A new epoch: no rank has sealed, and a mismatch of the older epoch is forgotten. Borrows `plan`.
  void Open(const model::EpochPlan* plan);
  void NextStep();

  // Records a rank's seal. Idempotent.
  // Errors: INVALID_ARGUMENT if header or blobs do not fit the job, or rank 0 brings no blobs; FAILED_PRECONDITION
  // (PLAN_MISMATCH), final for the epoch.
  absl::Status Seal(const v1::SealRequest& request);
  // OK until a mismatch ended the epoch.
  const absl::Status& agreement() const { return agreement_; }

  // The attempt sealed by `rank`.
  std::optional<uint64_t> sealed_attempt(uint32_t rank) const { return ranks_[rank]; }
  bool complete() const { return count_ == ranks_.size(); }
  uint32_t unsealed_count() const { return static_cast<uint32_t>(ranks_.size() - count_); }
  // Ranks that have not sealed, ascending, at most `max` of them.
  std::vector<uint32_t> UnsealedRanks(size_t max) const;

  // Whether the ledger has exactly this seal.
  bool Filed(const v1::SealRequest& request) const {
    return any() && sealed_attempt(request.rank()) == request.attempt() && request.plan_hash() == first_.plan_hash();
  }

  // Rank 0's seal of this step, which has the blobs; until it comes, the first. The plan of every other seal is equal.
  // REQUIRES: any().
  bool any() const { return count_ > 0; }
  const v1::SealRequest& sealed() const { return first_; }

 private:
  absl::Status CheckFirst(const v1::SealRequest& request) const;

  const model::EpochPlan* plan_ = nullptr;
  std::vector<std::optional<uint64_t>> ranks_;
  size_t count_ = 0;
  mutable uint32_t first_unsealed_ = 0;  // all ranks before this one have sealed
  v1::SealRequest first_;
  absl::Status agreement_;
};

}  // namespace ballast::services
