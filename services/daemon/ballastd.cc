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
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "ballast/proto/base/mutexes.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/daemon/config.h"
#include "ballast/services/daemon/config_file.h"
#include "ballast/services/daemon/daemon.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/threads/log_queue.h"

namespace ballast::services {
namespace {

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

int Serve(const Config& config, const sigset_t& signals) {
  Daemon daemon(config);
  if (const auto not_serving = daemon.Start()) return Complain(not_serving->why, not_serving->code);
  std::printf("ballastd ready listen=%s metrics=%s server_id=%s\n", daemon.address().c_str(),
              daemon.http_address().c_str(), daemon.server_id().c_str());
  std::fflush(stdout);
  Notify("READY=1");
  int signal_number = 0;
  while (sigwait(&signals, &signal_number) == 0 && signal_number == SIGHUP) daemon.Reload();
  spdlog::info("signal {}: stopping", signal_number);
  Notify("STOPPING=1");
  daemon.Stop();
  return kOk;
}

// Writes to standard error without a byte of the heap, which may be what was refused.
void SayWhy(const char* what) {
  for (const char* const part :
       {"ballastd: the server stops: ", what,
        ". If the system refused memory or a thread, check the limits of the address space (ulimit -v, LimitAS), of "
        "tasks (ulimit -u, TasksMax) and of memory\n"}) {
    (void)!write(STDERR_FILENO, part, std::strlen(part));
  }
}

// A limit may refuse memory or a thread anywhere, and on any thread.
[[noreturn]] void SayWhyAndAbort() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
    SayWhy("a thread could not be started or joined");
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
