// The last steps of a job, as this server saw them: when slices, seals and decision came, and where the time went.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/counters/step_clock.h"
#include "ballast/storage/io/duration_histogram.h"

namespace ballast::services {

// Seconds of a trainer's own in one step. Ranks tell them in their seals.
inline constexpr size_t kTrainerSpans = 4;
inline constexpr std::array<const char*, kTrainerSpans> kTrainerSpanNames = {"compute", "pull_wait", "gather",
                                                                             "push_wait"};
using TrainerTimes = std::array<absl::Duration, kTrainerSpans>;

// A step from the decision before it to its own decision. Times that did not come are InfinitePast.
struct SeenStep {
  int64_t step = 0;
  absl::Time began = absl::InfinitePast();  // the decision before; of the first step, its first slice or seal
  absl::Time first_push = absl::InfinitePast();
  absl::Time first_seal = absl::InfinitePast();
  absl::Time last_seal = absl::InfinitePast();  // first seal of the last rank
  absl::Time appended = absl::InfinitePast();   // the prepared record: all seals and slices were there
  absl::Time prepared = absl::InfinitePast();
  absl::Time decided = absl::InfinitePast();
  // The step's own update, behind its decision; during the next step.
  absl::Time update_began = absl::InfinitePast();
  absl::Time updated = absl::InfinitePast();
  absl::Time flushed = absl::InfinitePast();
  StageTimes stages = {};  // of the span from `began` to `decided`; sums to its length
  uint32_t ranks = 0;      // that sealed here
  uint32_t slowest_rank = 0;
  TrainerTimes trainers_sum = {}, trainers_max = {};
};

// Threads: any.
class StepLog {
 public:
  static constexpr size_t kStepsKept = 256;
  static constexpr size_t kStepsShown = 60;  // a page draws so many, and what binds a job's steps is told of them

  StepLog() = default;

  // A new epoch: what came of the step in flight is void, and attempts are counted anew.
  void Opened();
  // A slice of the step in flight was taken. `attempt`: higher than before, the rank has dropped its earlier attempt.
  void Pushed(int64_t step, uint64_t attempt);
  // A rank's seal was accepted; a repeated seal changes nothing. REQUIRES: `rank` < `world_size`.
  void Sealed(int64_t step, uint64_t attempt, uint32_t rank, uint32_t world_size, const TrainerTimes& times);
  // All seals and slices are there: the prepared record was appended.
  void Appended();
  void Prepared();
  void Decided(int64_t step);
  void UpdateBegan(int64_t step);
  void Updated(int64_t step);
  void Flushed(int64_t step);

  StepClock& clock() { return clock_; }
  const StepClock& clock() const { return clock_; }
  // From one decision to the next.
  const storage::DurationHistogram& seconds() const { return seconds_; }
  uint64_t dropped_attempts() const;
  absl::Time last_decision() const;
  TrainerTimes trainers_sum() const;
  TrainerTimes trainers_max() const;
  // Oldest first.
  std::vector<SeenStep> Steps() const;
  std::optional<SeenStep> newest() const;
  // The sum over the last kStepsShown steps; nullopt before the first step.
  std::optional<StageTimes> last_stages() const;
  // nullopt: nothing of the next step has come.
  std::optional<SeenStep> in_flight() const;

 private:
  // Begins a new step or attempt, if it is one.
  void Enter(int64_t step, uint64_t attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SeenStep* Find(int64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  StepClock clock_;
  storage::DurationHistogram seconds_{storage::kStepBoundsSeconds};
  mutable absl::Mutex mu_;  // before the clock's
  SeenStep flying_ ABSL_GUARDED_BY(mu_);
  uint64_t attempt_ ABSL_GUARDED_BY(mu_) = 0;
  bool entered_ ABSL_GUARDED_BY(mu_) = false;  // something of the step in flight has come
  std::vector<bool> sealed_ ABSL_GUARDED_BY(mu_);
  StageTimes before_ ABSL_GUARDED_BY(mu_) = {};  // the clock when the step in flight began
  std::deque<SeenStep> steps_ ABSL_GUARDED_BY(mu_);
  uint64_t dropped_attempts_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_decision_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  TrainerTimes trainers_sum_ ABSL_GUARDED_BY(mu_) = {}, trainers_max_ ABSL_GUARDED_BY(mu_) = {};
};

}  // namespace ballast::services
