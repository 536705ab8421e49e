// The families of certificates, identities and rights.
#pragma once

#include "ballast/services/gateway/security/counters.h"
#include "ballast/services/monitoring/family_builder.h"

namespace ballast::services {

void AddSecurity(const SecurityCounters& counters, Families* out);

}  // namespace ballast::services
