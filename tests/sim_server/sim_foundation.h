// What one life of a simulated server stands on: a simulated disk and catalog, and threads that do nothing until the
// schedule lets them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ballast/services/foundation.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/sim_server/sim_catalog.h"
#include "ballast/tests/storage/test_hbm.h"

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
  void Pump(storage::GradientLog* log, std::function<void()> progress) override;
  void StopPumping(storage::GradientLog* log) override;

  // Some thread does the next thing that it has to do. False if none has anything.
  bool RunTask(Random* random);
  // Some log's thread makes a round.
  bool PumpOne(Random* random);
  // The process is gone: what its threads had still to do is never done, and they take nothing more.
  void Die();

 private:
  class ManualExecutor;

  storage::SimDisk* const disk_;
  SimCatalog* const catalog_;
  std::vector<ManualExecutor*> executors_;  // in the order they were made
  std::vector<storage::GradientLog*> logs_;
  bool dead_ = false;
};

}  // namespace ballast::sim
