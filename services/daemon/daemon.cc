#include "ballast/services/daemon/daemon.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <climits>
#include <functional>
#include <utility>
#include <vector>

#include "ballast/proto/base/access.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/daemon/disk_room.h"
#include "ballast/services/daemon/memory_room.h"

namespace ballast::services {
namespace {

// How long calls under way may take to end after SIGTERM.
constexpr absl::Duration kGrace = absl::Seconds(5);

// A port that is not served, though it may be free.
Exit ExitOfPort(const absl::Status& status, Exit in_use) {
  return model::ReasonOf(status) == model::kLimit ? kFailed : in_use;
}

Exit ExitOf(const absl::Status& status) {
  if (model::ReasonOf(status) == model::kBadConfig) return kBadUsage;
  if (model::ReasonOf(status) == model::kLaterVersion) return kLaterVersion;
  if (status.code() == absl::StatusCode::kFailedPrecondition) return kDirectoryInUse;
  if (status.code() == absl::StatusCode::kDataLoss) return kDamaged;
  if (model::ReasonOf(status) == model::kDiskFull) return kDiskFull;
  if (model::ReasonOf(status) == model::kIo) return kUnwritable;
  return kFailed;
}

// A signal may end a start, which is no error.
Exit ExitOfStart(const absl::Status& status) {
  return model::ReasonOf(status) == model::kServerDown ? kOk : ExitOf(status);
}

// A signal waits until sigwait takes it; a server that still starts looks whether one waits.
absl::Status Signalled() {
  sigset_t waiting;
  sigpending(&waiting);
  if (sigismember(&waiting, SIGTERM) != 1 && sigismember(&waiting, SIGINT) != 1) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                      "a signal stopped the server while it started; the next start recovers its jobs");
}

// The address by which trainers reach a server that listens at `listen`.
std::string AdvertisedAddress(const Config& config, const std::string& listen) {
  const auto own = model::ParseAddress(listen, model::AddressUse::kListen);
  if (!own.ok()) return listen;
  model::Address address = *own;
  if (!config.advertise.empty()) {
    address = *model::ParseAddress(config.advertise, model::AddressUse::kListen);
    if (address.port == 0) address.port = own->port;
  } else if (address.host == "0.0.0.0" || address.host == "::") {
    char name[HOST_NAME_MAX + 1] = {};
    if (gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0') address.host = name;
  }
  return model::FormatAddress(address);
}

v1::ServerEntry EntryOf(const std::string& id, uint64_t disk, const std::string& address, v1::ServerState state,
                        const storage::TierBytes& budget) {
  v1::ServerEntry entry;
  entry.set_server_id(id);
  entry.set_disk(disk);
  entry.set_address(address);
  entry.set_version(model::Version());
  entry.set_state(state);
  entry.set_hbm_bytes(budget.hbm);
  entry.set_dram_bytes(budget.dram);
  entry.set_nvme_bytes(budget.nvme);
  return entry;
}

// Another number after each call that may have left something in the data directory: to be on the safe side also after
// one that was refused.
uint64_t ChangesOf(const StateServer& server) {
  uint64_t changes = 0;
  for (const Call call :
       {Call::kFence, Call::kOpen, Call::kSeal, Call::kCommit, Call::kPin, Call::kUnpin, Call::kDropJob}) {
    const storage::DurationHistogram& answered = server.counters().calls[static_cast<size_t>(call)];
    for (size_t i = 0; i <= answered.bounds_seconds().size(); ++i) changes += answered.count(i);
  }
  return changes;
}

// Where the port is known before the start, trainers find the server, and wait for it, while its jobs come back.
absl::Status RegisterEarly(const Config& config, const std::string& id, uint64_t disk, Registration* registration) {
  const std::string address = AdvertisedAddress(config, config.listen);
  if (!model::ParseAddress(address, model::AddressUse::kConnect).ok()) return absl::OkStatus();
  registration->Announce(EntryOf(id, disk, address, v1::SERVER_STATE_RECOVERING, config.server.budget), nullptr);
  return registration->AwaitName(Signalled);
}

// How this server shows itself to the servers that it copies chunks from: as it does to its own clients.
model::Access AccessOf(const Config& config) {
  const CertificatePaths& tls = config.guard.tls;
  if (!tls.enabled()) return {.token_file = config.import_token};
  return {.ca = !config.server_ca.empty() ? config.server_ca : tls.client_ca,
          .certificate = tls.certificate,
          .key = tls.key,
          .token_file = config.import_token};
}

void WarnOfOthers(const GuardOptions& guard, const std::string& listen) {
  const auto address = model::ParseAddress(listen, model::AddressUse::kListen);
  if (!address.ok() || model::IsLoopback(*address) || (guard.tls.enabled() && guard.asks_identity())) return;
  spdlog::warn(
      "other machines can reach {} {}: {}", listen, guard.tls.enabled() ? "without authentication" : "without TLS",
      guard.tls.enabled()     ? "any client that reaches this address can read and change every job; set "
                                "tls.client_ca or tokens"
      : guard.asks_identity() ? "the server accepts tokens only from this machine; set tls.certificate and tls.key"
                              : "any client that reaches this address can read and change every job; set "
                                "tls.certificate, tls.key and tls.client_ca");
}

// A budget that does not fit into the memory of this process's control group is refused: the kernel would kill the
// server once a job fills it, in the middle of training.
absl::Status CheckMemory(const Config& config) {
  const MemoryAllowance allowance = AllowedMemory(config.server.budget.dram, "");
  if (allowance.room == MemoryRoom::kEnough) return absl::OkStatus();
  const std::string text = "memory limit " + allowance.found + ", wanted " + allowance.wanted + ": " + allowance.mend;
  if (allowance.room == MemoryRoom::kTooLittle) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, text);
  }
  spdlog::warn("{}; under overload the kernel may kill this server", text);
  return absl::OkStatus();
}

