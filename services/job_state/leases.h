// Readers in this process that read a chunk's working copy where the update wrote it. The chunk's next update waits for
// them, and so does whoever drops working copies.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/job_state/job_mutex.h"

namespace ballast::services {

class HeldChunk;

// Of one chunk. Threads: any may ask.
class ChunkLeases {
 public:
  uint32_t held() const { return held_.load(); }
  // Since when there has always been a lease; counts while there is one.
  absl::Time since() const { return absl::FromUnixNanos(since_.load()); }

 private:
  friend class Leases;
  std::atomic<uint32_t> held_{0};
  std::atomic<int64_t> since_{0};
};

// Of one job. A lease may outlive the job: it keeps what it needs. Threads: any. Nobody waits for a lock that somebody
// keeps.
class Leases : public std::enable_shared_from_this<Leases> {
 public:
  // A lease of the chunk's working copy, in `memory`; null while leases are shut out. It ends with its last reference,
  // on any thread. REQUIRES: no update of the chunk has begun.
  std::shared_ptr<const void> Take(std::shared_ptr<HeldChunk> chunk, std::shared_ptr<const void> memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // No lease is taken while the token lives.
  std::shared_ptr<void> ShutOut();
  bool shut_out() const { return shut_ > 0; }
  uint64_t held() const { return held_.load(); }
  // Whether somebody waits for the end of leases.
  bool awaited() const { return awaited_ > 0; }

  // Blocks until `ready`, which is asked whenever a lease ends, or an error of `interrupt`, which is asked now and
  // then.
  absl::Status Await(absl::FunctionRef<bool()> ready, absl::FunctionRef<absl::Status()> interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `then` once when no lease is held, on the thread that ends the last; false, and nothing is kept, if none is
  // held now. `then` must be short; another takes its place.
  bool OnceNone(std::function<void()> then) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Lease;
  void End(ChunkLeases* chunk) ABSL_LOCKS_EXCLUDED(mu_);

  std::atomic<uint64_t> held_{0};
  std::atomic<uint32_t> shut_{0};
  // Somebody waits in `mu_`, or for `then_`: the end of a lease must tell. Otherwise it takes no lock.
  std::atomic<uint32_t> awaited_{0};
  absl::Mutex mu_;
  std::function<void()> then_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast::services
