// The families of a server's jobs.
#pragma once

#include "ballast/services/monitoring/family_builder.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// The jobs' sizes, versions, epochs and pins, and what the scrub found of them.
void AddJobs(const v1::GetServerStatusResponse& status, Families* out);
// Its steps: where their time goes, on this server and in the trainers.
void AddSteps(const v1::GetServerStatusResponse& status, const ServerFigures& figures, Families* out);
// Its traffic, and the room of its log.
void AddTraffic(const v1::GetServerStatusResponse& status, const ServerFigures& figures, Families* out);

}  // namespace ballast::services
