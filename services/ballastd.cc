// ballastd: one state server as a process.
//
// Exit codes: 0 ended by SIGTERM or SIGINT, 2 bad configuration or usage, 3 port in use, 4 metrics port in use, 5 data
// directory not writable, 6 data directory in use, 7 catalog damaged, 8 the directory is of a later version, 9 its disk
// is full, 1 anything else.
#include <malloc.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "ballast/proto/model/address.h"
#include "ballast/proto/model/mutexes.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/threads.h"
#include "ballast/services/config/config.h"
#include "ballast/services/config/memory_room.h"
#include "ballast/services/discovery/registration.h"
#include "ballast/services/http/http_port.h"
#include "ballast/services/logs/log_queue.h"
#include "ballast/services/rpc/rpc_server.h"
#include "ballast/services/rpc/self_check.h"
#include "ballast/services/security/guard.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {
namespace {

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

// How long calls under way may take to end after SIGTERM.
constexpr absl::Duration kGrace = absl::Seconds(5);

// How long the last lines of the log may take.
constexpr absl::Duration kGraceOfLog = absl::Seconds(1);

// glibc trims its heap around gRPC's read buffers, which costs more than the transfer itself. Measured: only the two
// thresholds and the padding together help; one without the others is worse than none. Untrimmed memory stays with its
// arena, and each arena has its own peak. In a server that moves large messages, as many arenas as glibc would make
// held 280 MiB after 10 steps and grew; two hold 94 MiB, at the same speed.
void TuneMalloc() {
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
}

// A parent that started this server (--end-with) reads from standard output that it is ready, or why it is not. Set
// before there are threads.
bool parent_reads = false;

int Complain(const absl::Status& status, Exit code) {
  const std::string text(status.message());
  std::fprintf(stderr, "ballastd: %s\n", text.c_str());
  if (parent_reads) std::printf("ballastd failed: %s\n", text.c_str());
  return code;
}

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

// A signal waits until sigwait takes it; a server that still starts looks whether one waits.
absl::Status Signalled() {
  sigset_t waiting;
  sigpending(&waiting);
  if (sigismember(&waiting, SIGTERM) != 1 && sigismember(&waiting, SIGINT) != 1) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                      "a signal ended the server while it started; the next start recovers its jobs");
}

// Tells systemd (Type=notify) of a state such as "READY=1" by a datagram to the socket that systemd names, "@" for an
// abstract one. Does nothing where nobody waits for the message.
void Notify(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return;
  const std::string name = path;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.sun_path)) return;
  std::copy(name.begin(), name.end(), address.sun_path);
  if (name[0] == '@') address.sun_path[0] = '\0';
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  const int socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (sendto(socket_fd, state.data(), state.size(), 0, reinterpret_cast<const sockaddr*>(&address), length) < 0) {
    spdlog::warn("NOTIFY_SOCKET={}: {}; systemd does not learn of {}", name, strerror(errno), state);
  }
  close(socket_fd);
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

// Where the port is known before the start, trainers find the server, and wait for it, while its jobs come back.
absl::Status RegisterEarly(const Config& config, const std::string& id, uint64_t disk, Registration* registration) {
  const std::string address = AdvertisedAddress(config, config.listen);
  if (!model::ParseAddress(address, model::AddressUse::kConnect).ok()) return absl::OkStatus();
  registration->Announce(EntryOf(id, disk, address, v1::SERVER_STATE_RECOVERING, config.server.budget), nullptr);
  return registration->AwaitName(Signalled);
}

