// The waits within a job, in sentences: who waits for whom, and for how long.
#pragma once

#include <string>
#include <vector>

#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

// Shorter waits are part of a healthy step, so nobody hears of them.
inline constexpr double kWaitSecondsMin = 1;

// Such as "rank 3 has not sealed step 412 for 14 s". Empty if nobody has waited for kWaitSecondsMin.
std::vector<std::string> ShowWaits(const v1::JobStatus& job);

}  // namespace ballast::services
