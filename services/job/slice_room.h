// The memory for a job's slices on this server, and the pushes that wait for memory.
//
// A slice that leaves memory has a buffer until the log has the bytes, and an update reads slices back into a further
// buffer. The reservation is for all slices of the job. A push that finds no room waits while logged slices are on
// their way, or a decided step is applied: both give their buffers back without any further push. If there are neither,
// the push takes more of the budget or is refused. So no push waits for ever, in whatever order ranks push.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/job/job_core.h"
#include "ballast/storage/chunk/chunk_update.h"

namespace ballast::services {

// Threads: any. Guarded by the job's lock, unless a method says otherwise.
class SliceRoom {
 public:
  explicit SliceRoom(JobCore* core) : core_(core) {}

  // Null before the worker has made a store.
  const std::shared_ptr<SliceMemory>& memory() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return memory_; }
  // With another memory the buffer for reading back is gone as well.
  void SetMemory(std::shared_ptr<SliceMemory> memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // From the memory, if some chunk is logged: updates read slices back into this buffer. May be null.
  const std::shared_ptr<SliceMemory::Buffer>& read_back() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return read_back_;
  }
  void SetReadBack(std::shared_ptr<SliceMemory::Buffer> buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    read_back_ = std::move(buffer);
  }

  // Is there a buffer for the slice, or nothing to wait for? If not, WaitForBuffer makes the chunk's pushes be woken
  // once buffers have come back.
  bool HasBuffer(const HeldChunk& chunk, uint32_t slice, v1::SliceKind kind) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WaitForBuffer(const std::shared_ptr<HeldChunk>& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // So many buffers will come back by themselves: of logged slices until the log has them, and of decided steps until
  // they are applied.
  void Expect(uint64_t buffers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { returning_ += buffers; }
  // One of them is free again.
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
