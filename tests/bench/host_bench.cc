// What pulls and pushes cost between a trainer and a state server of the same host: through shared memory, and over
// gRPC on loopback, beside a memcpy of the same bytes. Usage: host_bench --daemon BINARY [--rounds N] [--elements N]
// [--threads N]
//
//   memcpy  copies of the unit, chunk by chunk, by one thread of the trainer
//   pull    StartPull of the whole unit, then Await
//   push    PushBorrowed of the whole unit, then Norm
//
// Two servers, BINARY with `shared_memory` and without; a round asks both, so that they meet the same machine. CPU
// seconds are those of the trainer's process and of the server that works, together. Figures are medians over rounds,
// and the least; ratios are to the median memcpy. A job has one rank and one unit in chunks of 2^20 elements,
// durability `none`, and all state in DRAM.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/session.h"
#include "ballast/kernels/kernels.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/bench/laps.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kUnitChunk = uint64_t{1} << 20;

struct HostOptions {
  std::string daemon;
  int rounds = 15;
  uint64_t elements = 24 * kUnitChunk;
  int threads = 2;
};

// A child ballastd.
class ServerProcess {
 public:
  ServerProcess(const HostOptions& options, bool shares);
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  const std::string& address() const { return address_; }
  double CpuSeconds() const { return Clock(cpu_); }
  // Whether it has memory of a trainer.
  bool HasSharedMemory() const {
    std::ifstream file(absl::StrCat("/proc/", pid_, "/maps"));
    std::ostringstream text;
    text << file.rdbuf();
    return absl::StrContains(text.str(), "memfd:ballast");
  }

 private:
  ScratchDirectory directory_;
  pid_t pid_ = -1;
  clockid_t cpu_{};
  std::string address_;
};

ServerProcess::ServerProcess(const HostOptions& options, bool shares) {
  const std::string config = directory_.path() + "/ballastd.yaml";
  std::ofstream(config) << "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " << directory_.path()
                        << "\nserver_id: bench\ncompute_threads: " << options.threads
                        << "\nshared_memory: " << (shares ? "64MiB" : "0")
                        << "\nbudget:\n  dram: " << (48 * options.elements >> 20) + 256 << "MiB\n";
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) Must(absl::InternalError("no pipe"));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  std::string binary = options.daemon, flag = "--config", path = config;
  char* arguments[] = {binary.data(), flag.data(), path.data(), nullptr};
  if (posix_spawn(&pid_, binary.c_str(), &actions, nullptr, arguments, environ) != 0) {
    Must(absl::NotFoundError(absl::StrCat("--daemon ", options.daemon, " cannot be started")));
  }
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string line;
  for (char c = 0; c != '\n' && read(ends[0], &c, 1) == 1;) line.push_back(c);
  close(ends[0]);
  const size_t at = line.find("listen=");
  if (at == std::string::npos) Must(absl::UnavailableError("the server did not start; its log is above"));
  address_ = line.substr(at + 7, line.find(' ', at) - at - 7);
  clock_getcpuclockid(pid_, &cpu_);
}

// A server of its own, and the session of a job there.
class HostJob {
 public:
  HostJob(const HostOptions& options, kernels::Dtype dtype, bool shares);
  uint64_t bytes() const { return options_.elements * kernels::ElementBytes(dtype_); }
  Lap Copy();
  Lap Pull();
  Lap Push();

 private:
  double CpuSeconds() const { return Clock(CLOCK_PROCESS_CPUTIME_ID) + server_.CpuSeconds(); }

  const HostOptions options_;
  const kernels::Dtype dtype_;
  ServerProcess server_;
  std::unique_ptr<client::Collective> collective_;
  std::unique_ptr<client::Session> session_;
  storage::Arena gradient_, parameters_;
};

