// Who has sealed the step in progress, and the one plan that all of them must have sealed (rule 5).
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
  // A new epoch: nobody has sealed, and a mismatch of the older one is forgotten. Borrows `plan`.
  void Open(const model::EpochPlan* plan);
  void NextStep();

  // Files a rank's seal. Idempotent.
  // Errors: INVALID_ARGUMENT header or blobs do not fit the job; FAILED_PRECONDITION (PLAN_MISMATCH) final for the
  // epoch.
  absl::Status Seal(const v1::SealRequest& request);
  // OK until a mismatch ended the epoch.
  const absl::Status& agreement() const { return agreement_; }

  // The attempt that `rank` sealed.
  std::optional<uint64_t> sealed_attempt(uint32_t rank) const { return ranks_[rank]; }
  bool complete() const { return count_ == ranks_.size(); }
  std::vector<uint32_t> UnsealedRanks() const;

  // The plan of the first seal of this step; every later one equals it. REQUIRES: somebody sealed.
  bool any() const { return count_ > 0; }
  const v1::SealRequest& sealed() const { return first_; }

 private:
  absl::Status CheckFirst(const v1::SealRequest& request) const;

  const model::EpochPlan* plan_ = nullptr;
  std::vector<std::optional<uint64_t>> ranks_;
  size_t count_ = 0;
  v1::SealRequest first_;
  absl::Status agreement_;
};

}  // namespace ballast::services
