// Pins of a job for reading: versions that stay readable while later steps are applied, until the server ends.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "ballast/services/job/job_core.h"

namespace ballast::services {

// Guarded by the job's lock, unless a method says otherwise.
class ReadPins {
 public:
  explicit ReadPins(JobCore* core) : core_(core) {}

  // Pins the machine's current version, on the worker. `waiting_for`: id of the pin that the request waits for; 0 until
  // the request has begun or found a pin.
  Outcome<v1::PinResponse> Pin(int64_t version, uint64_t* waiting_for) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Unpin(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Can the version be read? FAILED_PRECONDITION (VERSION_GONE) if its pin was given up. RESOURCE_EXHAUSTED.
  absl::StatusOr<bool> Readable(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  std::vector<int64_t> Versions() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // On the worker. Drops the oldest pin because of `cause`, so that the store finds room. False if there is none.
  bool GiveUpOldest(storage::ChunkStore* store, const absl::Status& cause) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  struct State {
    uint64_t id = 0;  // from 1; a version pinned again gets a new id
    std::vector<uint64_t> tensor_steps;
    absl::Status status;
    bool ready = false;
  };
  void RunPin(int64_t version, uint64_t id);
  void RunUnpin(int64_t version);

  JobCore* const core_;
  std::map<int64_t, State> pins_ ABSL_GUARDED_BY(job_lock);
  uint64_t last_id_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast::services
