#include "ballast/services/monitoring/families.h"

#include <prometheus/text_serializer.h>

#include "ballast/proto/base/status.h"
#include "ballast/services/monitoring/job_families.h"
#include "ballast/services/monitoring/security_families.h"
#include "ballast/services/monitoring/server_families.h"

namespace ballast::services {

Families CollectFamilies(const StateServer* server, ServerState state, const RecoveryProgress& progress,
                         const SecurityCounters* security) {
  Families out;
  AddState(state, progress, &out);
  AddProcess(&out);
  if (security != nullptr) AddSecurity(*security, &out);
  if (server == nullptr) return out;
  const v1::GetServerStatusResponse status = server->Status();
  const ServerFigures figures = server->Figures();
  AddServer(status, figures, &out);
  AddTiers(status, server->traffic(), figures, &out);
  if (figures.gpu != nullptr) AddGpu(*figures.gpu, &out);
  AddJobs(status, &out);
  AddSteps(status, figures, &out);
  AddTraffic(status, figures, &out);
  AddCalls(server->counters(), figures, &out);
  AddDisk(figures, &out);
  const auto errors = server->counters().errors.Get();
  const auto damaged = errors.find({Call::kPush, model::kChecksum});
  AddRepairs(damaged == errors.end() ? 0 : damaged->second, &out);
  return out;
}

std::string ShowMetrics(const StateServer* server, ServerState state, const RecoveryProgress& progress,
                        const SecurityCounters* security) {
  return prometheus::TextSerializer().Serialize(CollectFamilies(server, state, progress, security));
}

}  // namespace ballast::services