HostJob::HostJob(const HostOptions& options, kernels::Dtype dtype, bool shares)
    : options_(options),
      dtype_(dtype),
      server_(options, shares),
      collective_(std::move(client::MakeLoopbackGroup(1).front())) {
  client::SessionOptions session;
  session.job = "bench";
  session.durability = v1::DURABILITY_NONE;
  session.chunk_elements = kUnitChunk;
  session.optimizer.gradient = session.optimizer.working = dtype;
  session_ = Must(client::Session::Connect(session, {{.name = "weight", .unit = "unit", .shape = {options.elements}}},
                                           {server_.address()}, collective_.get()));
  Must(session_->Initialise([](absl::string_view, uint64_t first, absl::Span<float> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = 1e-3f * static_cast<float>((first + i) % 1009);
  }));
  gradient_ = Must(storage::Arena::Map(bytes()));
  parameters_ = Must(storage::Arena::Map(bytes()));
  // 0.0078 in both dtypes.
  std::memset(gradient_.bytes().data(), 0x3c, bytes());
  if (server_.HasSharedMemory() != shares) Must(absl::InternalError("bytes take another way than they should"));
}

Lap HostJob::Copy() {
  return Time(
      [this] {
        const uint64_t chunk = kUnitChunk * kernels::ElementBytes(dtype_);
        for (uint64_t at = 0; at < bytes(); at += chunk) {
          const uint64_t size = std::min(chunk, bytes() - at);
          std::memcpy(parameters_.bytes().data() + at, gradient_.bytes().data() + at, size);
        }
        return 0;
      },
      [](int*) {}, [this] { return CpuSeconds(); });
}

Lap HostJob::Pull() {
  return Time(
      [this] {
        return Must(session_->StartPull(0, {{{.begin = 0, .end = options_.elements}, parameters_.bytes()}}));
      },
      [](client::PendingPull* pull) { Must(pull->Await()); }, [this] { return CpuSeconds(); });
}

Lap HostJob::Push() {
  const Lap lap = Time(
      [this] {
        Must(session_->PushBorrowed(0, {{0, gradient_.bytes()}}));
        return 0;
      },
      [this](int*) { (void)Must(session_->Norm()); }, [this] { return CpuSeconds(); });
  Must(session_->Drop());
  return lap;
}

void MeasureHost(const HostOptions& options, kernels::Dtype dtype) {
  const char* const name = dtype == kernels::Dtype::kF32 ? "fp32" : "bf16";
  HostJob shared(options, dtype, /*shares=*/true), wire(options, dtype, /*shares=*/false);
  std::vector<Lap> copies, shared_pulls, shared_pushes, wire_pulls, wire_pushes;
  for (int round = -1; round < options.rounds; ++round) {
    const std::vector<Lap> laps = {shared.Copy(), shared.Pull(), shared.Push(), wire.Pull(), wire.Push()};
    if (round < 0) continue;  // the first touches memory
    copies.push_back(laps[0]);
    shared_pulls.push_back(laps[1]);
    shared_pushes.push_back(laps[2]);
    wire_pulls.push_back(laps[3]);
    wire_pushes.push_back(laps[4]);
  }
  const auto bytes = static_cast<double>(shared.bytes());
  const double copy = FigureOf(copies, &Lap::cpu).median;
  Print(name, "memcpy", copies, bytes, copy);
  Print(name, "pull, shared memory", shared_pulls, bytes, copy);
  Print(name, "push, shared memory", shared_pushes, bytes, copy);
  Print(name, "pull, gRPC", wire_pulls, bytes, copy);
  Print(name, "push, gRPC", wire_pushes, bytes, copy);
}

int HostMain(int argc, char** argv) {
  HostOptions options;
  CLI::App app("Pulls and pushes between two processes of a host, beside a memcpy");
  app.add_option("--daemon", options.daemon, "The binary ballastd")->required();
  app.add_option("--rounds", options.rounds, "Measured rounds")->check(CLI::Range(1, 10000));
  app.add_option("--elements", options.elements, "Of the unit")->check(CLI::Range(kUnitChunk, uint64_t{1} << 32));
  app.add_option("--threads", options.threads, "Of updates")->check(CLI::Range(1, 64));
  CLI11_PARSE(app, argc, argv);
  client::TuneProgram();
  PrintHead();
  for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF32}) MeasureHost(options, dtype);
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::HostMain(argc, argv); }
