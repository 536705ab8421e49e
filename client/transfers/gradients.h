// The gradients that this rank has pushed for the step in the making. This rank keeps each gradient until every server
// is prepared, so that it can send a slice again that a server lost. The exception is memory given with its owner and
// Keep::kUntilCopied: this rank lets it go as soon as the servers have it. If a server loses such a slice after that,
// the step fails.
//
// Memory: Push copies into one buffer per unit, as large as this rank's part of the unit, and keeps the buffer from the
// unit's first Push on. PushBorrowed copies only a slice that is spread over several runs, until the server has it.
// Lent memory (kUntilApplied) stays until Forget, also after Return. A server in this process may keep it longer.
// Threads: one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transfers/seat.h"
#include "ballast/client/transport/tally.h"
#include "ballast/proto/base/lent_memory.h"

namespace ballast::client {

class Gradients {
 public:
  // Borrows `seat`.
  explicit Gradients(const Seat* seat) : seat_(seat), pushes_(std::make_shared<Tally>()) {}
  ~Gradients() { (void)pushes_->Wait(); }

  // The plan changed. REQUIRES: empty().
  void Resize();

  // In the job's gradient dtype. Does not wait for room; the caller does, by Router::push_admissions.
  absl::Status Push(uint32_t unit, absl::Span<const std::byte> gradient, absl::Span<const std::string> absent);
  // `owner`: keeps the memory of `runs`; null where the caller does.
  absl::Status PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent,
                            const std::shared_ptr<const void>& owner, Keep keep = Keep::kUntilCopied);
  // Waits for pushes, then gives borrowed memory back to the caller, except lent memory: the step may be sealed, so a
  // server may still read it. Pushed gradients no longer count. The next call must be TakeBack or Forget.
  void Return();
  // Waits until the servers have every pushed slice.
  absl::Status Flush();
  // Pushes zeros for slices that touch a tensor of `presence` and were not pushed; waits for them.
  absl::Status Cover(const std::string& presence);
  // BAD_REQUEST if the step already has a gradient.
  absl::Status CheckLend() const;
  // Servers will read the gradients of the tensors in `presence` in place.
  void Lend(const std::string& presence);
  // Sends a slice again that a server lacks. STATE_LOST if this rank no longer has the slice's memory.
  absl::Status Resend(const OwnedSlice& owned);
  // Sends again all slices that touch a tensor of `presence`, bounded by the bytes in flight; Flush waits for them.
  absl::Status ResendAll(const std::string& presence);
  // Waits for pushes under way. Returns the first error since the last wait (Flush and Cover wait too).
  absl::Status Wait() { return pushes_->Wait(); }
  // Waits for pushes under way and forgets everything.
  void Forget();
  // Waits for pushes under way, and takes lent memory back from the servers. REQUIRES: this rank has not sealed the
  // pushes, so nobody can decide a step with them. The next call must be Forget.
  void TakeBack();

  // No push is under way.
  bool idle() const { return pushes_->idle(); }
  bool empty() const { return !touched_; }
  // Tensors that got a contribution on this rank.
  const std::string& presence() const { return presence_; }
  uint64_t pushed_bytes() const { return pushed_bytes_; }

 private:
  enum class State { kNone, kPushed, kBorrowed, kLetGo, kReturned, kZeroes, kLent };
  struct UnitGradient {
    State state = State::kNone;
    std::vector<std::byte> values;
    std::vector<GradientRun> runs;               // in place of `values` if borrowed
    std::shared_ptr<model::LentGradients> lent;  // keeps `runs`, if they are lent
    std::vector<bool> sent;                      // by slice
  };

  absl::Status Check(uint32_t unit, size_t size) const;
  absl::Status CheckNone(uint32_t unit) const;
  absl::StatusOr<std::vector<uint32_t>> AbsentTensors(uint32_t unit, absl::Span<const std::string> names) const;
  void Mark(uint32_t unit, absl::Span<const uint32_t> absent);
  // The slice's bytes in the runs, or in memory of their own: then `gathered` gets it.
  absl::Span<const std::byte> BytesOf(const UnitGradient& gradient, const OwnedSlice& owned,
                                      std::shared_ptr<std::vector<std::byte>>* gathered) const;
  void SendSlice(UnitGradient& gradient, const OwnedSlice& owned, const std::shared_ptr<const void>& owner = nullptr);
  void SendTouched(uint32_t unit, const std::string& presence, const std::shared_ptr<const void>& owner = nullptr);

  const Seat* seat_;
  std::shared_ptr<Tally> pushes_;
  std::vector<UnitGradient> units_;
  std::string presence_;
  bool touched_ = false;
  uint64_t pushed_bytes_ = 0;
};

}  // namespace ballast::client
