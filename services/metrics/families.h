// Names of all metrics: nothing else in the server names a metric.
#pragma once

#include <prometheus/metric_family.h>

#include <vector>

#include "ballast/services/server/state_server.h"

namespace ballast::services {

std::vector<prometheus::MetricFamily> CollectFamilies(const StateServer& state);

}  // namespace ballast::services
