// The rows of a step over state on NVMe: see storage_bench.cc.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/store/state_update.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"
#include "ballast/tests/bench/throttled_disks.h"

namespace ballast::bench {
namespace {

using kernels::MasterFormat;
using kernels::MomentFormat;
using storage::TierKind;

constexpr uint64_t kChunk = uint64_t{1} << 20;  // elements

// Small numbers of both signs, for as many chunks as no cache holds; update i of a step takes the i-th, round and
// round.
class Gradients {
 public:
  static absl::StatusOr<Gradients> Make() {
    Gradients gradients;
    BALLAST_ASSIGN_OR_RETURN(gradients.memory_, storage::Arena::Map(kChunks * kChunk * sizeof(uint16_t)));
    auto* const values = reinterpret_cast<uint16_t*>(gradients.memory_.bytes().data());
    for (uint64_t i = 0; i < kChunks * kChunk; ++i) {
      const auto hash = static_cast<uint32_t>(i * 2654435761u);
      values[i] = kernels::ToBf16((static_cast<float>(hash >> 8) / (1 << 24) - 0.5f) * 0.02f);
    }
    return gradients;
  }
  absl::Span<const std::byte> Of(uint64_t i) const {
    return memory_.bytes().subspan(i % kChunks * kChunk * sizeof(uint16_t), kChunk * sizeof(uint16_t));
  }

 private:
  static constexpr uint64_t kChunks = 64;
  storage::Arena memory_;
};

constexpr kernels::Hyper kHyper = {
    .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};

storage::ChunkUpdate WholeChunk(const kernels::OptimizerSpec& spec, uint64_t chunk, uint64_t step,
                                absl::Span<const std::byte> gradient) {
  return {.chunk = chunk,
          .values = {},
          .segments = {{.begin = 0, .end = kChunk, .coefficients = MakeCoefficients(spec, kHyper, step, 1)}},
          .gradient = gradient,
          .random = {.seed = 1, .unit = static_cast<uint32_t>(chunk), .step = step}};
}

// The computation of a step on states that stay in memory, used in turn: as many states as a store has staging slots.
class ComputeAlone {
 public:
  static absl::StatusOr<ComputeAlone> Make(uint64_t slots, kernels::ThreadPool* pool, const Gradients* gradients) {
    ComputeAlone alone(slots, pool, gradients);
    BALLAST_ASSIGN_OR_RETURN(alone.states_, storage::Arena::Map(slots * alone.layout_.StateBytes(kChunk)));
    BALLAST_ASSIGN_OR_RETURN(alone.working_, storage::Arena::Map(slots * alone.layout_.WorkingBytes(kChunk)));
    return alone;
  }
  // `digests`: of the state before and after each, as for what comes from a disk and goes back.
  absl::Status Run(uint64_t updates, bool digests) {
    ++step_;
    for (uint64_t i = 0; i < updates; ++i) {
      const uint64_t slot = i % slots_;
      const storage::StateView state = {&layout_, states_.bytes().data() + slot * layout_.StateBytes(kChunk), kChunk};
      storage::UpdateDigests wanted = {.of_old = digests, .of_new = digests};
      UpdateState(WholeChunk(layout_.optimizer(), i, step_, gradients_->Of(i)), state,
                  working_.bytes().data() + slot * layout_.WorkingBytes(kChunk), {.pool = pool_, .poll = [] {}},
                  &wanted);
    }
    return absl::OkStatus();
  }

 private:
  ComputeAlone(uint64_t slots, kernels::ThreadPool* pool, const Gradients* gradients)
      : slots_(slots), pool_(pool), gradients_(gradients) {}

  storage::StateLayout layout_;  // AdamW with fp32 moments
  uint64_t slots_;
  kernels::ThreadPool* pool_;
  const Gradients* gradients_;
  storage::Arena states_, working_;
  uint64_t step_ = 0;
};

// A store of full chunks, stepped by AdamW.
class Job {
 public:
  Job(storage::Tiers* tiers, MomentFormat moments, kernels::ThreadPool* pool, const Gradients* gradients,
      MasterFormat master = MasterFormat::kF32)
      : spec_{.moments = moments, .master = master}, store_(tiers, spec_, pool), gradients_(gradients) {}

