// Before a restore is prepared, this server reads the kept version as a whole: an unreadable version is refused while
// the job still has its state, which the restore would overwrite. Damaged bytes are first copied from another server.
#pragma once

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/v1/state_service.pb.h"
#include "ballast/v1/types.pb.h"

namespace ballast::services {

class JobCore;
class KeptCopies;

// Guarded by the job's lock. The worker reads.
class RestoreChecks {
 public:
  RestoreChecks(JobCore* core, KeptCopies* copies) : core_(core), copies_(copies) {}

  // Reads and verifies the version that the seal restores, once per epoch. False while the reading goes on; the core
  // moves when it ends.
  absl::StatusOr<bool> Checked(const v1::SealRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Whether the disk did not return what was written of the version, in its newest reading.
  bool FoundUnreadable(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The version is off the disk.
  void Forget(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { checks_.erase(version); }

 private:
  // The newest reading of a version.
  struct Check {
    v1::Epoch epoch;  // for which the result counts
    bool done = false;
    absl::Status status;
    bool mends = false;   // waits for damaged bytes that are copied from other servers
    bool mended = false;  // waited for them before
  };
  // On the worker.
  void Run(int64_t version) ABSL_LOCKS_EXCLUDED(job_lock);

  JobCore* const core_;
  KeptCopies* const copies_;
  std::map<int64_t, Check> checks_ ABSL_GUARDED_BY(job_lock);  // by version
};

}  // namespace ballast::services
