// Working parameters on their way from the servers: prefetched, pulled, all-gathered.
//
// A unit is pulled straight to its place in a buffer of the whole unit, so that the all-gather happens in place and no
// element is copied twice. Buffers are reused: their number is the largest number of leases and prefetches ever alive
// at once. Threads: one; a lease may be dropped on another thread.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ballast/client/group/group.h"
#include "ballast/client/transfers/seat.h"

namespace ballast::client {

// 64-byte aligned.
struct UnitBuffer {
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data;
  uint64_t capacity = 0;  // bytes
};

class BufferPool {
 public:
  std::unique_ptr<UnitBuffer> Take(uint64_t bytes);
  void Return(std::unique_ptr<UnitBuffer> buffer);

 private:
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<UnitBuffer>> free_ ABSL_GUARDED_BY(mutex_);
};

class Parameters {
 public:
  // Borrows both arguments.
  Parameters(const Seat* seat, Group* group) : seat_(seat), group_(group) {}
  ~Parameters() { Forget(); }

  void Prefetch(uint32_t unit);
  // Pulls each run of `unit` at the seat's version to its place; ends with the tally. Does not block.
  std::shared_ptr<Tally> StartPull(uint32_t unit, absl::Span<const PullRun> runs);
  // `waited`: as PendingPull::Await's.
  absl::Status AwaitPull(Tally& tally, absl::Duration waited) {
    pull_seconds_ += absl::ToDoubleSeconds(waited);
    return Wait(tally);
  }
  // Pulls this rank's own ranges, laid end to end. Here and below: in the job's working dtype.
  absl::Status PullOwned(uint32_t unit, absl::Span<std::byte> to);
  // COLLECTIVE. Gathers the whole unit; give the buffer back with Return().
  absl::StatusOr<std::unique_ptr<UnitBuffer>> Acquire(uint32_t unit);
  absl::StatusOr<std::unique_ptr<UnitBuffer>> AcquireWhole(uint32_t unit);
  void Return(std::unique_ptr<UnitBuffer> buffer) { pool_.Return(std::move(buffer)); }
  // [range) of `unit` at `version`; `to` holds its elements of `content`. Blocks.
  absl::Status Read(uint32_t unit, model::Range range, v1::Content content, int64_t version, absl::Span<std::byte> to);
  // Waits for prefetches under way and forgets them: the plan or the version changed.
  void Forget();

  double pull_seconds() const { return pull_seconds_; }
  double gather_seconds() const { return gather_seconds_; }
  uint64_t pulled_bytes() const { return pulled_bytes_; }
  uint64_t gathered_bytes() const { return gathered_bytes_; }

 private:
  struct Pulling {
    std::unique_ptr<UnitBuffer> buffer;
    int64_t version = 0;
    std::shared_ptr<Tally> tally;
  };

  void Start(uint32_t server, v1::PullRequest request, absl::Span<std::byte> to, const std::shared_ptr<Tally>& tally);
  v1::PullRequest Request(uint32_t unit, model::Range range) const;
  Pulling StartOwned(uint32_t unit);
  // A range of elements in a buffer of the unit.
  template <typename Range>
  absl::Span<std::byte> Part(const UnitBuffer& buffer, const Range& range) const {
    const uint64_t width = seat_->working_bytes();
    return {buffer.data.get() + range.begin * width, (range.end - range.begin) * width};
  }
  // Waits for the prefetch of `unit` at version(); starts it if there is none.
  absl::StatusOr<std::unique_ptr<UnitBuffer>> TakeOwned(uint32_t unit);
  absl::Status Wait(Tally& tally);
  void ReclaimStale();

  const Seat* seat_;
  Group* group_;
  BufferPool pool_;
  absl::flat_hash_map<uint32_t, Pulling> under_way_;  // by unit
  std::vector<Pulling> stale_;                        // pulls of older versions that are not yet answered
  double pull_seconds_ = 0;
  double gather_seconds_ = 0;
  uint64_t pulled_bytes_ = 0;
  uint64_t gathered_bytes_ = 0;
};

}  // namespace ballast::client
