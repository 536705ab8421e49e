#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

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
