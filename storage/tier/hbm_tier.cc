#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

HbmWork& HbmWork::operator=(HbmWork&& other) noexcept {
  if (this != &other) {
    (void)Wait();
    tier_ = std::exchange(other.tier_, nullptr);
    done_ = std::exchange(other.done_, nullptr);
  }
  return *this;
}

absl::Status HbmWork::Wait() {
  HbmTier* const tier = std::exchange(tier_, nullptr);
  return tier == nullptr ? absl::OkStatus() : tier->Wait(std::exchange(done_, nullptr));
}

absl::Status HbmTier::Run(absl::FunctionRef<absl::Status(HbmQueue& queue)> work) {
  absl::StatusOr<HbmWork> begun = Start(work);
  return begun.ok() ? begun->Wait() : begun.status();
}

HbmBlock& HbmBlock::operator=(HbmBlock&& other) noexcept {
  if (this != &other) {
    Release();
    tier_ = std::exchange(other.tier_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    lease_ = std::move(other.lease_);
  }
  return *this;
}

void HbmBlock::Release() {
  if (tier_ != nullptr) tier_->Free(data_);
  tier_ = nullptr;
  data_ = nullptr;
  lease_ = BudgetLease();
}

}  // namespace ballast::storage
