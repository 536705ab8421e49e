// Working parameters on their way from the servers: prefetched, pulled, all-gathered.
//
// A unit is pulled straight to its place in a buffer of the whole unit, so that the all-gather happens in place and no
// element is copied twice. Buffers are reused: their number is the largest number of leases and prefetches ever alive
// at once. Threads: one; a lease may be dropped on another thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ballast/client/group/group.h"
#include "ballast/client/transfers/leases.h"
#include "ballast/client/transfers/seat.h"
#include "ballast/client/transfers/unit_buffers.h"
#include "ballast/client/transport/tally.h"

namespace ballast::client {

class Parameters {
 public:
  // Borrows both arguments.
  Parameters(const Seat* seat, Group* group) : seat_(seat), group_(group) {}
  ~Parameters() { Forget(); }

  void Prefetch(uint32_t unit);
  // Starts pulls of all `runs` of `unit` at the seat's version, each to its own place. The tally finishes when all have
  // ended. Does not block.
  std::shared_ptr<Tally> StartPull(uint32_t unit, absl::Span<const PullRun> runs);
  // Starts leases of all `ranges` of `unit` at the seat's version, in parts of one chunk each. Does not block. The
  // tally of the parts finishes when all have come. INVALID_ARGUMENT (BAD_RANGE).
  absl::StatusOr<std::shared_ptr<LeasedParts>> StartLease(uint32_t unit, absl::Span<const UnitRange> ranges);
  Leases& leases() { return *leases_; }
  // `waited`: see PendingPull::Await.
  absl::Status AwaitPull(Tally& tally, absl::Duration waited) {
    pull_seconds_ += absl::ToDoubleSeconds(waited);
    return Wait(tally);
  }
  // COLLECTIVE. Gathers the whole unit, in the job's working dtype. The caller gives the buffer back with Return().
  absl::StatusOr<std::unique_ptr<UnitBuffer>> Acquire(uint32_t unit);
  void Return(std::unique_ptr<UnitBuffer> buffer) { pool_->Return(std::move(buffer)); }
  // Reads `content` of the elements `range` of `unit` at `version` into `to`. Blocks.
  absl::Status Read(uint32_t unit, model::Range range, v1::Content content, int64_t version, absl::Span<std::byte> to);
  // Waits for prefetches under way and forgets them: the plan or the version changed.
  void Forget();

  double pull_seconds() const { return pull_seconds_; }
  double gather_seconds() const { return gather_seconds_; }
  uint64_t pulled_bytes() const { return pulled_bytes_ + leases_->copied_bytes(); }
  uint64_t leased_bytes() const { return leases_->leased_bytes(); }
  uint64_t gathered_bytes() const { return gathered_bytes_; }

 private:
  struct Pulling {
    std::unique_ptr<UnitBuffer> buffer;
    int64_t version = 0;
    std::shared_ptr<Tally> tally;
  };

  using PullOne =
      absl::FunctionRef<void(Router::Source source, const v1::PullRequest& request, absl::Span<std::byte> to)>;
  using List = std::function<absl::Status(PullOne pull)>;
  // Has the pulls of `list` started, maybe on another thread: it borrows nothing but the pulls' places.
  void Start(const std::shared_ptr<Tally>& tally, List list);
  // Pulls a run chunk by chunk. `request`: but for its range; `dtype`: of what it asks for. INVALID_ARGUMENT
  // (BAD_RANGE, BAD_LENGTH) for a run that begins amid a block of the dtype, or has other room than its elements need.
  static absl::Status PullRange(const UnitMap& units, v1::PullRequest request, const PullRun& run, kernels::Dtype dtype,
                                PullOne pull);
  // UNIMPLEMENTED (UNSUPPORTED) if blocks of the working dtype have elements of several ranks.
  absl::Status CheckGathers(uint32_t unit) const;
  // Of the unit at the seat's version; without a range.
  v1::PullRequest Request(uint32_t unit) const;
  Pulling StartOwned(uint32_t unit);
  // A range of elements in a buffer of the unit.
  template <typename Range>
  absl::Span<std::byte> Part(const UnitBuffer& buffer, const Range& range) const {
    const uint64_t begin = seat_->WorkingBytes(range.begin);
    return {buffer.data.get() + begin, seat_->WorkingBytes(range.end) - begin};
  }
  // Waits for the prefetch of `unit` at version(); starts it if there is none.
  absl::StatusOr<std::unique_ptr<UnitBuffer>> TakeOwned(uint32_t unit);
  absl::Status Wait(Tally& tally);
  void ReclaimStale();

  const Seat* seat_;
  Group* group_;
  const std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  const std::shared_ptr<Leases> leases_ = std::make_shared<Leases>(pool_);
  absl::flat_hash_map<uint32_t, Pulling> under_way_;  // by unit
  std::vector<Pulling> stale_;                        // pulls of older versions that are not yet answered
  double pull_seconds_ = 0;
  double gather_seconds_ = 0;
  uint64_t pulled_bytes_ = 0;
  uint64_t gathered_bytes_ = 0;
};

}  // namespace ballast::client
