// The families of a server as a whole, and of its process.
#pragma once

#include "ballast/services/counters/counters.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/monitoring/family_builder.h"
#include "ballast/services/server/state_server.h"
#include "ballast/storage/tier/gpu_counters.h"

namespace ballast::services {

void AddState(ServerState state, const RecoveryProgress& progress, Families* out);
// CPU, memory and descriptors, as Prometheus' client libraries name them.
void AddProcess(Families* out);
void AddServer(const v1::GetServerStatusResponse& status, const ServerFigures& figures, Families* out);
void AddGpu(const storage::GpuCounters& gpu, Families* out);
void AddTiers(const v1::GetServerStatusResponse& status, const storage::TierTraffic& traffic,
              const ServerFigures& figures, Families* out);
void AddCalls(const ServerCounters& counters, const ServerFigures& figures, Families* out);
void AddDisk(const ServerFigures& figures, Families* out);
// Damage found and repaired. `wire`: slices that were damaged on their way.
void AddRepairs(uint64_t wire, Families* out);

}  // namespace ballast::services