// Not refused: the rest of the disk may be freed, or filled, later.
void WarnOfDisks(const StateServerOptions& options) {
  for (const DiskAllowance& allowance : AllowedDisks(options)) {
    if (allowance.room != DiskRoom::kTooLittle) continue;
    spdlog::warn("free disk space {}, wanted {}: {}; else requests that need the missing space are refused (DISK_FULL)",
                 allowance.found, allowance.wanted, allowance.mend);
  }
}

}  // namespace

std::optional<NotServing> Daemon::Start() {
  for (const auto step : {&Daemon::ReadFiles, &Daemon::OpenHttp, &Daemon::ConnectRegistry, &Daemon::StartServer,
                          &Daemon::StartRpc, &Daemon::AwaitJobs, &Daemon::Announce}) {
    if (auto not_serving = (this->*step)()) return not_serving;
  }
  WarnOfOthers(config_.guard, rpc_->address());
  return std::nullopt;
}

// Files that are bad are found before a recovery that may take long.
std::optional<NotServing> Daemon::ReadFiles() {
  if (const absl::Status status = CheckMemory(config_); !status.ok()) return NotServing{status, ExitOf(status)};
  auto guard = Guard::Make(config_.guard);
  if (!guard.ok()) return NotServing{guard.status(), ExitOf(guard.status())};
  guard_ = *std::move(guard);
  WarnOfDisks(config_.server);
  return std::nullopt;
}

// Before anything else, so that a server which recovers for minutes does not look dead.
std::optional<NotServing> Daemon::OpenHttp() {
  const bool asks = config_.guard.tls.enabled() || config_.guard.asks_identity();
  auto http = HttpPort::Start(config_.metrics_listen, &progress_, asks ? &guard_->counters() : nullptr,
                              config_.metrics_tls ? guard_.get() : nullptr);
  if (!http.ok()) return NotServing{http.status(), ExitOfPort(http.status(), kMetricsPortInUse)};
  http_ = *std::move(http);
  spdlog::info("{} on {}: /livez, /readyz, /metrics, /status.json; recovering", config_.metrics_tls ? "HTTPS" : "HTTP",
               http_->address());
  return std::nullopt;
}

