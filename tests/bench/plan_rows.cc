// Does the plan hold? For each of five splits of the budgets the machine is measured as `ballastctl iotune` does, and
// two chunk stores step by turns: by the plan that is chosen, and by first fit, which fills one tier after the other in
// the order of the update. Besides, predicted step times over measured ones. A sixth row has the pulls of a forward and
// a backward pass in its step: by a plan that may leave out working copies beside state in DRAM, and by one that may
// not.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/tools/iotune/machine_measure.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/placement/plan_cost.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kPlannedChunk = uint64_t{1} << 20;  // elements
constexpr absl::Duration kMachineTime = absl::Seconds(10);

// A split of the budgets: its plan, and steps of a store under this plan. The share of DRAM is of the state: the rest
// of the memory that a job needs is there in any case.
class Split {
 public:
  Split(const StorageBenchOptions& bench, const std::string& directory, kernels::ThreadPool* pool,
        absl::Span<const std::byte> gradients)
      : bench_(bench), directory_(directory), pool_(pool), gradients_(gradients) {}

  // kFirstFit: plans without the machine, and predicts the plan afterwards. kWithoutCopies: may leave out copies.
  enum class By { kChoice, kFirstFit, kChoiceWithoutCopies };
  absl::Status Plan(const storage::MachineProfile& machine, uint64_t chunks, double dram_share, By by) {
    const bool first_fit = by == By::kFirstFit;
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
    storage::PlanRequest request{
        .free = tiers_->budget(),
        .elements = elements,
        .layout = layout,
        .provisional_bytes_per_element = kProvisional,
        .staging_bytes = bench_.staging_bytes,
        .shape = {.machine = &machine, .threads = bench_.threads, .staging_bytes = store_->slot_memory_bytes()}};
    if (by == By::kChoiceWithoutCopies) request.pull = store_->pull_memory_missing(kPlannedChunk, chunks);
    if (first_fit) request.shape.machine = nullptr;
    BALLAST_ASSIGN_OR_RETURN(plan_, storage::MakePlan(request));
    request.shape.machine = &machine;
    if (first_fit) storage::Predict(request, &plan_);
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

  // Reads the working parameters of all chunks, chunk after chunk.
  absl::StatusOr<double> PassSeconds() {
    pulled_.resize(2 * kPlannedChunk);
    return Seconds([&]() -> absl::Status {
      for (uint64_t i = 0; i < store_->chunk_count(); ++i) {
        BALLAST_RETURN_IF_ERROR(store_->ReadWorking(i, 0, absl::MakeSpan(pulled_)));
      }
      return absl::OkStatus();
    });
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
  std::vector<std::byte> pulled_;
};

struct Outcome {
  std::vector<double> seconds;  // an entry per round
  double predicted = 0;
  double ratio() const { return predicted / Median(seconds); }
};

Row RowOf(const char* name, bool pulls, const storage::Plan& plan, const Outcome& chosen, const Outcome& first_fit) {
  const storage::StepPrediction& predicted = *plan.prediction;
  const auto chunks = static_cast<double>(plan.chunks.size());
  const auto nvme = std::count_if(plan.chunks.begin(), plan.chunks.end(),
                                  [](const auto& chunk) { return chunk.state == storage::TierKind::kNvme; });
  const auto state_bytes = static_cast<double>(storage::StateLayout().StateBytes(kPlannedChunk));
  std::vector<double> ratios;
  for (size_t i = 0; i < chosen.seconds.size(); ++i) ratios.push_back(first_fit.seconds[i] / chosen.seconds[i]);
  return {.name = name,
          .bytes_per_element = 2 * state_bytes / kPlannedChunk,
          .gb_per_s = 2 * state_bytes * chunks / Median(chosen.seconds) / 1e9,
          .reference = pulls ? "all copies kept, steps per second" : "first fit, steps per second",
          .ratio = Median(ratios),
          .bar = 1,
          .more = {{"predicted_ratio", first_fit.predicted / chosen.predicted},
                   {"seconds", Median(chosen.seconds)},
                   {"predicted_over_measured", chosen.ratio()},
                   {"first_fit_seconds", Median(first_fit.seconds)},
                   {"first_fit_predicted_over_measured", first_fit.ratio()},
                   {"compute_seconds", predicted.compute},
                   {"disk_seconds", predicted.disk},
                   {"nvme_chunks", static_cast<double>(nvme)},
                   {"chunks", chunks}}};
}

struct SplitRow {
  const char* name;
  double dram_share;
  int passes;  // of pulls, in each step
};

}  // namespace

absl::Status MeasurePlans(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  kernels::ThreadPool pool(options.threads);
  constexpr uint64_t kGradientChunks = 64;
  BALLAST_ASSIGN_OR_RETURN(const storage::Arena gradients, storage::Arena::Map(kGradientChunks * 2 * kPlannedChunk));
  const auto values =
      absl::MakeSpan(reinterpret_cast<kernels::bf16*>(gradients.bytes().data()), kGradientChunks * kPlannedChunk);
  for (uint64_t i = 0; i < values.size(); ++i) values[i] = kernels::ToBf16(i % 3 == 0 ? -0.01f : 0.004f);

  const uint64_t chunks = std::max<uint64_t>(options.bytes / storage::StateLayout().StateBytes(kPlannedChunk), 1);
  for (const SplitRow& row : {SplitRow{"plan/all_dram", 1.0, 0},
                              {"plan/nine_tenths", 0.9, 0},
                              {"plan/three_quarters", 0.75, 0},
                              {"plan/half", 0.5, 0},
                              {"plan/all_nvme", 0.0, 0},
                              {"plan/half_with_pulls", 0.5, 2}}) {
    std::fprintf(stderr, "storage_bench: %s: the machine, for %.0f s\n", row.name, absl::ToDoubleSeconds(kMachineTime));
    BALLAST_ASSIGN_OR_RETURN(const services::Measured machine,
                             services::Measure({.directory = directory, .duration = kMachineTime}));
    const ScratchDirectory beside;
    Split chosen(options, directory, &pool, gradients.bytes()), other(options, beside.path(), &pool, gradients.bytes());
    const bool pulls = row.passes > 0;
    BALLAST_RETURN_IF_ERROR(chosen.Plan(machine.profile, chunks, row.dram_share,
                                        pulls ? Split::By::kChoiceWithoutCopies : Split::By::kChoice));
    BALLAST_RETURN_IF_ERROR(
        other.Plan(machine.profile, chunks, row.dram_share, pulls ? Split::By::kChoice : Split::By::kFirstFit));
    const auto predicted = [&](const Split& split) {
      return split.plan().prediction->total + (pulls ? split.plan().prediction->pulls : 0);
    };
    Outcome of_chosen{.seconds = {}, .predicted = predicted(chosen)},
        of_other{.seconds = {}, .predicted = predicted(other)};
    // Said before anything is measured.
    std::fprintf(stderr, "storage_bench: %s: %s\n", row.name, chosen.plan().Explain().c_str());
    // The first step writes extents that were never written, and the second reads them for the first time.
    for (int round = -2; round < options.rounds; ++round) {
      double seconds[2] = {};
      for (const bool second : {round % 2 == 0, round % 2 != 0}) {
        Split& split = second ? other : chosen;
        double& sum = seconds[second ? 1 : 0];
        BALLAST_ASSIGN_OR_RETURN(sum, split.StepSeconds());
        for (int pass = 0; pass < row.passes; ++pass) {
          BALLAST_ASSIGN_OR_RETURN(const double pass_seconds, split.PassSeconds());
          sum += pass_seconds;
        }
      }
      if (round < 0) continue;
      of_chosen.seconds.push_back(seconds[0]);
      of_other.seconds.push_back(seconds[1]);
    }
    rows->push_back(RowOf(row.name, pulls, chosen.plan(), of_chosen, of_other));
  }
  return absl::OkStatus();
}

}  // namespace ballast::bench