void WarnOfOthers(const GuardOptions& guard, const std::string& listen) {
  const auto address = model::ParseAddress(listen, model::AddressUse::kListen);
  if (!address.ok() || model::IsLoopback(*address) || (guard.tls.enabled() && guard.asks_identity())) return;
  spdlog::warn("listening to others on {} {}: {}", listen,
               guard.tls.enabled() ? "without asking who calls" : "without TLS",
               guard.tls.enabled()     ? "any client that reaches this address can read and change every job; set "
                                         "tls.client_ca or tokens"
               : guard.asks_identity() ? "tokens are taken from this machine alone; set tls.certificate and tls.key"
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

int Serve(const Config& config, const sigset_t& signals) {
  if (const absl::Status status = CheckMemory(config); !status.ok()) return Complain(status, ExitOf(status));
  // Files that are bad are found before a recovery that may take long.
  auto guard = Guard::Make(config.guard);
  if (!guard.ok()) return Complain(guard.status(), ExitOf(guard.status()));
  StateServerOptions options = config.server;
  options.interrupt = Signalled;
  options.serve_while_recovering = true;
  RecoveryProgress progress;
  options.progress = &progress;
  options.may_grow = [&](const std::string& job, const storage::TierBytes& more,
                         const std::function<std::vector<v1::JobStatus>()>& taken) {
    return (*guard)->AskGrowth(job, {more.hbm, more.dram, more.nvme}, taken);
  };
  // Before anything else, so that a server which recovers for minutes does not look dead.
  auto http =
      HttpPort::Start(config.metrics_listen, &progress,
                      config.guard.tls.enabled() || config.guard.asks_identity() ? &(*guard)->counters() : nullptr,
                      config.metrics_tls ? (*guard)->certificates() : nullptr);
  if (!http.ok()) return Complain(http.status(), ExitOfPort(http.status(), kMetricsPortInUse));
  spdlog::info("{} on {}: /livez, /readyz, /metrics, /status.json; recovering", config.metrics_tls ? "HTTPS" : "HTTP",
               (*http)->address());
  options.page = (*http)->address();
  std::unique_ptr<Registration> registration;
  if (!config.discovery.empty()) {
    registration = std::make_unique<Registration>(*registry::ParseRegistryUrl(config.discovery));
    if (!registration->made().ok()) return Complain(registration->made(), ExitOf(registration->made()));
    options.named = [&](const std::string& id, uint64_t disk) {
      return RegisterEarly(config, id, disk, registration.get());
    };
  }
  auto state = StateServer::Start(options);
  if (!state.ok() && model::ReasonOf(state.status()) == model::kServerDown) return Complain(state.status(), kOk);
  if (!state.ok()) return Complain(state.status(), ExitOf(state.status()));
  if (const absl::Status status = (*guard)->Watch(); !status.ok()) return Complain(status, ExitOf(status));
  RpcServerOptions rpc_options;
  rpc_options.listen = config.listen;
  rpc_options.guard = guard->get();
  rpc_options.shared_memory_bytes = config.shared_memory_bytes;
  rpc_options.connections_max = config.connections_max;
  rpc_options.reflection = config.reflection;
  auto rpc = RpcServer::Start(rpc_options, state->get());
  if (!rpc.ok()) return Complain(rpc.status(), ExitOfPort(rpc.status(), kPortInUse));
  if (config.shared_memory_bytes > 0 && !(*rpc)->shared_memory_status().ok()) {
    spdlog::warn("trainers on this host send slices over the network: {}", (*rpc)->shared_memory_status().ToString());
  }
  // Jobs that are back are served from here on; the server is ready once all are.
  if (const absl::Status back = (*state)->AwaitRecovered(); !back.ok()) {
    return Complain(back, model::ReasonOf(back) == model::kServerDown ? kOk : ExitOf(back));
  }
  auto check = SelfCheck::Start(rpc->get(), state->get());
  if (!check.ok()) return Complain(check.status(), kFailed);
  (*http)->Serve(state->get(), (*rpc)->address(), [check = check->get()] { return check->Fault(); });

  if (registration != nullptr) {
    const std::string address = AdvertisedAddress(config, (*rpc)->address());
    const auto entry = [server = state->get(), address] {
      return EntryOf(server->server_id(), server->disk(), address, v1::SERVER_STATE_SERVING, server->budget());
    };
    registration->Announce(entry(), [entry](v1::ServerEntry* now) { *now = entry(); });
    if (const absl::Status named = registration->AwaitName(Signalled); !named.ok()) {
      registration.reset();  // it asks the server
      return Complain(named, model::ReasonOf(named) == model::kServerDown ? kOk : ExitOf(named));
    }
  }
  std::printf("ballastd ready listen=%s metrics=%s server_id=%s\n", (*rpc)->address().c_str(),
              (*http)->address().c_str(), (*state)->server_id().c_str());
  std::fflush(stdout);
  Notify("READY=1");
  WarnOfOthers(config.guard, (*rpc)->address());
  int signal_number = 0;
  while (sigwait(&signals, &signal_number) == 0 && signal_number == SIGHUP) {
    if (!config.guard.has_files()) spdlog::info("SIGHUP: no file was configured that could be read again");
    (*guard)->Reload();
  }
  spdlog::info("signal {}: ending", signal_number);
  Notify("STOPPING=1");
  (*http)->Withdraw();
  registration.reset();
  check->reset();
  (*rpc)->Stop(kGrace);
  return kOk;
}

// Writes to standard error without a byte of the heap, which may be what was refused.
void SayWhy(const char* what) {
  for (const char* const part :
       {"ballastd: the server ends: ", what,
        ". If the system refused memory or a thread: look at the limits of the address space (ulimit -v, LimitAS), of "
        "tasks (ulimit -u, TasksMax) and of memory\n"}) {
    (void)!write(STDERR_FILENO, part, std::strlen(part));
  }
}

// A limit may refuse memory or a thread anywhere, and on any thread.
[[noreturn]] void SayWhyAndAbort() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
    SayWhy("a thread was not made, or not ended");
  } catch (const std::exception& error) {
    SayWhy(error.what());
  } catch (...) {
    SayWhy("an unknown exception");
  }
  std::abort();
}

