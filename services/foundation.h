// What a server stands on: the machine's files, catalog and threads, or a simulation's, which runs all of a server on
// one thread in an order of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/executor.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// Threads: any. Outlives every server that stands on it.
class Foundation {
 public:
  virtual ~Foundation() = default;
  virtual storage::Disk* disk() = 0;
  // Null: storage::OpenHbmTier.
  virtual storage::HbmOpener hbm() { return nullptr; }
  virtual absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string& directory) = 0;
  virtual std::unique_ptr<Executor> MakeExecutor(int threads) = 0;
  // From now on until its end `log` is pumped; `progress` as GradientLog::Start's.
  virtual void Pump(storage::GradientLog* log, std::function<void()> progress) = 0;
  // `log` ends now.
  virtual void StopPumping(storage::GradientLog* log) = 0;
};

// This machine.
Foundation* SystemFoundation();

}  // namespace ballast::services
