#include "ballast/services/monitoring/security_families.h"

namespace ballast::services {

void AddSecurity(const SecurityCounters& counters, Families* out) {
  Gauge ends(out, "ballast_tls_not_after_timestamp_seconds", "When the first of the certificates in use ends.");
  const auto add = [&ends](const char* what, int64_t seconds) {
    if (seconds > 0) ends.Add({{"what", what}}, seconds);
  };
  add("certificate", counters.certificate_not_after);
  add("client_ca", counters.client_ca_not_after);
  add("crl", counters.crl_not_after);

  Counter reloads(out, "ballast_tls_reloads_total",
                  "Changed files of certificates, tokens or rights: taken, or refused so that the old content holds.");
  const auto count = [&reloads](const char* what, const SecurityCounters::Reloads& counts) {
    reloads.Add({{"what", what}, {"result", "taken"}}, counts.taken.load());
    reloads.Add({{"what", what}, {"result", "refused"}}, counts.refused.load());
  };
  count("certificates", counters.tls);
  count("tokens", counters.tokens);
  count("rights", counters.rights);

  Counter denied(out, "ballast_auth_denied_total", "Calls refused for the caller's identity, rights or quota.");
  for (size_t why = 0; why < kDenialNames.size(); ++why) {
    denied.Add({{"why", kDenialNames[why]}}, counters.denials[why].load());
  }
}

}  // namespace ballast::services
