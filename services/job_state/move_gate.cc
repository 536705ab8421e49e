#include "ballast/services/job_state/move_gate.h"

#include <utility>

namespace ballast::services {

bool MoveGate::TryBegin(const void* mover, std::function<void()> admitted) {
  absl::MutexLock lock(&mu_);
  if (plans_ > 0) {
    admitted_[mover] = std::move(admitted);
    return false;
  }
  ++moves_;
  return true;
}

void MoveGate::Begin() {
  absl::MutexLock lock(&mu_);
  const auto open = [this] {
    mu_.AssertHeld();
    return plans_ == 0;
  };
  mu_.Await(absl::Condition(&open));
  ++moves_;
}

void MoveGate::End() {
  absl::MutexLock lock(&mu_);
  --moves_;
}

MoveGate::KeptShut::KeptShut(MoveGate* gate) : gate_(gate) {
  absl::MutexLock lock(&gate_->mu_);
  ++gate_->plans_;
  const auto still = [this] {
    gate_->mu_.AssertHeld();
    return gate_->moves_ == 0;
  };
  gate_->mu_.Await(absl::Condition(&still));
}

MoveGate::KeptShut::~KeptShut() {
  std::map<const void*, std::function<void()>> admitted;
  {
    absl::MutexLock lock(&gate_->mu_);
    if (--gate_->plans_ == 0) admitted.swap(gate_->admitted_);
  }
  for (const auto& [mover, run] : admitted) run();
}

}  // namespace ballast::services
