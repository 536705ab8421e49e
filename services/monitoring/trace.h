// The last steps of a job on its servers as a trace for chrome://tracing, Perfetto or Speedscope.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

// Steps of one server's job, and the server's address.
using ServerSteps = std::pair<std::string, v1::JobSteps>;

// A process per server. Its rows: steps; what came of the step in flight and when; what the worker did and when; the
// stages of each step, whose lengths are measured and whose order is not; the slowest trainers' own times, laid end to
// end before their last seal.
std::string ShowTrace(const std::vector<ServerSteps>& servers);

}  // namespace ballast::services
