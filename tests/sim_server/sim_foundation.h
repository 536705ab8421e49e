// Surroundings of one life of a simulated server: a simulated disk and catalog, and threads that run only when the
// schedule lets them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ballast/services/job_state/foundation.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/sim_server/sim_catalog.h"
#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::sim {

// Threads: one.
class SimFoundation : public services::Foundation {
 public:
  SimFoundation(storage::SimDisk* disk, SimCatalog* catalog) : disk_(disk), catalog_(catalog) {}

  storage::Disk* disk() override { return disk_; }
  storage::HbmOpener hbm() override { return storage::TestHbm(); }
  absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string&) override {
    return catalog_->Open();
  }
  std::unique_ptr<services::Executor> MakeExecutor(int threads) override;
  absl::Status Pump(storage::GradientLog* log, std::function<void()> progress) override;
  void StopPumping(storage::GradientLog* log) override;

  // Runs the next task of some thread. False if no thread has a task.
  bool RunTask(Random* random);
  // Runs a round of some log's thread. True if this log has more queued or in flight.
  bool PumpOne(Random* random);
  // Ends the process: its threads never run their remaining tasks and accept no new tasks.
  void Die();

 private:
  class ManualExecutor;

  storage::SimDisk* const disk_;
  SimCatalog* const catalog_;
  std::vector<ManualExecutor*> executors_;  // in order of creation
  std::vector<storage::GradientLog*> logs_;
  bool dead_ = false;
};

}  // namespace ballast::sim
