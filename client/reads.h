// How a session reads: it gathers or pulls working parameters by unit, and reads any array of a tensor. A part of
// Session: session.h says how to use the parts, on which threads, and which errors end a session.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/session_types.h"

namespace ballast::client {

class LeasedParts;
class Tally;
struct SessionCore;

// A unit's gathered working parameters. The destructor frees the buffer. Valid until the session ends.
class UnitLease {
 public:
  UnitLease() = default;
  UnitLease(UnitLease&& other) noexcept;
  UnitLease& operator=(UnitLease&& other) noexcept;
  ~UnitLease();
  // The unit's flat space in the job's working dtype, padding included; tensors at Session::Locate(name).begin.
  absl::Span<const std::byte> bytes() const { return bytes_; }
  // The same as elements: bits of bf16 or fp16, or fp32. Calling the function of the wrong width ends the process with
  // a message.
  absl::Span<const bf16> parameters() const;
  absl::Span<const float> parameters_f32() const;

 private:
  friend class Reads;
  UnitLease(SessionCore* core, void* buffer, absl::Span<const std::byte> bytes, uint64_t element_bytes);
  SessionCore* core_ = nullptr;
  void* buffer_ = nullptr;
  absl::Span<const std::byte> bytes_;
  uint64_t element_bytes_ = 0;
};

// A pull into the caller's memory.
class PendingPull {
 public:
  PendingPull(PendingPull&&) noexcept = default;
  PendingPull& operator=(PendingPull&&) = delete;
  ~PendingPull() { (void)Await(); }
  // Blocks until the pull writes no more. Valid as long as the session. `waited`: the time that the caller spent in
  // Waiter()'s calls; the session adds it to its own times.
  absl::Status Await(absl::Duration waited = absl::ZeroDuration());
  // A function that blocks until the pull writes no more. Any thread may call it, also during other calls of the
  // session. The function may outlive this object; Await does not block once the function has returned.
  std::function<void()> Waiter() const;

 private:
  friend class Reads;
  PendingPull(SessionCore* core, std::shared_ptr<Tally> tally) : core_(core), tally_(std::move(tally)) {}
  SessionCore* core_;
  std::shared_ptr<Tally> tally_;  // null once awaited
};

// Working parameters of a unit, in place: memory of a server in this process, which wrote them there. Such a chunk's
// next update waits until its leases are given back, so hold them no longer than a pass needs. Some parts are copies:
// those that no server in this process has in its DRAM, those beyond inflight_bytes_max of leases, and those that begin
// while another lease is older than step_timeout. Only its holder can end a lease. It holds up the update even after
// another group's fence, and meanwhile gradients lent with Keep::kUntilApplied stay lent.
class WorkingCopyLease {
 public:
  WorkingCopyLease(WorkingCopyLease&&) noexcept = default;
  WorkingCopyLease& operator=(WorkingCopyLease&&) = delete;
  // Gives the lease back, also parts that are still on their way. Does not wait. If the job was dropped meanwhile, this
  // frees its memory. On any thread. Does nothing in a forked child, because the lease is the parent's.
  ~WorkingCopyLease();
  int64_t version() const;
  // Blocks until all parts have come: the ranges in order, each cut at chunks. They are readable, on any thread, until
  // the lease or the session ends. Valid as long as the session. `waited`: as for PendingPull::Await.
  absl::StatusOr<absl::Span<const LeasedPart>> Await(absl::Duration waited = absl::ZeroDuration());
  // As PendingPull::Waiter, until all parts have come.
  std::function<void()> Waiter() const;

 private:
  friend class Reads;
  WorkingCopyLease(SessionCore* core, std::shared_ptr<LeasedParts> parts);
  SessionCore* core_;
  uint64_t forks_;  // when the lease began
  std::shared_ptr<LeasedParts> parts_;
  absl::Status failed_;
};

class Reads {
 public:
  // (a) Starts pulling this rank's share of `unit` at version(). Never blocks; a no-op if under way.
  void Prefetch(uint32_t unit);
  // COLLECTIVE. The whole unit at version(), all-gathered.
  absl::StatusOr<UnitLease> Acquire(uint32_t unit);
  // (b) Starts pulling `runs` at version(), whichever ranks own them. Until its Await has returned, the pull may write
  // to their places.
  absl::StatusOr<PendingPull> StartPull(uint32_t unit, absl::Span<const PullRun> runs);
  // As StartPull, but reads elements where a server in this process has them. UNAVAILABLE (BUSY) while more than
  // inflight_bytes_max are on their way for leases that were given back before Await.
  absl::StatusOr<WorkingCopyLease> StartLease(uint32_t unit, absl::Span<const UnitRange> ranges);
  // Reads a whole tensor, or `runs` of it, at `version`, which is the current or a pinned one. Widens working values to
  // fp32.
  absl::Status Read(absl::string_view tensor, Content content, int64_t version, absl::Span<float> to,
                    absl::Span<const model::BoxRun> runs = {});

 protected:
  explicit Reads(SessionCore* core) : core_(core) {}
  ~Reads() = default;

 private:
  SessionCore* core_;
};

}  // namespace ballast::client
