// Where the time of a job's steps goes on this server: one clock per job that is in exactly one stage at every moment,
// so the stages' seconds sum to the wall time.
//
// Two hands move the clock. The *worker* applies decided steps, pins and moves; the *intake* takes slices and seals of
// the step in flight. While the worker is at work the clock shows the worker's stage, otherwise the intake's. So slices
// that arrive beside an update cost no time of their own, and `idle` is time in which this server had nothing to do for
// the job: its trainers compute, or wait for another server.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

enum class Stage {
  kPush,        // from a step's first slice to its first seal
  kSealWait,    // from the first seal until all ranks have sealed and all slices are there; then until the decision
  kLogSync,     // the prepared record is on its way to the log's disk
  kStateRead,   // an update waits for state, or for gradients in the log, from the disk
  kKernel,      // an update computes
  kStateWrite,  // an update waits for writes and syncs of state
  kFlush,       // chunks in memory are written to the disk, so that the log can be cut
  kPin,         // a pin is made, checked or given up; a pinned state is copied before its update
  kMove,        // chunks move between tiers
  kIdle
};
inline constexpr size_t kStages = 10;
inline constexpr std::array<const char*, kStages> kStageNames = {
    "push", "seal_wait", "log_sync", "state_read", "kernel", "state_write", "flush", "pin", "move", "idle"};

using StageTimes = std::array<absl::Duration, kStages>;

// Threads: any.
class StepClock {
 public:
  StepClock();

  void SetIntake(Stage stage);
  Stage intake() const;
  // Nothing: the worker has no work of a stage.
  void SetWorker(std::optional<Stage> stage);
  // As SetWorker, but only while an update is at work: a flush stays a flush, whatever it waits for.
  void SetUpdate(Stage stage);
  // Since the clock was made, up to now.
  StageTimes totals() const;

 private:
  static absl::Duration Now();  // of a clock that nobody sets
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  StageTimes totals_ ABSL_GUARDED_BY(mu_) = {};
  absl::Duration since_ ABSL_GUARDED_BY(mu_);
  Stage intake_ ABSL_GUARDED_BY(mu_) = Stage::kIdle;
  std::optional<Stage> worker_ ABSL_GUARDED_BY(mu_);
};

// While it lives, the worker is in a stage.
class Working {
 public:
  Working(StepClock* clock, Stage stage) : clock_(clock) { clock_->SetWorker(stage); }
  ~Working() { clock_->SetWorker(std::nullopt); }
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;

 private:
  StepClock* const clock_;
};

}  // namespace ballast::services
