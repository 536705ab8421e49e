#include "ballast/proto/base/mutexes.h"

#include "absl/synchronization/mutex.h"

namespace ballast::model {

void StopDeadlockSearch() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

}  // namespace ballast::model
