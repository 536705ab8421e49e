// The gradients that this rank has pushed for the step in the making. They stay here, or where the caller has them,
// until every server is prepared, so that whatever a server lost can be sent again.
//
// Memory: the gradient dtype's for every element that this rank owns of a unit it pushed, and 4 bytes for units that
// accumulate; allocated at a unit's first push and kept. Of borrowed ones, slices that lie in several runs until
// servers have them. Threads: one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/client/seat.h"
#include "ballast/client/session.h"

namespace ballast::client {

class Gradients {
 public:
  // Borrows `seat`.
  explicit Gradients(const Seat* seat) : seat_(seat), pushes_(std::make_shared<Tally>()) {}
  ~Gradients() { (void)pushes_->Wait(); }

  // The plan changed. REQUIRES: empty().
  void Resize();

  // In the job's gradient dtype.
  absl::Status Push(uint32_t unit, absl::Span<const std::byte> gradient, absl::Span<const std::string> absent);
  absl::Status PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent);
  // What was pushed counts no more, and what was borrowed is the caller's again: Forget comes before anything else.
  // Waits for pushes.
  void Return();
  absl::Status Accumulate(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent);
  // Pushes what was accumulated, and waits until the servers have all that was pushed.
  absl::Status Flush();
  // Pushes zeros for slices that touch a tensor of `presence` and were not pushed, and waits for them.
  absl::Status Cover(const std::string& presence);
  // Tensors of `presence` have gradients that the servers read where they are. BAD_REQUEST if anything was pushed.
  absl::Status CheckLend() const;
  void Lend(const std::string& presence);
  // Sends a slice again that a server misses.
  void Resend(const OwnedSlice& owned);
  // All that touch a tensor of `presence`, within what may be in flight; Flush waits for them.
  void ResendAll(const std::string& presence);
  // For pushes under way; the first error since the last wait, of Flush and Cover too.
  absl::Status Wait() { return pushes_->Wait(); }
  // Waits for pushes under way and forgets everything.
  void Forget();

  // Nothing is on its way.
  bool idle() const { return pushes_->idle(); }
  bool empty() const { return !touched_; }
  // Tensors of which some contribution was given here.
  const std::string& presence() const { return presence_; }
  uint64_t pushed_bytes() const { return pushed_bytes_; }

 private:
  enum class State { kNone, kAccumulating, kPushed, kBorrowed, kReturned, kZeroes, kLent };
  struct UnitGradient {
    State state = State::kNone;
    std::vector<std::byte> values;
    std::vector<GradientRun> runs;  // in the stead of `values` if they are borrowed
    std::vector<float> sum;
    std::vector<bool> sent;  // by slice
  };

  absl::Status Check(uint32_t unit, size_t size) const;
  absl::Status CheckNone(uint32_t unit) const;
  absl::StatusOr<std::vector<uint32_t>> AbsentTensors(uint32_t unit, absl::Span<const std::string> names) const;
  void Mark(uint32_t unit, absl::Span<const uint32_t> absent);
  void SendSlice(UnitGradient& gradient, const OwnedSlice& owned);
  void SendTouched(uint32_t unit, const std::string& presence);

  const Seat* seat_;
  std::shared_ptr<Tally> pushes_;
  std::vector<UnitGradient> units_;
  std::string presence_;
  bool touched_ = false;
  uint64_t pushed_bytes_ = 0;
};

}  // namespace ballast::client
