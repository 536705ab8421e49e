// The rows of a step over state on NVMe: see storage_bench.cc.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {
namespace {

using kernels::MomentFormat;
using storage::TierKind;

constexpr uint64_t kChunk = uint64_t{1} << 20;  // elements

// Small numbers of both signs, for as many chunks as no cache holds; update i of a step takes the i-th, round and
// round.
class Gradients {
 public:
  static absl::StatusOr<Gradients> Make() {
    Gradients gradients;
    BALLAST_ASSIGN_OR_RETURN(gradients.memory_, storage::Arena::Map(kChunks * kChunk * sizeof(uint16_t), false));
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

// A store of full chunks, stepped by AdamW.
class Job {
 public:
  Job(storage::Tiers* tiers, MomentFormat moments, kernels::ThreadPool* pool, const Gradients* gradients)
      : spec_{.moments = moments}, store_(tiers, spec_, pool), gradients_(gradients) {}

  absl::Status Add(uint64_t chunks, TierKind tier) {
    storage::Plan plan;
    plan.chunks.resize(chunks, {.state = tier, .working = TierKind::kDram});
    return store_.Add(std::vector<uint64_t>(chunks, kChunk), plan);
  }
  uint64_t chunk_bytes() const { return store_.layout().StateBytes(kChunk); }
  uint64_t chunks() const { return store_.chunk_count(); }

  absl::Status Step(absl::Span<const uint64_t> chunks) {
    const kernels::Coefficients coefficients = MakeCoefficients(spec_, kHyper, ++step_, 1);
    std::vector<storage::ChunkUpdate> updates;
    for (const uint64_t chunk : chunks) {
      updates.push_back({.chunk = chunk,
                         .values = {},
                         .segments = {{.begin = 0, .end = kChunk, .coefficients = coefficients}},
                         .gradient = gradients_->Of(updates.size()),
                         .random = {.seed = 1, .unit = static_cast<uint32_t>(chunk), .step = step_}});
    }
    return store_.Run(updates, [](size_t) {});
  }
  // `updates` updates, of all chunks in turn.
  absl::Status StepInTurn(uint64_t updates) {
    for (uint64_t at = 0; at < updates; at += chunks()) {
      BALLAST_RETURN_IF_ERROR(Step(Range(0, std::min(chunks(), updates - at))));
    }
    return absl::OkStatus();
  }
  static std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
    std::vector<uint64_t> range(end - begin);
    for (uint64_t i = 0; i < range.size(); ++i) range[i] = begin + i;
    return range;
  }

 private:
  static constexpr kernels::Hyper kHyper = {
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
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

// The row of a step against what bounds it.
Row BoundedRow(const char* name, uint64_t chunks, uint64_t chunk_bytes, const std::vector<double>& step,
               const std::vector<double>& io, const std::vector<double>& compute,
               const std::vector<double>& checksums) {
  std::vector<double> ratios, with_checksums;
  for (size_t i = 0; i < step.size(); ++i) {
    ratios.push_back(std::max(io[i], compute[i]) / step[i]);
    with_checksums.push_back(std::max(io[i], compute[i] + checksums[i]) / step[i]);
  }
  const double moved = 2 * static_cast<double>(chunks * chunk_bytes);
  return {.name = name,
          .bytes_per_element = 2 * static_cast<double>(chunk_bytes) / kChunk,
          .gb_per_s = moved / Median(step) / 1e9,
          .reference = "max(I/O alone, compute alone)",
          .ratio = Median(ratios),
          .bar = 1 / 1.1,
          .more = {{"seconds", Median(step)},
                   {"io_seconds", Median(io)},
                   {"compute_seconds", Median(compute)},
                   {"checksum_seconds", Median(checksums)},
                   {"with_checksums", Median(with_checksums)}}};
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
  Job in_dram(tiers.get(), MomentFormat::kF32, &pool, &gradients);
  const uint64_t n = std::max<uint64_t>(options.bytes / f32.chunk_bytes(), 1);
  std::fprintf(stderr, "storage_bench: %lu chunks of 2^20 parameters, I/O by %s\n", n, tiers->io_backend().c_str());
  BALLAST_RETURN_IF_ERROR(f32.Add(n, TierKind::kNvme));
  if (tiers->used().nvme != n * f32.chunk_bytes()) {
    return absl::InternalError("extents no longer lie one behind the other: IoAlone would move others than the step");
  }
  BALLAST_RETURN_IF_ERROR(f8.Add(n, TierKind::kNvme));
  BALLAST_ASSIGN_OR_RETURN(IoAlone alone,
                           IoAlone::Make(options.staging_bytes, &tiers->nvme()->file(), f32.chunk_bytes()));
  BALLAST_RETURN_IF_ERROR(in_dram.Add(alone.slots(), TierKind::kDram));

  const Work io = [&] { return alone.Run(n); }, compute = [&] { return in_dram.StepInTurn(n); };
  const Work checksums = [&] {
    alone.Checksums(n);
    return absl::OkStatus();
  };
  const std::vector<uint64_t> all = Job::Range(0, n);
  // The first steps write extents that were never written, and the second read them for the first time.
  for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(f32.Step(all));
  for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(f8.Step(all));
  BALLAST_ASSIGN_OR_RETURN(
      const auto times,
      Measure("steps", {io, compute, [&] { return f32.Step(all); }, [&] { return f8.Step(all); }, checksums},
              options.rounds));
  rows->push_back(BoundedRow("step/nvme", n, f32.chunk_bytes(), times[2], times[0], times[1], times[4]));
  std::vector<double> ratios;
  for (size_t i = 0; i < times[2].size(); ++i) ratios.push_back(times[2][i] / times[3][i]);
  const double f8_bytes = static_cast<double>(f8.chunk_bytes()), f8_seconds = Median(times[3]);
  const Row f8_row = {
      .name = "step/nvme_8bit",
      .bytes_per_element = 2 * f8_bytes / kChunk,
      .gb_per_s = 2 * f8_bytes * static_cast<double>(n) / f8_seconds / 1e9,
      .reference = "step/nvme, parameters per second",
      .ratio = Median(ratios),
      .bar = 1.6,
      .more = {{"seconds", f8_seconds}, {"parameters_per_s", static_cast<double>(n * kChunk) / f8_seconds}}};

  BALLAST_ASSIGN_OR_RETURN(const Balance balance, FindBalance(options, f32, n, Median(times[0]), Median(times[1])));
  const std::vector<uint64_t> mixed = balance.Order(n), added = Job::Range(n, n + balance.dram);
  const Work mixed_compute = [&] {
    BALLAST_RETURN_IF_ERROR(in_dram.StepInTurn(balance.nvme));
    return f32.Step(added);
  };
  BALLAST_ASSIGN_OR_RETURN(const auto mixed_times, Measure("balanced steps",
                                                           {[&] { return alone.Run(balance.nvme); }, mixed_compute,
                                                            [&] { return f32.Step(mixed); },
                                                            [&] {
                                                              alone.Checksums(balance.nvme);
                                                              return absl::OkStatus();
                                                            }},
                                                           options.rounds));
  rows->push_back(BoundedRow("step/nvme_balanced", balance.nvme, f32.chunk_bytes(), mixed_times[2], mixed_times[0],
                             mixed_times[1], mixed_times[3]));
  rows->push_back(f8_row);
  return absl::OkStatus();
}

}  // namespace ballast::bench
