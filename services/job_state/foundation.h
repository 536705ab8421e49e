// The files, catalog and threads under a server: this machine's, or a simulation's, which runs a whole server on a
// single thread in an order of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/threads/executor.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// Threads: any. Outlives every server that uses the foundation.
class Foundation {
 public:
  virtual ~Foundation() = default;
  virtual storage::Disk* disk() = 0;
  // Null stands for storage::OpenHbmTier.
  virtual storage::HbmOpener hbm() { return nullptr; }
  virtual absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string& directory) = 0;
  virtual std::unique_ptr<Executor> MakeExecutor(int threads) = 0;
  // Pumps `log` from now on until its end. `progress`, errors: as for GradientLog::Start.
  virtual absl::Status Pump(storage::GradientLog* log, std::function<void()> progress) = 0;
  // Call before `log` is destroyed.
  virtual void StopPumping(storage::GradientLog* log) = 0;
};

// This machine's files, catalog and threads.
Foundation* SystemFoundation();

}  // namespace ballast::services
