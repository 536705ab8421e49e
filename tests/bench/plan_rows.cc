// Does the plan hold? The machine is measured as `ballastctl iotune` does, a plan is made for each of three budgets,
// and a chunk store steps by it: predicted step time over the measured one. All of it several times, since a shared
// machine is not the same from minute to minute.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/machine/machine_measure.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kPlannedChunk = uint64_t{1} << 20;  // elements
constexpr int kTimes = 3;
constexpr absl::Duration kMachineTime = absl::Seconds(10);

// A split of the budgets: its plan, and steps of a store under this plan.
class Split {
 public:
  Split(const StorageBenchOptions& bench, const std::string& directory, kernels::ThreadPool* pool,
        absl::Span<const std::byte> gradients)
      : bench_(bench), directory_(directory), pool_(pool), gradients_(gradients) {}

  absl::Status Plan(const storage::MachineProfile& machine, uint64_t chunks, double dram_share) {
    const storage::StateLayout layout;
    const uint64_t state = chunks * layout.StateBytes(kPlannedChunk);
    const uint64_t fixed =
        chunks * (layout.WorkingBytes(kPlannedChunk) + kProvisional * kPlannedChunk) + bench_.staging_bytes;
    const auto dram = fixed + static_cast<uint64_t>(dram_share * static_cast<double>(state));
    BALLAST_ASSIGN_OR_RETURN(tiers_, storage::Tiers::Open({.budget = {.dram = dram, .nvme = 2 * state},
                                                           .directory = directory_,
                                                           .staging_bytes = bench_.staging_bytes}));
    store_ = std::make_unique<storage::ChunkStore>(tiers_.get(), kernels::OptimizerSpec(), pool_);
    const std::vector<uint64_t> elements(chunks, kPlannedChunk);
    BALLAST_ASSIGN_OR_RETURN(
        plan_,
        storage::MakePlan(
            {.free = tiers_->budget(),
             .elements = elements,
             .layout = layout,
             .provisional_bytes_per_element = kProvisional,
             .staging_bytes = bench_.staging_bytes,
             .shape = {.machine = &machine, .threads = bench_.threads, .staging_bytes = store_->slot_memory_bytes()}}));
    BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, kProvisional * chunks * kPlannedChunk, "slices",
                                         storage::TierPart::kSlices));
    return store_->Add(elements, plan_);
  }

  absl::StatusOr<double> StepSeconds() {
    constexpr kernels::Hyper kHyper = {
        .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
    const kernels::Coefficients coefficients = MakeCoefficients({}, kHyper, ++step_, 1);
    std::vector<storage::ChunkUpdate> updates(store_->chunk_count());
    for (uint64_t i = 0; i < updates.size(); ++i) {
      updates[i].chunk = i;
      updates[i].segments = {{.begin = 0, .end = kPlannedChunk, .coefficients = coefficients}};
      updates[i].gradient = gradients_.subspan(i * 2 * kPlannedChunk % gradients_.size(), 2 * kPlannedChunk);
      updates[i].random = {.seed = 1, .unit = static_cast<uint32_t>(i), .step = step_};
    }
    return Seconds([&] { return store_->Run(updates, [](size_t) {}); });
  }

  const storage::Plan& plan() const { return plan_; }

 private:
  static constexpr uint64_t kProvisional = 4;  // bytes per element
  const StorageBenchOptions& bench_;
  const std::string directory_;
  kernels::ThreadPool* const pool_;
  const absl::Span<const std::byte> gradients_;
  std::unique_ptr<storage::Tiers> tiers_;
  std::unique_ptr<storage::ChunkStore> store_;
  storage::Plan plan_;
  uint64_t step_ = 0;
};

// Results under one budget, an entry per round.
struct Outcome {
  std::vector<double> predicted, seconds, ratios;
};

Row RowOf(const char* name, const storage::Plan& plan, const Outcome& outcome) {
  const storage::StepPrediction& predicted = *plan.prediction;
  const auto chunks = static_cast<double>(plan.chunks.size());
  const auto nvme = std::count_if(plan.chunks.begin(), plan.chunks.end(),
                                  [](const auto& chunk) { return chunk.state == storage::TierKind::kNvme; });
  const auto state_bytes = static_cast<double>(storage::StateLayout().StateBytes(kPlannedChunk));
  const double seconds = Median(outcome.seconds);
  return {.name = name,
          .bytes_per_element = 2 * state_bytes / kPlannedChunk,
          .gb_per_s = 2 * state_bytes * chunks / seconds / 1e9,
          .reference = "predicted / measured, at most 1.25",
          .ratio = Median(outcome.ratios),
          .bar = 0.75,
          .more = {{"predicted_seconds", Median(outcome.predicted)},
                   {"seconds", seconds},
                   {"lowest", *std::min_element(outcome.ratios.begin(), outcome.ratios.end())},
                   {"highest", *std::max_element(outcome.ratios.begin(), outcome.ratios.end())},
                   {"compute_seconds", predicted.compute},
                   {"io_seconds", predicted.disk},
                   {"disk_idle_seconds", predicted.disk_idle},
                   {"nvme_chunks", static_cast<double>(nvme)},
                   {"chunks", chunks}}};
}

}  // namespace

absl::Status MeasurePlans(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  kernels::ThreadPool pool(options.threads);
  constexpr uint64_t kGradientChunks = 64;
  BALLAST_ASSIGN_OR_RETURN(const storage::Arena gradients, storage::Arena::Map(kGradientChunks * 2 * kPlannedChunk));
  const auto values =
      absl::MakeSpan(reinterpret_cast<kernels::bf16*>(gradients.bytes().data()), kGradientChunks * kPlannedChunk);
  for (uint64_t i = 0; i < values.size(); ++i) values[i] = kernels::ToBf16(i % 3 == 0 ? -0.01f : 0.004f);

  const uint64_t chunks = std::max<uint64_t>(options.bytes / storage::StateLayout().StateBytes(kPlannedChunk), 1);
  for (const auto& [name, share] : {std::pair{"plan/all_dram", 1.0}, {"plan/half", 0.5}, {"plan/all_nvme", 0.0}}) {
    Outcome outcome;
    for (int time = 0; time < kTimes; ++time) {
      std::fprintf(stderr, "\rstorage_bench: %s, %d of %d: the machine, for %.0f s", name, time + 1, kTimes,
                   absl::ToDoubleSeconds(kMachineTime));
      BALLAST_ASSIGN_OR_RETURN(const storage::Measured machine,
                               storage::Measure({.directory = directory, .duration = kMachineTime}));
      Split split(options, directory, &pool, gradients.bytes());
      BALLAST_RETURN_IF_ERROR(split.Plan(machine.profile, chunks, share));
      std::vector<double> seconds;
      // The first step writes extents that were never written, and the second reads them for the first time.
      for (int round = -2; round < options.rounds; ++round) {
        BALLAST_ASSIGN_OR_RETURN(const double taken, split.StepSeconds());
        if (round >= 0) seconds.push_back(taken);
      }
      outcome.predicted.push_back(split.plan().prediction->total);
      outcome.seconds.push_back(Median(seconds));
      outcome.ratios.push_back(outcome.predicted.back() / outcome.seconds.back());
      if (time + 1 < kTimes) continue;
      std::fprintf(stderr, "\nstorage_bench: %s: %s\n", name, split.plan().Explain().c_str());
      rows->push_back(RowOf(name, split.plan(), outcome));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::bench