  absl::Status Add(uint64_t chunks, TierKind tier) {
    storage::Plan plan;
    plan.chunks.resize(chunks, {.state = tier, .working = TierKind::kDram});
    return store_.Add(std::vector<uint64_t>(chunks, kChunk), plan);
  }
  uint64_t chunk_bytes() const { return store_.layout().StateBytes(kChunk); }
  uint64_t chunks() const { return store_.chunk_count(); }

  absl::Status Step(absl::Span<const uint64_t> chunks) {
    ++step_;
    std::vector<storage::ChunkUpdate> updates;
    for (const uint64_t chunk : chunks) {
      updates.push_back(WholeChunk(spec_, chunk, step_, gradients_->Of(updates.size())));
    }
    return store_.Run(updates, [](size_t) {});
  }
  static std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
    std::vector<uint64_t> range(end - begin);
    for (uint64_t i = 0; i < range.size(); ++i) range[i] = begin + i;
    return range;
  }

 private:
  const kernels::OptimizerSpec spec_;
  storage::ChunkStore store_;
  const Gradients* const gradients_;
  uint64_t step_ = 0;
};

// How many chunks of each kind make compute as long as I/O.
struct Balance {
  uint64_t nvme = 0, dram = 0;
  // DRAM chunks of `job`, from `first_dram` on, spread evenly between its first ones, which are on NVMe.
  std::vector<uint64_t> Order(uint64_t first_dram) const {
    std::vector<uint64_t> order;
    for (uint64_t i = 0, d = 0; i < nvme; ++i) {
      while (d * 2 * nvme < dram * (2 * i + 1)) order.push_back(first_dram + d++);
      order.push_back(i);
      if (i + 1 == nvme) {
        while (d < dram) order.push_back(first_dram + d++);
      }
    }
    return order;
  }
};

absl::StatusOr<Balance> FindBalance(const StorageBenchOptions& options, Job& job, uint64_t nvme, double io,
                                    double compute) {
  constexpr uint64_t kProbeChunks = 16;
  BALLAST_RETURN_IF_ERROR(job.Add(kProbeChunks, TierKind::kDram));
  const auto probe = [&] { return job.Step(Job::Range(nvme, nvme + kProbeChunks)); };
  std::vector<double> seconds;
  for (int i = 0; i < 6; ++i) {
    BALLAST_ASSIGN_OR_RETURN(const double taken, Seconds(probe));
    seconds.push_back(taken / kProbeChunks);
  }
  const double missing = std::max(0.0, io - compute) / static_cast<double>(nvme);
  const double dram_per_nvme = missing / Median(seconds);
  const double affordable = static_cast<double>(options.dram_bytes / (job.chunk_bytes() + 2 * kChunk));
  Balance balance;
  balance.nvme = std::clamp<uint64_t>(static_cast<uint64_t>(affordable / std::max(dram_per_nvme, 1e-9)), 1, nvme);
  balance.dram = static_cast<uint64_t>(std::lround(dram_per_nvme * static_cast<double>(balance.nvme)));
  if (balance.dram > kProbeChunks) BALLAST_RETURN_IF_ERROR(job.Add(balance.dram - kProbeChunks, TierKind::kDram));
  std::fprintf(stderr, "storage_bench: balanced with %lu chunks on NVMe and %lu in DRAM\n", balance.nvme, balance.dram);
  return balance;
}

// Seconds of a step and of what bounds it, an entry per round.
struct BoundedStep {
  std::vector<double> step, io, compute, bare_compute, side_by_side;

