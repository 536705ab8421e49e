// What a trainer pays for pulls, leases and pushes where its state server is in its own process, beside a memcpy of the
// same bytes. Usage: embedded_bench [--rounds N] [--elements N] [--threads N]; run it in `release`, or with libraries
// that are optimised.
//
//   memcpy             copies of the unit, chunk by chunk, by one thread: the ceiling
//   pull               StartPull of the whole unit, then Await: `call` is the time until StartPull returns
//   lease              StartLease of the whole unit, then Await, then the end of the lease: nothing is copied
//   push               PushBorrowed of the whole unit, then Norm: `call` is the time until PushBorrowed returns, which
//                      is once all slices were admitted
//   push, lent         the same of memory that the server reads in place, until it was applied
//   pull behind pushes StartPull and Await of one chunk while the unit's slices are pushed; `all` against the same pull
//                      of an idle server
//   step               PushBorrowed and Step of the whole unit of another job, until a lease shows its update
//   step beside leases the same while the first job's update waits for leases of all its chunks
//
// CPU seconds are the whole process's. Variants of a round run one after another. Figures are medians over rounds, and
// the least; ratios are to the median memcpy of the same run. The job has one rank and one unit, durability `none`, and
// all state in DRAM.
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/session.h"
#include "ballast/kernels/kernels.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/services/server/state_server.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kChunkElements = uint64_t{1} << 20;
constexpr char kTensor[] = "weight";

struct Options {
  int rounds = 15;
  uint64_t elements = 24 * kChunkElements;
  int threads = 2;
};

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "embedded_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

