// This server's part in the comparison of copies (proto/model/copies.h): the digests that it tells rank 0, and what
// rank 0 found, for operators. Nothing else depends on it.
#pragma once

#include <cstdint>
#include <map>

#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class JobCore;

// Do other servers have the job's chunks too?
inline bool HasCopies(const model::EpochPlan& plan) { return plan.open().table().replicas() > 1; }

// Under the job's lock.
class Copies {
 public:
  explicit Copies(JobCore* core) : core_(core) {}

  // Adds the digests whose turn it is in the prepared answer of `step`.
  void AddDigests(int64_t step, v1::SealResponse* answer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Counts differences that rank 0 found in chunks of this server, and logs those that are new. Passes over what cannot
  // be: a client may send anything.
  void Note(const google::protobuf::RepeatedPtrField<v1::DifferingCopies>& differing)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A difference counts no more once one of its servers has not the chunk. `forgets`: this server begins anew.
  void Opened(const model::EpochPlan& plan, bool forgets) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Describe(v1::JobStatus* status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  // Not for long: if it is not found again, the copies are the same by now, or cannot be compared.
  bool Lasts(const v1::DifferingCopies& differing) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  std::map<uint64_t, v1::DifferingCopies> differing_;  // by chunk
};

}  // namespace ballast::services