  static BoundedStep From(std::vector<std::vector<double>> times) {
    return {std::move(times[0]), std::move(times[1]), std::move(times[2]), std::move(times[3]), std::move(times[4])};
  }
};

Row BoundedRow(const char* name, uint64_t chunks, uint64_t chunk_bytes, const BoundedStep& seconds) {
  std::vector<double> ratios, bare, side_by_side;
  for (size_t i = 0; i < seconds.step.size(); ++i) {
    const double bound = std::max(seconds.io[i], seconds.compute[i]);
    ratios.push_back(bound / seconds.step[i]);
    bare.push_back(std::max(seconds.io[i], seconds.bare_compute[i]) / seconds.step[i]);
    side_by_side.push_back(bound / seconds.side_by_side[i]);
  }
  const double moved = 2 * static_cast<double>(chunks * chunk_bytes);
  return {.name = name,
          .bytes_per_element = 2 * static_cast<double>(chunk_bytes) / kChunk,
          .gb_per_s = moved / Median(seconds.step) / 1e9,
          .reference = "max(I/O alone, compute alone)",
          .ratio = Median(ratios),
          .bar = 1 / 1.1,
          .more = {{"seconds", Median(seconds.step)},
                   {"io_seconds", Median(seconds.io)},
                   {"compute_seconds", Median(seconds.compute)},
                   {"side_by_side", Median(side_by_side)},
                   {"without_digests", Median(bare)}}};
}

// Runs both at once, on two threads that share nothing.
absl::Status AtOnce(const Work& io, const Work& compute) {
  absl::Status computed;
  std::thread other([&] { computed = compute(); });
  const absl::Status moved = io();
  other.join();
  return moved.ok() ? computed : moved;
}

}  // namespace

absl::Status MeasureSteps(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(const auto tiers,
                           storage::Tiers::Open({.budget = {.dram = ~uint64_t{0} / 2, .nvme = ~uint64_t{0} / 2},
                                                 .directory = directory,
                                                 .staging_bytes = options.staging_bytes}));
  BALLAST_ASSIGN_OR_RETURN(const Gradients gradients, Gradients::Make());
  kernels::ThreadPool pool(options.threads);
  Job f32(tiers.get(), MomentFormat::kF32, &pool, &gradients), f8(tiers.get(), MomentFormat::kF8, &pool, &gradients);
  const uint64_t n = std::max<uint64_t>(options.bytes / f32.chunk_bytes(), 1);
  std::fprintf(stderr, "storage_bench: %lu chunks of 2^20 parameters, I/O by %s\n", n, tiers->io_backend().c_str());
  BALLAST_RETURN_IF_ERROR(f32.Add(n, TierKind::kNvme));
  if (tiers->used().nvme != n * f32.chunk_bytes()) {
    return absl::InternalError("extents no longer lie one behind the other: IoAlone would move others than the step");
  }
  BALLAST_RETURN_IF_ERROR(f8.Add(n, TierKind::kNvme));
  BALLAST_ASSIGN_OR_RETURN(IoAlone alone,
                           IoAlone::Make(options.staging_bytes, &tiers->nvme()->file(), f32.chunk_bytes()));
  BALLAST_ASSIGN_OR_RETURN(ComputeAlone computing, ComputeAlone::Make(alone.slots(), &pool, &gradients));

  const Work io = [&] { return alone.Run(n); };
  const Work compute = [&] { return computing.Run(n, /*digests=*/true); };
  const Work bare_compute = [&] { return computing.Run(n, /*digests=*/false); };
  const std::vector<uint64_t> all = Job::Range(0, n);
  // The first steps write extents that were never written, and the second read them for the first time.
  for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(f32.Step(all));
  for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(f8.Step(all));
  BALLAST_ASSIGN_OR_RETURN(const auto times,
                           Measure("steps",
                                   {[&] { return f32.Step(all); }, io, compute, bare_compute,
                                    [&] { return AtOnce(io, compute); }, [&] { return f8.Step(all); }},
                                   options.rounds));
  const BoundedStep bounded = BoundedStep::From(times);
  rows->push_back(BoundedRow("step/nvme", n, f32.chunk_bytes(), bounded));
  std::vector<double> ratios;
  for (size_t i = 0; i < times[0].size(); ++i) ratios.push_back(times[0][i] / times[5][i]);
  const double f8_bytes = static_cast<double>(f8.chunk_bytes()), f8_seconds = Median(times[5]);
  const Row f8_row = {
      .name = "step/nvme_8bit",
      .bytes_per_element = 2 * f8_bytes / kChunk,
      .gb_per_s = 2 * f8_bytes * static_cast<double>(n) / f8_seconds / 1e9,
      .reference = "step/nvme, parameters per second",
      .ratio = Median(ratios),
      .bar = 1.6,
      .more = {{"seconds", f8_seconds}, {"parameters_per_s", static_cast<double>(n * kChunk) / f8_seconds}}};

  BALLAST_ASSIGN_OR_RETURN(const Balance balance,
                           FindBalance(options, f32, n, Median(bounded.io), Median(bounded.compute)));
  const std::vector<uint64_t> mixed = balance.Order(n), added = Job::Range(n, n + balance.dram);
  const auto mixed_compute = [&](bool digests) {
    BALLAST_RETURN_IF_ERROR(computing.Run(balance.nvme, digests));
    return f32.Step(added);
  };
  const Work mixed_io = [&] { return alone.Run(balance.nvme); };
  const Work with_digests = [&] { return mixed_compute(/*digests=*/true); };
  BALLAST_ASSIGN_OR_RETURN(const auto mixed_times, Measure("balanced steps",
                                                           {[&] { return f32.Step(mixed); }, mixed_io, with_digests,
                                                            [&] { return mixed_compute(/*digests=*/false); },
                                                            [&] { return AtOnce(mixed_io, with_digests); }},
                                                           options.rounds));
  rows->push_back(BoundedRow("step/nvme_balanced", balance.nvme, f32.chunk_bytes(), BoundedStep::From(mixed_times)));
  rows->push_back(f8_row);
  return absl::OkStatus();
}

