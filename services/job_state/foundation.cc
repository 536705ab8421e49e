#include "ballast/services/job_state/foundation.h"

#include <utility>

namespace ballast::services {
namespace {

class SystemFoundationImpl : public Foundation {
 public:
  storage::Disk* disk() override { return storage::SystemDisk(); }
  absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string& directory) override {
    return storage::Catalog::Open(directory);
  }
  std::unique_ptr<Executor> MakeExecutor(int threads) override { return std::make_unique<ThreadExecutor>(threads); }
  absl::Status Pump(storage::GradientLog* log, std::function<void()> progress) override {
    return log->Start(std::move(progress));
  }
  void StopPumping(storage::GradientLog*) override {}  // its destructor ends its thread
};

}  // namespace

Foundation* SystemFoundation() {
  static Foundation* const foundation = new SystemFoundationImpl;
  return foundation;
}

}  // namespace ballast::services
