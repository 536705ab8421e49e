// The families of certificates, identities and rights.
#pragma once

#include "ballast/services/metrics/family_builder.h"
#include "ballast/services/security/counters.h"

namespace ballast::services {

void AddSecurity(const SecurityCounters& counters, Families* out);

}  // namespace ballast::services
