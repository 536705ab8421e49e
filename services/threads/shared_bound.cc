#include "ballast/services/threads/shared_bound.h"

namespace ballast::services {

bool SharedBound::Share::Take(uint64_t amount) {
  absl::MutexLock lock(&bound_->mu_);
  const uint64_t free = bound_->free();
  if (amount > free || held_ > free - amount) return false;
  held_ += amount;
  bound_->used_->fetch_add(amount);
  return true;
}

void SharedBound::Share::Return(uint64_t amount) {
  absl::MutexLock lock(&bound_->mu_);
  held_ -= amount;
  bound_->used_->fetch_sub(amount);
}

uint64_t SharedBound::Share::held() const {
  absl::MutexLock lock(&bound_->mu_);
  return held_;
}

}  // namespace ballast::services
