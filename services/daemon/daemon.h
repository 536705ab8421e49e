// A server and what makes it reachable: the HTTP port, the registry's entry and gRPC.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/daemon/config.h"
#include "ballast/services/daemon/registration.h"
#include "ballast/services/gateway/chunk_client.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/gateway/self_check.h"
#include "ballast/services/monitoring/http_port.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// Exit codes of ballastd.
enum Exit {
  kOk = 0,
  kFailed = 1,
  kBadUsage = 2,
  kPortInUse = 3,
  kMetricsPortInUse = 4,
  kUnwritable = 5,
  kDirectoryInUse = 6,
  kDamaged = 7,
  kLaterVersion = 8,
  kDiskFull = 9
};

// Why the daemon does not serve, and the exit code.
struct NotServing {
  absl::Status why;
  Exit code;
};

// The parts start in the order of the steps, and end in reverse. Threads: one at a time, with SIGTERM, SIGINT and
// SIGHUP blocked: a start looks whether one of the first two waits, and then ends.
class Daemon {
 public:
  // `config` outlives the daemon.
  explicit Daemon(const Config& config) : config_(config) {}
  ~Daemon();

  // Returns once all jobs are back. Otherwise the daemon can only be destroyed.
  std::optional<NotServing> Start();
  // REQUIRES, as all below: Start has returned none.
  void Reload();
  // Calls under way get some seconds.
  void Stop();
  std::string address() const { return rpc_->address(); }
  std::string http_address() const { return http_->address(); }
  std::string server_id() const { return server_->server_id(); }

 private:
  std::optional<NotServing> ReadFiles();
  std::optional<NotServing> OpenHttp();
  std::optional<NotServing> ConnectRegistry();
  std::optional<NotServing> StartServer();
  std::optional<NotServing> StartRpc();
  std::optional<NotServing> AwaitJobs();
  std::optional<NotServing> Announce();

  const Config& config_;
  std::unique_ptr<Guard> guard_;
  RecoveryProgress progress_;
  std::unique_ptr<HttpPort> http_;
  std::unique_ptr<Registration> registration_;  // null: no registry
  std::unique_ptr<ChunkClient> chunks_;         // outlives the server
  std::unique_ptr<StateServer> server_;
  std::unique_ptr<RpcServer> rpc_;
  std::unique_ptr<SelfCheck> check_;
};

}  // namespace ballast::services
