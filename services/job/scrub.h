// Reads a job's states on the disk, in the background, and mends rot as long as another copy lives. An update and a
// restart find rot as well, but days later, when the extent may be the last copy.
//
// The worker reads one piece between two tasks. So a scrub never reads beside a step's own transfers, a step waits for
// one read at most, and the worker holds no lock meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

class DamagedChunks;
class Flushes;
class JobCore;

class Scrub {
 public:
  Scrub(JobCore* core, Flushes* flushes, DamagedChunks* damaged) : core_(core), flushes_(flushes), damaged_(damaged) {}

  // On the worker: reads a piece of the job's state on the disk, and acts where a state is damaged. `buffer`: aligned
  // to 4096.
  void Next(absl::Span<std::byte> buffer) ABSL_LOCKS_EXCLUDED(job_lock);
  // End of the last complete pass; InfinitePast before the first.
  absl::Time last_pass() const {
    const int64_t ns = last_pass_ns_;
    return ns == 0 ? absl::InfinitePast() : absl::FromUnixNanos(ns);
  }
  // Absent while nothing was scrubbed.
  bool begun() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return begun_; }
  v1::ScrubStatus Describe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  using Place = std::array<uint64_t, 3>;  // the chunk's index in the store; the extent's file and offset
  // What became of damage that was found.
  struct Repair {
    absl::Status mended;  // from this server's memory
    std::string line;     // of the status, if the damage stays; empty: mended, or another server is asked for a copy
  };
  Repair RepairOf(storage::ScrubbedExtent extent, const absl::Status& found, storage::ChunkStore* store)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // Writes the extent anew from memory, for which memory gets the moments of `extent` if it lacks them. An error says
  // why the damage stays.
  absl::Status Mend(storage::ChunkStore* store, storage::ScrubbedExtent* extent) ABSL_LOCKS_EXCLUDED(job_lock);
  // Writes the finding and its fate to the server's log. Returns the status line of lasting damage; empty if mended.
  std::string Tell(const storage::ScrubbedExtent& extent, const absl::Status& found, const absl::Status& mended) const;
  void EndPass(const storage::ChunkStore& store) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  Flushes* const flushes_;
  DamagedChunks* const damaged_;
  bool begun_ ABSL_GUARDED_BY(job_lock) = false;
  bool over_ ABSL_GUARDED_BY(job_lock) = false;  // the last read ended a pass
  std::atomic<int64_t> last_pass_ns_ = 0;        // 0: none; read without the lock
  uint64_t passes_ ABSL_GUARDED_BY(job_lock) = 0;
  uint64_t done_bytes_ ABSL_GUARDED_BY(job_lock) = 0, pass_bytes_ ABSL_GUARDED_BY(job_lock) = 0;
  uint64_t read_bytes_ ABSL_GUARDED_BY(job_lock) = 0;
  uint64_t mended_ ABSL_GUARDED_BY(job_lock) = 0;
  // Damage that stays.
  std::map<Place, std::string> damage_ ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
