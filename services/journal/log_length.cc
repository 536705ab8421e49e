#include "ballast/services/journal/log_length.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/job_journal.h"

namespace ballast::services {

uint64_t LogStepsFor(const FlushWaits& waits) {
  if (waits.log_steps >= kLogStepsMax || waits.time <= absl::ZeroDuration()) return waits.log_steps;
  const double flushed = FlushedShare(waits.log_steps) * static_cast<double>(waits.memory_state_bytes);
  const double written = flushed + static_cast<double>(waits.disk_state_bytes);
  if (written <= 0) return waits.log_steps;
  const double share = absl::FDivDuration(waits.waited, waits.time) * flushed / written;
  if (share <= kFlushWaitShareMax) return waits.log_steps;
  const double turns = 1 / FlushedShare(waits.log_steps) * share / kFlushWaitShareMax;
  const double steps = std::min(2 + std::ceil(turns), 2.0 * static_cast<double>(waits.log_steps));
  return std::min(kLogStepsMax, static_cast<uint64_t>(steps));
}

void LogLength::BeginWindow() {
  steps_ = 0;
  before_ = core_->counters.steps.clock().totals();
}

uint64_t LogLength::Wanted(const storage::ChunkStore& store, uint64_t held) const {
  if (core_->around.log_steps > 0) return std::max(held, core_->around.log_steps);
  const StageTimes now = core_->counters.steps.clock().totals();
  const auto spent = [&](Stage stage) {
    const auto i = static_cast<size_t>(stage);
    return now[i] - before_[i];
  };
  FlushWaits waits{.log_steps = held, .waited = spent(Stage::kFlush) + spent(Stage::kStateWrite)};
  for (size_t i = 0; i < kStages; ++i) waits.time += now[i] - before_[i];
  const storage::ChunkStore::Residency residency = store.residency();
  waits.memory_state_bytes = residency.state.hbm + residency.state.dram;
  waits.disk_state_bytes = residency.state.nvme;
  return LogStepsFor(waits);
}

void LogLength::AfterStep(const storage::ChunkStore& store) {
  std::optional<uint64_t> held;
  {
    JobMutexLock lock(&core_->mu);
    held = journal_->StepsHeld();
  }
  // A further try could fill the disk again, to its last block, for a moment in which another job needs one.
  if (!held.has_value() || stays_short_) return;
  if (steps_ >= 0 && ++steps_ < kStepsSeen) return;
  const uint64_t wanted = steps_ < 0 ? *held : Wanted(store, *held);
  if (wanted > *held) Lengthen(*held, wanted);
  BeginWindow();
}

void LogLength::Lengthen(uint64_t held, uint64_t wanted) {
  const absl::Status status = journal_->Lengthen(wanted - held);
  if (status.ok()) {
    spdlog::info("job '{}': its gradient log holds {} steps now, {} before, {}", core_->name, wanted, held,
                 core_->around.log_steps > 0 ? "as log_steps says" : "because steps waited for flushes");
  } else if (!absl::IsUnavailable(status) && !std::exchange(stays_short_, true)) {
    spdlog::warn("job '{}': its gradient log should hold {} steps and stays at {}: {}", core_->name, wanted, held,
                 std::string(status.message()));
  }
}

}  // namespace ballast::services