// No thread that serves waits for the reader of standard error.
int ServeAndLog(const Config& config, const sigset_t& signals) {
  LogQueue queue(LogKind::kProgram);
  const auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  spdlog::set_default_logger(queue.MakeLogger("ballastd", sink));
  spdlog::set_level(spdlog::level::from_str(config.log_level));
  RpcServer::TakeLogs();
  int code = kFailed;
  try {
    code = Serve(config, signals);
  } catch (const std::system_error& error) {
    code = Complain(model::NoThread(error), kFailed);
  }
  if (!queue.Drain(kGraceOfLog)) {
    // Nobody reads: an orderly end would wait for the line that hangs.
    std::fflush(stdout);
    std::_Exit(code);
  }
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("ballastd", sink));
  return code;
}

// Each connection and each file takes one; the usual soft limit is for programs that wait by select(2).
void RaiseDescriptors() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

int Main(int argc, char** argv) {
  model::StopDeadlockSearch();
  RaiseDescriptors();
  TuneMalloc();
  // A file at the limit of its size is an error of the disk (EFBIG), which names the file; the signal would end the
  // server without a word.
  signal(SIGXFSZ, SIG_IGN);
  // Blocked before any thread starts, so that sigwait gets them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  CLI::App app{"Ballast state server: keeps the state of training jobs and runs their optimizer.", "ballastd"};
  app.set_version_flag("--version", std::string("ballastd ") + model::Version());
  std::string path;
  app.add_option("--config", path, "YAML file; flags override BALLAST_* variables, which override the file");
  pid_t parent = 0;
  app.add_option("--end-with", parent,
                 "id of the parent process; when the parent ends, the server ends as after SIGTERM");
  std::map<std::string, std::string> flag_texts;
  for (const ConfigKey& key : ConfigKeys()) {
    app.add_option("--" + key.name, flag_texts[key.name],
                   key.meaning + " (" + key.expected + "; default: " + key.fallback + ")");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kBadUsage;
  }
  if (parent != 0) {
    parent_reads = true;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) return Complain(absl::CancelledError("the parent process has ended already"), kFailed);
  }
  ConfigValues flags;
  for (const auto& [name, text] : flag_texts) {
    if (app.count("--" + name) > 0) flags[name] = {text, "--" + name};
  }
  const absl::StatusOr<ConfigValues> file = path.empty() ? ConfigValues() : ParseConfigFile(path);
  if (!file.ok()) return Complain(file.status(), kBadUsage);
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  const absl::StatusOr<ConfigValues> environment = ParseEnvironment(variables);
  if (!environment.ok()) return Complain(environment.status(), kBadUsage);
  const absl::StatusOr<Config> config = MakeConfig(*file, *environment, flags);
  if (!config.ok()) return Complain(config.status(), kBadUsage);

  try {
    return ServeAndLog(*config, signals);
  } catch (const std::system_error& error) {
    return Complain(model::NoThread(error), kFailed);
  }
}

}  // namespace
}  // namespace ballast::services

int main(int argc, char** argv) {
  std::set_terminate(&ballast::services::SayWhyAndAbort);
  return ballast::services::Main(argc, argv);
}
