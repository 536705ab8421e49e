// The last steps of a job, in the form in which operators get them.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/services/counters/step_log.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

// At most the `last` steps; 0: all that the log keeps.
v1::JobSteps ShowSteps(const std::string& job, const StepLog& log, uint32_t last);

}  // namespace ballast::services