absl::Status MeasureRemainders(const StorageBenchOptions& options, const std::string& directory,
                               std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(const auto tiers,
                           storage::Tiers::Open({.budget = {.dram = ~uint64_t{0} / 2, .nvme = ~uint64_t{0} / 2},
                                                 .directory = directory,
                                                 .staging_bytes = options.staging_bytes}));
  BALLAST_ASSIGN_OR_RETURN(const Gradients gradients, Gradients::Make());
  kernels::ThreadPool pool(options.threads);
  struct Pair {
    const char* name;
    TierKind tier;
    MomentFormat moments;
    double bar;
  };
  constexpr Pair kPairs[] = {{"remainder/nvme", TierKind::kNvme, MomentFormat::kF32, 1.15},
                             {"remainder/nvme_8bit", TierKind::kNvme, MomentFormat::kF8, 1.3},
                             {"remainder/dram", TierKind::kDram, MomentFormat::kF32, 1}};
  const uint64_t on_disk = std::max<uint64_t>(options.bytes / storage::StateLayout().StateBytes(kChunk), 1);
  std::vector<std::unique_ptr<Job>> jobs;  // of each pair the fp32 master's, then the remainder's
  std::vector<Work> steps;
  for (const Pair& pair : kPairs) {
    for (const MasterFormat master : {MasterFormat::kF32, MasterFormat::kRemainder}) {
      Job* const job =
          jobs.emplace_back(std::make_unique<Job>(tiers.get(), pair.moments, &pool, &gradients, master)).get();
      BALLAST_RETURN_IF_ERROR(job->Add(pair.tier == TierKind::kNvme ? on_disk : on_disk / 4 + 1, pair.tier));
      steps.push_back([job] { return job->Step(Job::Range(0, job->chunks())); });
      // As in MeasureSteps.
      for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(steps.back()());
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const auto times, Measure("steps with remainders", steps, options.rounds));
  for (size_t i = 0; i < jobs.size(); i += 2) {
    const Job& whole = *jobs[i];
    const Job& job = *jobs[i + 1];
    std::vector<double> ratios;
    for (size_t round = 0; round < times[i].size(); ++round) ratios.push_back(times[i][round] / times[i + 1][round]);
    const double bytes = static_cast<double>(job.chunk_bytes()), seconds = Median(times[i + 1]);
    rows->push_back({.name = kPairs[i / 2].name,
                     .bytes_per_element = 2 * bytes / kChunk,
                     .gb_per_s = 2 * bytes * static_cast<double>(job.chunks()) / seconds / 1e9,
                     .reference = "the same with fp32 masters, parameters per second",
                     .ratio = Median(ratios),
                     .bar = kPairs[i / 2].bar,
                     .more = {{"seconds", seconds},
                              {"whole_seconds", Median(times[i])},
                              {"bytes_ratio", static_cast<double>(whole.chunk_bytes()) / bytes}}});
  }
  return absl::OkStatus();
}

absl::Status MeasureDevices(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  // So slow that the machine's disk holds both, and the step waits for nothing else.
  constexpr uint64_t kBytesPerSecond = 150'000'000, kStateBytesMax = uint64_t{384} << 20;
  const uint64_t disk_bytes = 4 * kStateBytesMax;
  const auto disks =
      ThrottledDisks::Make(directory, {.count = 2, .disk_bytes = disk_bytes, .bytes_per_s = kBytesPerSecond});
  if (!disks.ok()) {
    std::fprintf(stderr, "storage_bench: two_devices SKIPPED: %s\n", std::string(disks.status().message()).c_str());
    return absl::OkStatus();
  }
  BALLAST_ASSIGN_OR_RETURN(const Gradients gradients, Gradients::Make());
  kernels::ThreadPool pool(options.threads);
  const auto open = [&](const std::string& name, size_t count) {
    const std::string home = directory + "/home-" + name;
    storage::TiersOptions tiers{.budget = {.dram = ~uint64_t{0} / 2, .nvme = count * kStateBytesMax},
                                .directory = home,
                                .devices = {{home, 0, 0}},
                                .staging_bytes = options.staging_bytes};
    for (size_t i = 0; i < count; ++i) {
      const std::string on_disk = (*disks)->paths()[i] + "/" + name;
      std::filesystem::create_directories(on_disk);
      tiers.devices.push_back({on_disk, kStateBytesMax, 0});
    }
    return storage::Tiers::Open(tiers);
  };
  BALLAST_ASSIGN_OR_RETURN(const auto one_disk, open("one", 1));
  BALLAST_ASSIGN_OR_RETURN(const auto two_disks, open("two", 2));
  Job one(one_disk.get(), MomentFormat::kF32, &pool, &gradients),
      two(two_disks.get(), MomentFormat::kF32, &pool, &gradients);
  const uint64_t n = std::clamp<uint64_t>(options.bytes / one.chunk_bytes(), 2, kStateBytesMax / one.chunk_bytes());
  const std::vector<uint64_t> all = Job::Range(0, n);
  for (Job* const job : {&one, &two}) {
    BALLAST_RETURN_IF_ERROR(job->Add(n, TierKind::kNvme));
    for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(job->Step(all));
  }
  BALLAST_ASSIGN_OR_RETURN(
      const auto times,
      Measure("devices", {[&] { return one.Step(all); }, [&] { return two.Step(all); }}, options.rounds));
  std::vector<double> ratios;
  for (size_t i = 0; i < times[0].size(); ++i) ratios.push_back(times[0][i] / times[1][i]);
  const double moved = 2 * static_cast<double>(n * one.chunk_bytes());
  rows->push_back({.name = "two_devices",
                   .bytes_per_element = 2 * static_cast<double>(one.chunk_bytes()) / kChunk,
                   .gb_per_s = moved / Median(times[1]) / 1e9,
                   .reference = "the step over one of the disks",
                   .ratio = Median(ratios),
                   .bar = 1.8,
                   .more = {{"seconds", Median(times[1])},
                            {"one_disk_seconds", Median(times[0])},
                            {"disk_bytes_per_s", static_cast<double>(kBytesPerSecond)}}});
  return absl::OkStatus();
}

}  // namespace ballast::bench