std::optional<NotServing> Daemon::ConnectRegistry() {
  if (config_.discovery.empty()) return std::nullopt;
  registration_ = std::make_unique<Registration>(*registry::ParseRegistryUrl(config_.discovery),
                                                 config_.server.data_directory, Registration::Times());
  const absl::Status made = registration_->made();
  if (!made.ok()) return NotServing{made, ExitOf(made)};
  return std::nullopt;
}

std::optional<NotServing> Daemon::StartServer() {
  chunks_ = std::make_unique<ChunkClient>(AccessOf(config_));
  StateServerOptions options = config_.server;
  options.chunk_source = chunks_.get();
  options.interrupt = Signalled;
  options.serve_while_recovering = true;
  options.progress = &progress_;
  options.page = http_->address();
  options.may_grow = [this](const std::string& job, const storage::TierBytes& more,
                            const std::function<std::vector<v1::JobStatus>()>& taken) {
    return guard_->AskGrowth(job, {more.hbm, more.dram, more.nvme}, taken);
  };
  if (registration_ != nullptr) {
    options.named = [this](const std::string& id, uint64_t disk) {
      return RegisterEarly(config_, id, disk, registration_.get());
    };
  }
  auto server = StateServer::Start(options);
  if (!server.ok()) return NotServing{server.status(), ExitOfStart(server.status())};
  server_ = *std::move(server);
  return std::nullopt;
}

std::optional<NotServing> Daemon::StartRpc() {
  if (const absl::Status status = guard_->Watch(); !status.ok()) return NotServing{status, ExitOf(status)};
  RpcServerOptions options;
  options.listen = config_.listen;
  options.guard = guard_.get();
  options.shared_memory_bytes = config_.shared_memory_bytes;
  options.connections_max = config_.connections_max;
  options.reflection = config_.reflection;
  auto rpc = RpcServer::Start(options, server_.get());
  if (!rpc.ok()) return NotServing{rpc.status(), ExitOfPort(rpc.status(), kPortInUse)};
  rpc_ = *std::move(rpc);
  if (config_.shared_memory_bytes > 0 && !rpc_->shared_memory_status().ok()) {
    spdlog::warn("trainers on this host send slices over the network: {}", rpc_->shared_memory_status().ToString());
  }
  return std::nullopt;
}

// Jobs that are back are served meanwhile; the server is ready once all are.
std::optional<NotServing> Daemon::AwaitJobs() {
  if (const absl::Status back = server_->AwaitRecovered(); !back.ok()) return NotServing{back, ExitOfStart(back)};
  auto check = SelfCheck::Start(rpc_.get(), server_.get());
  if (!check.ok()) return NotServing{check.status(), kFailed};
  check_ = *std::move(check);
  http_->Serve(server_.get(), rpc_->address(), [check = check_.get()] { return check->Fault(); });
  return std::nullopt;
}

std::optional<NotServing> Daemon::Announce() {
  if (registration_ == nullptr) return std::nullopt;
  const std::string address = AdvertisedAddress(config_, rpc_->address());
  const auto entry = [server = server_.get(), address] {
    return EntryOf(server->server_id(), server->disk(), address, v1::SERVER_STATE_SERVING, server->budget());
  };
  registration_->Announce(entry(), [entry, server = server_.get()](v1::ServerEntry* now) {
    *now = entry();
    return ChangesOf(*server);
  });
  const absl::Status named = registration_->AwaitName(Signalled);
  if (named.ok()) return std::nullopt;
  return NotServing{named, ExitOfStart(named)};
}

Daemon::~Daemon() {
  // Both ask the server and its check, which go first.
  if (http_ != nullptr) {
    http_->Withdraw();
    http_->AwaitAnswers();
  }
  check_.reset();
  rpc_.reset();
  registration_.reset();
}

void Daemon::Reload() {
  if (!config_.guard.has_files()) spdlog::info("SIGHUP: the configuration names no file to read again");
  guard_->Reload();
}

void Daemon::Stop() {
  http_->Withdraw();
  check_.reset();
  rpc_->Stop(kGrace);
  // The last mark comes after the last change. No other copy may have the name until then.
  registration_.reset();
}

}  // namespace ballast::services
