// Names of all metrics: nothing else in the server names a metric. Components know plain counters; their families are
// made anew at each scrape.
#pragma once

#include <string>

#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/gateway/security/counters.h"
#include "ballast/services/monitoring/family_builder.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// `server`: null while the server recovers its jobs; then only state, progress and process are there. `security`: null
// without TLS and identities.
Families CollectFamilies(const StateServer* server, ServerState state, const RecoveryProgress& progress,
                         const SecurityCounters* security = nullptr);
// The same in Prometheus' text format, version 0.0.4.
std::string ShowMetrics(const StateServer* server, ServerState state, const RecoveryProgress& progress,
                        const SecurityCounters* security = nullptr);

}  // namespace ballast::services
