// Pins of a job for reading: versions that stay readable while later steps are applied, until the server ends. A
// version stays pinned while somebody holds it: the group (holder 0), or readers, whose holds end with their leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::storage {
class ChunkStore;
}  // namespace ballast::storage

namespace ballast::services {

class JobCore;

// Guarded by the job's lock, unless a method says otherwise.
class ReadPins {
 public:
  explicit ReadPins(JobCore* core) : core_(core) {}

  // Pins the machine's current version, on the worker, or takes part in a pin; a reader renews its lease so.
  // `waiting_for`: id of the pin that the request waits for; 0 until the request has begun or found a pin.
  Outcome<v1::PinResponse> Pin(const v1::PinRequest& request, uint64_t* waiting_for)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Unpin(int64_t version, uint64_t holder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Can the version be read? FAILED_PRECONDITION (VERSION_GONE) if its pin was given up. RESOURCE_EXHAUSTED.
  absl::StatusOr<bool> Readable(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  std::vector<int64_t> Versions() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // On the worker. Drops the oldest pin because of `cause`, so that the store finds room: one that only readers hold,
  // if there is one. False if there is none.
  bool GiveUpOldest(storage::ChunkStore* store, const absl::Status& cause) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  struct Hold {
    absl::Time until = absl::InfiniteFuture();
    uint64_t timer = 0;  // of the deadlines; 0: none
  };
  struct State {
    uint64_t id = 0;  // from 1; a version pinned again gets a new id
    std::map<uint64_t, Hold> holders;
    std::vector<uint64_t> tensor_steps;
    absl::Status status;
    bool ready = false;
    bool has_readers() const { return holders.upper_bound(0) != holders.end(); }  // any but the group
  };
  // May a pin of `version` begin?
  absl::Status CheckBegins(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // May readers hold one version more? RESOURCE_EXHAUSTED.
  absl::Status CheckReaders() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // RESOURCE_EXHAUSTED.
  absl::Status TakePart(const v1::PinRequest& request, State* pin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void StartTimer(int64_t version, uint64_t holder, Hold* hold) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The hold's timer has run out: ends the hold, unless it was renewed.
  void Lapse(int64_t version, uint64_t holder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // How many versions have a reader among their holders.
  size_t ReadersPins() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void RunPin(int64_t version, uint64_t id);
  void RunUnpin(int64_t version);

  JobCore* const core_;
  std::map<int64_t, State> pins_ ABSL_GUARDED_BY(job_lock);
  uint64_t last_id_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast::services