double Clock(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds of one round: of the call that starts the work, of the caller's processor in that call, of all of it, and of
// all processors.
struct Lap {
  double call = 0, caller_cpu = 0, all = 0, cpu = 0;
};

template <typename Start, typename Finish>
Lap Time(const Start& start, const Finish& finish) {
  const double began = Clock(CLOCK_MONOTONIC), cpu = Clock(CLOCK_PROCESS_CPUTIME_ID);
  const double mine = Clock(CLOCK_THREAD_CPUTIME_ID);
  auto started = start();
  Lap lap{.call = Clock(CLOCK_MONOTONIC) - began, .caller_cpu = Clock(CLOCK_THREAD_CPUTIME_ID) - mine};
  finish(&started);
  lap.all = Clock(CLOCK_MONOTONIC) - began;
  lap.cpu = Clock(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  return lap;
}

struct Figure {
  double median = 0, least = 0;
};

Figure FigureOf(const std::vector<Lap>& laps, double Lap::*part) {
  std::vector<double> values;
  for (const Lap& lap : laps) values.push_back(lap.*part);
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front()};
}

client::StepOptions OneGroup() {
  client::StepOptions step;
  step.groups.resize(1);
  return step;
}

// A server, and the sessions of two jobs that are there, in this process.
class Job {
 public:
  Job(const Options& options, kernels::Dtype dtype);
  uint64_t bytes() const { return options_.elements * kernels::ElementBytes(dtype_); }

  Lap Copy();
  Lap Pull(uint64_t elements);
  Lap Lease();
  // `pull`: gets the pull of a chunk that comes behind the pushes; null: none.
  Lap Push(Lap* pull, bool lends = false);
  // A step of the other job. `leased`: while leases hold up a step of this one.
  Lap StepOfOther(bool leased);

 private:
  std::unique_ptr<client::Session> OpenSession(const std::string& job, client::Collective* collective);
  Lap Step(client::Session* session);
  const Options options_;
  const kernels::Dtype dtype_;
  ScratchDirectory directory_;
  std::unique_ptr<services::StateServer> server_;
  std::unique_ptr<client::Collective> collective_, other_collective_;
  std::unique_ptr<client::Session> session_, other_;
  storage::Arena gradient_, parameters_;
};

Job::Job(const Options& options, kernels::Dtype dtype) : options_(options), dtype_(dtype) {
  services::StateServerOptions server;
  server.data_directory = directory_.path();
  server.server_id = "bench";
  server.budget.dram = 2 * 48 * options.elements + (uint64_t{256} << 20);
  server.compute_threads = options.threads;
  server_ = Must(services::StateServer::Start(server));
  collective_ = std::move(client::MakeLoopbackGroup(1).front());
  other_collective_ = std::move(client::MakeLoopbackGroup(1).front());
  session_ = OpenSession("bench", collective_.get());
  other_ = OpenSession("other", other_collective_.get());
  gradient_ = Must(storage::Arena::Map(bytes()));
  parameters_ = Must(storage::Arena::Map(bytes()));
  // 0.0078 in both dtypes.
  for (size_t i = 0; i < bytes(); ++i) gradient_.bytes()[i] = std::byte{0x3c};
  std::memset(parameters_.bytes().data(), 1, bytes());
}

std::unique_ptr<client::Session> Job::OpenSession(const std::string& job, client::Collective* collective) {
  client::SessionOptions options;
  options.job = job;
  options.durability = v1::DURABILITY_NONE;
  options.chunk_elements = kChunkElements;
  options.optimizer.gradient = options.optimizer.working = dtype_;
  std::vector<std::unique_ptr<client::Transport>> transports;
  transports.push_back(services::MakeEmbeddedTransport(server_.get(), options_.threads));
  auto session = Must(client::Session::Open(options, {{.name = kTensor, .unit = "unit", .shape = {options_.elements}}},
                                            std::move(transports), collective));
  Must(session->Initialise([](absl::string_view, uint64_t first, absl::Span<float> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = 1e-3f * static_cast<float>((first + i) % 1009);
  }));
  return session;
}

Lap Job::Copy() {
  return Time(
      [this] {
        const uint64_t chunk = kChunkElements * kernels::ElementBytes(dtype_);
        for (uint64_t at = 0; at < bytes(); at += chunk) {
          const uint64_t size = std::min(chunk, bytes() - at);
          std::memcpy(parameters_.bytes().data() + at, gradient_.bytes().data() + at, size);
        }
        return 0;
      },
      [](int*) {});
}

Lap Job::Pull(uint64_t elements) {
  const absl::Span<std::byte> to = parameters_.bytes().subspan(0, elements * kernels::ElementBytes(dtype_));
  return Time(
      [&] {
        return Must(session_->StartPull(0, {{{.begin = 0, .end = elements}, to}}));
      },
      [](client::PendingPull* pull) { Must(pull->Await()); });
}

Lap Job::Lease() {
  const Lap lap = Time([&] { return Must(session_->StartLease(0, {{.begin = 0, .end = options_.elements}})); },
                       [](client::WorkingCopyLease* lease) {
                         Must(lease->Await());
                         const client::WorkingCopyLease ended = std::move(*lease);
                       });
  if (session_->stats().leased_bytes % bytes() != 0) Must(absl::InternalError("some of a lease was copied"));
  return lap;
}

Lap Job::Push(Lap* pull, bool lends) {
  const Lap lap = Time(
      [&] {
        // The job keeps the memory itself.
        const std::shared_ptr<const void> owner = lends ? std::make_shared<int>() : nullptr;
        Must(session_->PushBorrowed(0, {{0, gradient_.bytes().subspan(0, bytes())}}, {}, owner,
                                    client::Keep::kUntilApplied));
        return 0;
      },
      [&](int*) {
        if (pull != nullptr) *pull = Pull(std::min(kChunkElements, options_.elements));
        (void)Must(session_->Norm());
      });
  Must(session_->Drop());
  return lap;
}

Lap Job::Step(client::Session* session) {
  return Time(
      [&] {
        Must(session->PushBorrowed(0, {{0, gradient_.bytes().subspan(0, bytes())}}));
        (void)Must(session->Step(OneGroup()));
        return 0;
      },
      [&](int*) {
        client::WorkingCopyLease shows = Must(session->StartLease(0, {{.begin = 0, .end = options_.elements}}));
        Must(shows.Await());
      });
}

Lap Job::StepOfOther(bool leased) {
  std::optional<client::WorkingCopyLease> lease =
      Must(session_->StartLease(0, {{.begin = 0, .end = options_.elements}}));
  Must(lease->Await());  // also: the update that the last call held up is over
  if (leased) {
    Must(session_->PushBorrowed(0, {{0, gradient_.bytes().subspan(0, bytes())}}));
    (void)Must(session_->Step(OneGroup()));
  }
  return Step(other_.get());
}

void Print(const char* dtype, const char* what, const std::vector<Lap>& laps, double bytes, double copy) {
  const Figure cpu = FigureOf(laps, &Lap::cpu), all = FigureOf(laps, &Lap::all);
  const Figure call = FigureOf(laps, &Lap::call), mine = FigureOf(laps, &Lap::caller_cpu);
  std::printf("%-5s %-19s %9.3f %9.3f %9.2f %9.2f %9.2f %10.0f %10.0f %10.0f\n", dtype, what, cpu.median / bytes * 1e9,
              cpu.least / bytes * 1e9, cpu.median / copy, all.median * 1e3, all.least * 1e3, call.median * 1e6,
              call.least * 1e6, mine.median * 1e6);
}

void Measure(const Options& options, kernels::Dtype dtype) {
  const char* const name = dtype == kernels::Dtype::kF32 ? "fp32" : "bf16";
  Job job(options, dtype);
  std::vector<Lap> copies, pulls, leases, pushes, lent, single, behind;
  for (int round = -1; round < options.rounds; ++round) {
    std::vector<Lap> laps = {
        job.Copy(), job.Pull(options.elements), job.Push(nullptr), job.Push(nullptr, true), job.Pull(kChunkElements),
        job.Lease()};
    Lap late;
    (void)job.Push(&late);
    if (round < 0) continue;  // the first touches memory
    copies.push_back(laps[0]);
    pulls.push_back(laps[1]);
    pushes.push_back(laps[2]);
    lent.push_back(laps[3]);
    single.push_back(laps[4]);
    leases.push_back(laps[5]);
    behind.push_back(late);
  }
  const auto bytes = static_cast<double>(job.bytes());
  const double copy = FigureOf(copies, &Lap::cpu).median;
  Print(name, "memcpy", copies, bytes, copy);
  Print(name, "pull", pulls, bytes, copy);
  Print(name, "lease", leases, bytes, copy);
  Print(name, "push", pushes, bytes, copy);
  Print(name, "push, lent", lent, bytes, copy);
  const double chunk = static_cast<double>(kChunkElements * kernels::ElementBytes(dtype));
  Print(name, "pull, one chunk", single, chunk, copy * chunk / bytes);
  Print(name, "pull behind pushes", behind, chunk, copy * chunk / bytes);
  // In turn, so that both meet the same machine.
  std::vector<Lap> steps, beside;
  for (int round = 0; round < options.rounds; ++round) {
    steps.push_back(job.StepOfOther(/*leased=*/false));
    beside.push_back(job.StepOfOther(/*leased=*/true));
  }
  Print(name, "step", steps, bytes, copy);
  Print(name, "step beside leases", beside, bytes, copy);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Pulls, leases and pushes within one process, beside a memcpy");
  app.add_option("--rounds", options.rounds, "Measured rounds")->check(CLI::Range(1, 10000));
  app.add_option("--elements", options.elements, "Of the unit")->check(CLI::Range(kChunkElements, uint64_t{1} << 32));
  app.add_option("--threads", options.threads, "Of the transport and of updates")->check(CLI::Range(1, 64));
  CLI11_PARSE(app, argc, argv);
  std::printf("%-5s %-19s %9s %9s %9s %9s %9s %10s %10s %10s\n", "", "", "CPU s/GB", "least", "of memcpy", "all ms",
              "least", "call us", "least", "call CPU");
  for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF32}) Measure(options, dtype);
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
