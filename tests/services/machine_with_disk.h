// This machine for a test's servers, except for a part that the test replaces.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ballast/services/job_state/foundation.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {

// A test overrides the part to replace.
class ThisMachine : public Foundation {
 public:
  storage::Disk* disk() override { return SystemFoundation()->disk(); }
  absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string& directory) override {
    return SystemFoundation()->OpenCatalog(directory);
  }
  std::unique_ptr<Executor> MakeExecutor(int threads) override { return SystemFoundation()->MakeExecutor(threads); }
  absl::Status Pump(storage::GradientLog* log, std::function<void()> progress) override {
    return SystemFoundation()->Pump(log, std::move(progress));
  }
  void StopPumping(storage::GradientLog* log) override { SystemFoundation()->StopPumping(log); }
};

// A test overrides Open. Catalogs stay on the machine's real disk.
class MachineWithDisk : public ThisMachine, protected storage::Disk {
 public:
  storage::Disk* disk() override { return this; }

 protected:
  absl::Status Remove(const std::string& path) override { return storage::SystemDisk()->Remove(path); }
  absl::StatusOr<std::unique_ptr<storage::IoQueue>> MakeQueue(const storage::IoQueueOptions& options) override {
    return storage::SystemDisk()->MakeQueue(options);
  }
};

}  // namespace ballast::services
