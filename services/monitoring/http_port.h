// The server's HTTP port: /livez, /readyz, /metrics, /status.json, /steps.json and the page. Read-only. It answers
// before the server has recovered its jobs, and says how far the recovery is. With TLS and `tls.client_ca` a client
// must show a certificate, except at /livez and /readyz: a kubelet has none.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/gateway/security/counters.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// Threads: any.
class HttpPort {
 public:
  // Borrows `progress`, `security` (null: neither TLS nor identities) and `guard` (null: HTTP in the clear).
  // Errors: those of Doorman::Start and TlsSessions::Make.
  static absl::StatusOr<std::unique_ptr<HttpPort>> Start(const std::string& listen, const RecoveryProgress* progress,
                                                         const SecurityCounters* security = nullptr,
                                                         Guard* guard = nullptr);
  ~HttpPort();

  // The server is ready. Borrows `state` until Withdraw. `address`: where trainers reach the server, for /status.json.
  // `fault` returns what keeps trainers from calling, or an empty text; null means never a fault. Must not block.
  void Serve(const StateServer* state, const std::string& address, std::function<std::string()> fault = nullptr);
  // The server is stopping: no further answer reads `state`, nor calls `fault`. Does not block: those that read `state`
  // may wait for a job.
  void Withdraw();
  // Waits for the answers that read `state`. After Withdraw, and before `state` ends.
  void AwaitAnswers();

  // "host:port" with the port really taken.
  const std::string& address() const;

 private:
  struct Impl;
  explicit HttpPort(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::services
