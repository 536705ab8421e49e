// The memory for a job's slices on this server, and the pushes that wait for memory.
//
// All slices of the job share the reservation. A logged slice keeps its buffer only until the log has its bytes, and an
// update reads the slice back into another buffer. A push that finds no room waits while buffers are on their way back:
// from slices on their way to the log, and from a decided step being applied. These need no further push. If none are
// on their way, the push takes more of the budget or is refused. So no push waits for ever, in whatever order ranks
// push.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/job_state/slice_memory.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/store/chunk_update.h"

namespace ballast::services {

class HeldChunk;
class JobCore;

// Threads: any. Guarded by the job's lock, unless a method says otherwise.
class SliceRoom {
 public:
  explicit SliceRoom(JobCore* core) : core_(core) {}

  // Null before the worker has made a store.
  const std::shared_ptr<SliceMemory>& memory() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return memory_; }
  // Another memory drops the buffer for reading back, which was cut from the old one.
  void SetMemory(std::shared_ptr<SliceMemory> memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The buffer, cut from the memory, into which updates read slices back. Null if no chunk's slices leave memory.
  const std::shared_ptr<SliceMemory::Buffer>& read_back() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return read_back_;
  }
  void SetReadBack(std::shared_ptr<SliceMemory::Buffer> buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    read_back_ = std::move(buffer);
  }

  // True if a buffer of this size fits, or if no buffer is on its way back. If false, call WaitForBuffer, and the
  // chunk's pushes are tried again once buffers have come back.
  bool HasBuffer(uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WaitForBuffer(const std::shared_ptr<HeldChunk>& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // So many more buffers are on their way back: of a logged slice until the log has it, and of a decided step until it
  // is applied.
  void Expect(uint64_t buffers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { returning_ += buffers; }
  // One of these buffers is free again.
  void Returned(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // A buffer for the slices that `updates` read from the log; null if there are none to read. `elements`: of each
  // update's chunk. On the worker, or the thread that recovers. RESOURCE_EXHAUSTED (BUDGET).
  absl::StatusOr<std::shared_ptr<SliceMemory::Buffer>> PrepareReadBack(absl::Span<const storage::ChunkUpdate> updates,
                                                                       absl::Span<const uint64_t> elements)
      ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  JobCore* const core_;
  std::shared_ptr<SliceMemory> memory_ ABSL_GUARDED_BY(job_lock);
  std::shared_ptr<SliceMemory::Buffer> read_back_ ABSL_GUARDED_BY(job_lock);
  uint64_t returning_ ABSL_GUARDED_BY(job_lock) = 0;
  std::deque<std::shared_ptr<HeldChunk>> short_ ABSL_GUARDED_BY(job_lock);  // their pushes wait for buffers
};

}  // namespace ballast::services
