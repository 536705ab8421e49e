#include "ballast/services/gateway/trimmer.h"

#include <malloc.h>

namespace ballast::services {

void Trimmer::Tell(const Asked& asked) {
  for (const std::function<void()>& done : asked) {
    if (done) done();
  }
}

void Trimmer::Trim(std::function<void()> done) {
  {
    absl::MutexLock lock(&mu_);
    if (!stopped_) {
      asked_.push_back(std::move(done));
      if (asked_.size() == 1) wake_();
      return;
    }
  }
  if (done) done();
}

void Trimmer::Run() {
  Asked asked;
  {
    absl::MutexLock lock(&mu_);
    asked.swap(asked_);
  }
  if (asked.empty()) return;
  ::malloc_trim(0);
  Tell(asked);
}

void Trimmer::Stop() {
  Asked asked;
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
    asked.swap(asked_);
  }
  Tell(asked);
}

}  // namespace ballast::services
