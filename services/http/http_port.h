// The server's HTTP port: /livez, /readyz, /metrics, /status.json, /steps.json and the page. Read-only. It answers
// before the server has recovered its jobs, and says how far the recovery is. By TLS it asks for clients' certificates
// where the rpc port does, except for /livez and /readyz, since a kubelet has none.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/security/counters.h"
#include "ballast/services/security/served_certificates.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// Threads: any.
class HttpPort {
 public:
  // Borrows `progress`, `security` (null: neither TLS nor identities) and `certificates` (null: HTTP in the clear).
  // Errors: those of Doorman::Start and TlsSessions::Make.
  static absl::StatusOr<std::unique_ptr<HttpPort>> Start(const std::string& listen, const RecoveryProgress* progress,
                                                         const SecurityCounters* security = nullptr,
                                                         const ServedCertificates* certificates = nullptr);
  ~HttpPort();

  // The server is ready. Borrows `state` until Withdraw. `address`: where trainers reach the server, for /status.json.
  // `fault`: what keeps trainers from calling; empty, or null: nothing. Must not block.
  void Serve(const StateServer* state, const std::string& address, std::function<std::string()> fault = nullptr);
  // The server is stopping. Waits for the answers that read `state`.
  void Withdraw();

  // "host:port" with the port really taken.
  const std::string& address() const;

 private:
  struct Impl;
  explicit HttpPort(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::services
