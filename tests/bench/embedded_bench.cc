// What a trainer pays for pulls, leases and pushes where its state server is in its own process, beside a memcpy of the
// same bytes. Usage: embedded_bench [--rounds N] [--elements N] [--threads N] [--hold SECONDS]; run it in `release`, or
// with libraries that are optimised.
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
//   step, lent         the same of memory that the server reads in place: both of its checksums are in it
//   step beside leases the same while the first job's update waits for leases of all its chunks
//   beside held leases the same, step after step while one lease of the first job's chunks is held for --hold seconds;
//                      `before and after` are as many seconds without it
//
// CPU seconds are the whole process's. Variants of a round run one after another. Figures are medians over rounds, and
// the least; ratios are to the median memcpy of the same run. The job has one rank and one unit, durability `none`, and
// all state in DRAM.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
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
#include "ballast/tests/bench/laps.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kChunkElements = uint64_t{1} << 20;
constexpr char kTensor[] = "weight";

struct Options {
  int rounds = 15;
  uint64_t elements = 24 * kChunkElements;
  int threads = 2;
  double hold_seconds = 0;
};

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
  Lap StepOfOther(bool leased, bool lends = false);
  // Steps of the other job for so long, as above.
  std::vector<Lap> StepsOfOther(bool leased, double seconds);

 private:
  std::unique_ptr<client::Session> OpenSession(const std::string& job, client::Collective* collective);
  Lap Step(client::Session* session, bool lends);
  void PushWhole(client::Session* session, bool lends);
  // A lease of all this job's chunks, which holds up a step of it if `step`.
  client::WorkingCopyLease Hold(bool step);
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

void Job::PushWhole(client::Session* session, bool lends) {
  // The job keeps the memory itself.
  const std::shared_ptr<const void> owner = lends ? std::make_shared<int>() : nullptr;
  Must(session->PushBorrowed(0, {{0, gradient_.bytes().subspan(0, bytes())}}, {}, owner, client::Keep::kUntilApplied));
}

Lap Job::Push(Lap* pull, bool lends) {
  const Lap lap = Time(
      [&] {
        PushWhole(session_.get(), lends);
        return 0;
      },
      [&](int*) {
        if (pull != nullptr) *pull = Pull(std::min(kChunkElements, options_.elements));
        (void)Must(session_->Norm());
      });
  Must(session_->Drop());
  return lap;
}

Lap Job::Step(client::Session* session, bool lends) {
  return Time(
      [&] {
        PushWhole(session, lends);
        (void)Must(session->Step(OneGroup()));
        return 0;
      },
      [&](int*) {
        client::WorkingCopyLease shows = Must(session->StartLease(0, {{.begin = 0, .end = options_.elements}}));
        Must(shows.Await());
      });
}

client::WorkingCopyLease Job::Hold(bool step) {
  client::WorkingCopyLease lease = Must(session_->StartLease(0, {{.begin = 0, .end = options_.elements}}));
  Must(lease.Await());  // also: the update that the last call held up is over
  if (step) {
    PushWhole(session_.get(), /*lends=*/false);
    (void)Must(session_->Step(OneGroup()));
  }
  return lease;
}

Lap Job::StepOfOther(bool leased, bool lends) {
  const client::WorkingCopyLease lease = Hold(leased);
  return Step(other_.get(), lends);
}

std::vector<Lap> Job::StepsOfOther(bool leased, double seconds) {
  const client::WorkingCopyLease lease = Hold(leased);
  std::vector<Lap> laps;
  for (const double end = Clock(CLOCK_MONOTONIC) + seconds; Clock(CLOCK_MONOTONIC) < end;) {
    laps.push_back(Step(other_.get(), /*lends=*/false));
  }
  return laps;
}

void MeasureHold(const Options& options, const char* name, Job* job, double copy) {
  std::vector<Lap> alone = job->StepsOfOther(/*leased=*/false, options.hold_seconds / 2);
  const std::vector<Lap> beside = job->StepsOfOther(/*leased=*/true, options.hold_seconds);
  for (const Lap& lap : job->StepsOfOther(/*leased=*/false, options.hold_seconds / 2)) alone.push_back(lap);
  const auto bytes = static_cast<double>(job->bytes());
  Print(name, "before and after", alone, bytes, copy);
  Print(name, "beside held leases", beside, bytes, copy);
  const Figure usual = FigureOf(alone, &Lap::all), held = FigureOf(beside, &Lap::all);
  std::printf("%-5s leases held for %.0f s: %zu steps of the other job, median %.3f of its own, longest %.3f (%.3f)\n",
              name, options.hold_seconds, beside.size(), held.median / usual.median, held.most / usual.median,
              usual.most / usual.median);
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
  std::vector<Lap> steps, lent_steps, beside;
  for (int round = 0; round < options.rounds; ++round) {
    steps.push_back(job.StepOfOther(/*leased=*/false));
    lent_steps.push_back(job.StepOfOther(/*leased=*/false, /*lends=*/true));
    beside.push_back(job.StepOfOther(/*leased=*/true));
  }
  Print(name, "step", steps, bytes, copy);
  Print(name, "step, lent", lent_steps, bytes, copy);
  Print(name, "step beside leases", beside, bytes, copy);
  if (options.hold_seconds > 0) MeasureHold(options, name, &job, copy);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Pulls, leases and pushes within one process, beside a memcpy");
  app.add_option("--rounds", options.rounds, "Measured rounds")->check(CLI::Range(1, 10000));
  app.add_option("--elements", options.elements, "Of the unit")->check(CLI::Range(kChunkElements, uint64_t{1} << 32));
  app.add_option("--threads", options.threads, "Of the transport and of updates")->check(CLI::Range(1, 64));
  app.add_option("--hold", options.hold_seconds, "Seconds for which leases are held")->check(CLI::Range(0.0, 600.0));
  CLI11_PARSE(app, argc, argv);
  PrintHead();
  for (const kernels::Dtype dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF32}) Measure(options, dtype);
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
