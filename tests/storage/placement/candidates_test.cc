// Plans by measured speeds: the cases in which filling the fastest tier first is not the best, and 500 random machines
// and jobs.
#include "ballast/storage/placement/candidates.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "ballast/storage/placement/choice.h"
#include "ballast/storage/placement/plan_cost.h"
#include "ballast/storage/placement/rebalance.h"
#include "ballast/tests/storage/placement/step_simulation.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::DoubleNear;
using ::testing::HasSubstr;

constexpr uint64_t kElements = uint64_t{1} << 20;
const uint64_t kState = StateLayout().StateBytes(kElements);
const uint64_t kWorking = StateLayout().WorkingBytes(kElements);

// A server's processors and a disk of 4 GB/s for a mixture.
MachineProfile Machine() {
  MachineProfile m;
  m.threads = 8;
  m.update_f32_elements_per_s = {1'470'000'000, 1'470'000'000};
  m.digest_bytes_per_s = {45'000'000'000, 45'000'000'000};
  m.disk_read_bytes_per_s = 6'000'000'000;
  m.disk_write_bytes_per_s = 5'000'000'000;
  m.disk_mixed_bytes_per_s = 4'000'000'000;
  m.disk_append_p50_us = 50;
  return m;
}

MachineProfile MachineWithCopies() {
  MachineProfile m = Machine();
  m.dram_copy_bytes_per_s = {20'000'000'000, 40'000'000'000};
  return m;
}

PlanRequest RequestOf(const MachineProfile* machine, size_t chunks) {
  return {.elements = std::vector<uint64_t>(chunks, kElements),
          .forms = {},
          .provisional_bytes_per_element = 4,
          .staging_bytes = 8 * kState + 4096,
          .placed = {},
          .present = {},
          .shape = {.machine = machine, .threads = 8, .staging_bytes = 8 * kState}};
}

// DRAM for `chunks` of the request's chunks, and NVMe for all.
TierBytes RoomFor(const PlanRequest& request, size_t chunks) {
  const size_t n = request.elements.size();
  return {.dram = request.staging_bytes + n * (kWorking + 4 * kElements) + chunks * kState, .nvme = 2 * n * kState};
}

std::string Letters(const Plan& plan) {
  std::string letters;
  for (const ChunkPlacement& chunk : plan.chunks) letters += TierName(chunk.state)[0];
  return letters;
}

double SecondsBy(const PlanRequest& request, const Choice& choice) {
  Candidate candidate = Arrange(request, choice);
  EXPECT_TRUE(candidate.fits()) << candidate.shortage;
  Predict(request, &candidate.plan);
  return candidate.plan.prediction->total;
}

// When each chunk has its new state, by the same events: the prefix of a step, whose last kernel ends it.
double ForwardSeconds(const PlanRequest& request, const Plan& plan, double seconds_per_chunk) {
  double end = 0;
  std::vector<PlacedChunk> chunks;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    chunks.push_back({request.elements[i], plan.chunks[i]});
    if (i % 20 != 0 && i + 1 != plan.chunks.size()) continue;
    end = std::max(end, PredictStep(request.shape, request.layout, chunks).total) + 20 * seconds_per_chunk;
  }
  return end;
}

TEST(CandidatesTest, EveryEleventhChunkOnNvmeKeepsTheDiskBusy) {
  const MachineProfile machine = Machine();
  PlanRequest request = RequestOf(&machine, 1100);
  request.free = RoomFor(request, 1000);
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::string letters = Letters(*plan);
  EXPECT_EQ(std::count(letters.begin(), letters.end(), 'n'), 100);
  for (size_t i = 0; i < letters.size(); ++i) EXPECT_EQ(letters[i], i % 11 == 5 ? 'n' : 'd') << i;
  EXPECT_THAT(SecondsBy(request, {}), DoubleNear(1.325, 0.015));
  EXPECT_THAT(plan->prediction->total, DoubleNear(0.839, 0.01));
  EXPECT_THAT(plan->Explain(), HasSubstr("chunks of each tier spread evenly over the update"));
  EXPECT_THAT(plan->Explain(), HasSubstr("The next best plan would take 1.3"));
  EXPECT_THAT(plan->Explain(), HasSubstr("bound by compute, which alone takes"));
  // Whoever needs the chunks in order, slowly or fast, has them no later.
  Plan first = Arrange(request, {}).plan;
  for (const double seconds : {0.0, 0.0003, 0.001, 0.003}) {
    EXPECT_LE(ForwardSeconds(request, *plan, seconds), ForwardSeconds(request, first, seconds) + 1e-3) << seconds;
  }
}

// A gradient takes longer to the GPU than the processor takes for the update.
TEST(CandidatesTest, ASlowLinkLeavesHbmEmpty) {
  MachineProfile machine = Machine();
  machine.gpu_in_bytes_per_s = machine.gpu_out_bytes_per_s = 1'850'000'000;
  PlanRequest request = RequestOf(&machine, 73);
  request.free = RoomFor(request, 73);
  request.free.hbm = 100 * kState;
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Letters(*plan), std::string(73, 'd'));
  EXPECT_THAT(plan->prediction->total, DoubleNear(0.052, 0.0005));
  EXPECT_THAT(SecondsBy(request, {}), DoubleNear(0.083, 0.0005));
  EXPECT_THAT(plan->Explain(), HasSubstr("with state in hbm a step would take longer"));
  machine.gpu_in_bytes_per_s = 20'000'000'000;
  EXPECT_EQ(Letters(*MakePlan(request)), std::string(73, 'h'));
}

// The copy that does not fit beside its state would cost the link more than the processor's update.
TEST(CandidatesTest, WorkingCopiesComeToHbmBeforeMoreState) {
  MachineProfile machine = Machine();
  machine.gpu_in_bytes_per_s = 20'000'000'000;
  machine.gpu_out_bytes_per_s = 2'000'000'000;
  PlanRequest request = RequestOf(&machine, 4);
  request.free = RoomFor(request, 4);
  request.free.hbm = 2 * kState + kWorking;
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Letters(*plan), "hddd");
  EXPECT_EQ(plan->working.hbm, kWorking);
  EXPECT_LT(plan->prediction->total, SecondsBy(request, {}) - 1e-4);
  EXPECT_EQ(Letters(Arrange(request, {}).plan), "hhdd") << "as much state as fits";
  request.elements.resize(8, kElements);
  request.free = RoomFor(request, 8);
  request.free.hbm = 6 * (kState + kWorking) + kState;
  EXPECT_EQ(Letters(*MakePlan(request)), "hhhhhhdd");
  // Where the disk binds, each state in HBM leaves DRAM to another one.
  request.free.hbm = 7 * kState;
  request.elements.resize(24, kElements);
  request.forms.clear();
  request.free.dram = RoomFor(request, 0).dram;
  request.free.nvme = 24 * kState;
  const absl::StatusOr<Plan> bound = MakePlan(request);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->state.hbm, 7 * kState);
  EXPECT_EQ(bound->choice.hbm, HbmUse::kState);
}

TEST(CandidatesTest, SlicesReadBackAlthoughTheyFitSaveTheDisk) {
  const MachineProfile machine = Machine();
  PlanRequest request = RequestOf(&machine, 100);
  request.free = RoomFor(request, 58);
  request.read_back = {.buffer_bytes_min = kState / 3, .buffer_bytes_max = kState / 3};
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->reads_back);
  const auto traffic = [](const Plan& p) { return 2.0 * static_cast<double>(p.state.nvme + p.read_back_bytes); };
  EXPECT_THAT(traffic(*plan) / traffic(Arrange(request, {}).plan), DoubleNear(0.64, 0.02));
  EXPECT_LT(plan->prediction->total, 0.75 * SecondsBy(request, {.order = ChunkOrder::kSpread}));
  EXPECT_THAT(plan->Explain(), HasSubstr("State makes better use of the dram than a step's slices"));
  // Not where the disk has nothing else to do.
  request.free = RoomFor(request, 100);
  EXPECT_FALSE(MakePlan(request)->reads_back);
  EXPECT_FALSE(MakePlan(request)->runner_up.has_value()) << "all choices come to the same plan";
}

// With its copy a state takes 14 bytes of DRAM a parameter, without 12: a sixth more state is in memory.
TEST(CandidatesTest, MastersInDramServePullsWhereTheDiskBinds) {
  const MachineProfile machine = MachineWithCopies();
  PlanRequest request = RequestOf(&machine, 100);
  request.free = RoomFor(request, 60);
  request.pull = PullMemory{.slots = 4, .slot_bytes = kWorking};
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->choice.rounds_masters);
  uint64_t dram = request.staging_bytes + plan->slice_bytes + plan->pull.bytes();
  for (const ChunkPlacement& chunk : plan->chunks) {
    EXPECT_EQ(chunk.working.has_value(), chunk.state == TierKind::kNvme) << "a pull never waits for the disk";
    dram += chunk.state == TierKind::kDram ? kState : kWorking;
  }
  EXPECT_LE(dram, request.free.dram);
  EXPECT_EQ(dram - request.staging_bytes - plan->slice_bytes - plan->pull.bytes(),
            plan->state.dram + plan->working.dram);
  const std::string letters = Letters(*plan);
  EXPECT_GE(std::count(letters.begin(), letters.end(), 'd'), 70);
  EXPECT_LT(plan->prediction->total, SecondsBy(request, {.order = ChunkOrder::kSpread}));
  EXPECT_GT(plan->prediction->pulls, 0);
  EXPECT_THAT(plan->Explain(), HasSubstr("State makes better use of the dram than the working copies of"));
  // Not where all fits, nor where rounding takes longer than the disk.
  request.free = RoomFor(request, 100);
  EXPECT_FALSE(MakePlan(request)->choice.rounds_masters);
  request.free = RoomFor(request, 60);
  MachineProfile slow = machine;
  slow.dram_copy_bytes_per_s.one_thread = 100'000'000;
  request.shape.machine = &slow;
  EXPECT_FALSE(MakePlan(request)->choice.rounds_masters);
}

// Copies of chunks on NVMe are worth more than state: each pull without one reads the disk.
TEST(CandidatesTest, CopiesOfChunksOnNvmeStay) {
  const MachineProfile machine = MachineWithCopies();
  PlanRequest request = RequestOf(&machine, 100);
  request.pull = PullMemory{.slots = 4, .slot_bytes = kWorking};
  request.free = RoomFor(request, 0);
  request.free.dram -= 50 * kWorking;
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->state.dram, 0u);
  EXPECT_GT(plan->working.dram, 40 * kWorking);
  const double read = 2 * 4.0 * kElements * static_cast<double>(100 - plan->working.dram / kWorking);
  EXPECT_GT(plan->prediction->pulls, read / static_cast<double>(machine.disk_read_bytes_per_s));
}

TEST(CandidatesTest, WithoutAProfileTiersAreFilledInOrder) {
  PlanRequest request = RequestOf(nullptr, 11);
  request.staging_bytes = 4096;
  request.free = RoomFor(request, 9);
  request.read_back = {.buffer_bytes_min = 4096, .buffer_bytes_max = 4096};
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Letters(*plan), "dddddddddnn");
  EXPECT_FALSE(plan->reads_back);
  EXPECT_FALSE(plan->prediction.has_value() || plan->runner_up.has_value());
}

// The plan names the places of new chunks alone, and counts with the earlier ones where they are.
TEST(CandidatesTest, LaterChunksLeaveEarlierOnesAlone) {
  const MachineProfile machine = Machine();
  PlanRequest first = RequestOf(&machine, 20);
  first.free = RoomFor(first, 15);
  const Plan earlier = *MakePlan(first);
  PlanRequest later = RequestOf(&machine, 10);
  later.staging_bytes = 0;
  later.free = {.dram = 10 * (kWorking + 4 * kElements) + 5 * kState, .nvme = 5 * kState};
  for (size_t i = 0; i < 20; ++i) later.placed.push_back({kElements, earlier.chunks[i]});
  const absl::StatusOr<Plan> plan = MakePlan(later);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Letters(*plan), "dndndndndn");
  std::vector<PlacedChunk> all = later.placed;
  for (const ChunkPlacement& placement : plan->chunks) all.push_back({kElements, placement});
  EXPECT_EQ(plan->prediction->total, PredictStep(later.shape, StateLayout(), all).total);
}

// A job on a server whose budgets change, with its chunks where `letters` says.
JobHolding Holding(const MachineProfile* machine, const std::string& letters) {
  JobHolding job{.name = "a", .chunks = {}, .shape = {.machine = machine, .threads = 8, .staging_bytes = 8 * kState}};
  for (const char letter : letters) {
    job.chunks.push_back({kElements, {.state = letter == 'd' ? TierKind::kDram : TierKind::kNvme}});
  }
  return job;
}

std::string Changed(const MachineProfile* machine, const std::string& letters, int64_t dram_chunks_more) {
  const JobHolding job = Holding(machine, letters);
  const auto dram = static_cast<uint64_t>(std::count(letters.begin(), letters.end(), 'd'));
  const uint64_t budget = (dram + static_cast<uint64_t>(dram_chunks_more)) * kState;
  const TierBytes used{.dram = dram * kState, .nvme = (letters.size() - dram) * kState};
  const auto plans = PlanBudgets({.dram = budget, .nvme = letters.size() * kState}, used, {job});
  return plans.ok() ? Letters((*plans)[0]) : std::string(plans.status().message());
}

// 100 steps pay for the moves of what changes, or nothing more moves than must.
TEST(CandidatesTest, ChangedBudgetsMoveWhatPaysForItself) {
  const MachineProfile machine = Machine();
  const std::string spread = "dddddnddddddddddnddddd";
  EXPECT_EQ(Changed(&machine, spread, 0), spread);
  // As good a plan as the present one, elsewhere.
  std::string shifted = spread;
  std::rotate(shifted.begin(), shifted.end() - 1, shifted.end());
  ASSERT_NE(shifted, spread);
  EXPECT_EQ(Changed(&machine, shifted, 0), shifted);
  // Chunks that were placed one tier after the other: the gain of each step is more than a hundredth of the moves.
  const std::string tiers = std::string(200, 'd') + std::string(20, 'n');
  const std::string moved = Changed(&machine, tiers, 0);
  EXPECT_EQ(std::count(moved.begin(), moved.end(), 'n'), 20);
  EXPECT_LT(std::count(moved.begin() + 200, moved.end(), 'n'), 5) << moved;
  // A single chunk must leave, and a single one leaves; with room again it comes back.
  const std::string less = Changed(&machine, spread, -1);
  EXPECT_EQ(std::count(less.begin(), less.end(), 'n'), 3);
  for (size_t i = 0; i < spread.size(); ++i) EXPECT_TRUE(spread[i] == 'd' || less[i] == 'n') << less;
  EXPECT_EQ(Changed(&machine, spread, 2), std::string(22, 'd'));
}

// No step is shorter by it: where the processor is slow, nothing comes up that may stay.
TEST(CandidatesTest, ChangedBudgetsMoveNothingForNothing) {
  MachineProfile machine = Machine();
  machine.update_f32_elements_per_s = {10'000'000, 10'000'000};
  machine.digest_bytes_per_s = {1'000'000'000'000'000, 1'000'000'000'000'000};
  EXPECT_EQ(Changed(&machine, "ddnddnddd", 1), "ddnddnddd");
  // Without a profile nobody knows, and tiers are filled in order.
  EXPECT_EQ(Changed(nullptr, "ddnddnddd", 1), "ddddddddn");
}

// Anything between `low` and `high`, small numbers as often as large ones.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  uint64_t Between(uint64_t low, uint64_t high) {
    const double log = std::log(static_cast<double>(low)) + Part() * std::log(static_cast<double>(high) / low);
    return std::clamp(static_cast<uint64_t>(std::exp(log)), low, high);
  }
  double Part() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool Coin() { return random_() % 2 == 0; }

 private:
  std::mt19937_64 random_;
};

MachineProfile RandomMachine(Dice& dice) {
  MachineProfile m;
  m.threads = 8;
  const auto both = [](uint64_t speed) { return ThreadSpeeds{speed, speed}; };
  m.update_f32_elements_per_s = both(dice.Between(100'000'000, 5'000'000'000));
  m.digest_bytes_per_s = both(dice.Between(5'000'000'000, 100'000'000'000));
  m.disk_read_bytes_per_s = dice.Between(200'000'000, 20'000'000'000);
  m.disk_write_bytes_per_s = dice.Between(m.disk_read_bytes_per_s / 3, m.disk_read_bytes_per_s);
  const auto apart =
      2 / (1 / static_cast<double>(m.disk_read_bytes_per_s) + 1 / static_cast<double>(m.disk_write_bytes_per_s));
  m.disk_mixed_bytes_per_s = static_cast<uint64_t>(apart * (0.7 + dice.Part()));
  if (dice.Coin()) {
    const auto part = [&](uint64_t alone) { return static_cast<uint64_t>((0.4 + 0.6 * dice.Part()) * alone); };
    m.update_f32_beside_disk_elements_per_s = part(m.update_f32_elements_per_s.all_threads);
    m.disk_mixed_beside_update_bytes_per_s = part(m.disk_mixed_bytes_per_s);
  }
  m.disk_append_p50_us = 100;
  m.dram_copy_bytes_per_s = both(dice.Between(2'000'000'000, 100'000'000'000));
  m.gpu_in_bytes_per_s = dice.Between(1'000'000'000, 50'000'000'000);
  m.gpu_out_bytes_per_s = dice.Between(1'000'000'000, 50'000'000'000);
  return m;
}

PlanRequest RandomRequest(Dice& dice, const MachineProfile* machine) {
  PlanRequest request = RequestOf(machine, 0);
  const uint64_t size = uint64_t{1} << dice.Between(16, 20);
  const uint64_t chunks = dice.Between(2, 80);
  while (request.elements.size() < chunks) {
    // Units end with a short chunk.
    request.elements.push_back(dice.Part() < 0.8 ? size : dice.Between(256, size));
  }
  const uint64_t state = request.layout.StateBytes(size);
  request.staging_bytes = dice.Between(3, 12) * state;
  request.shape.staging_bytes = request.staging_bytes;
  request.durable = dice.Coin();
  request.shape.logged = dice.Coin();
  request.shape.flushed_share = dice.Coin() ? dice.Part() / 4 : 0;
  request.flush_buffer_bytes = state / 8;
  request.nvme_fixed_bytes = request.durable ? 3 * state : 0;
  if (dice.Coin()) {
    request.read_back = {.buffer_bytes_min = size * 10,
                         .buffer_bytes_max = size * 20,
                         .spill_bytes = request.durable ? 0 : chunks * size * 2};
  }
  const double all = static_cast<double>(chunks * (state + size * 6));
  request.free.dram = request.staging_bytes + static_cast<uint64_t>(all * (0.2 + dice.Part()));
  request.free.nvme = static_cast<uint64_t>(all * (0.2 + 1.5 * dice.Part()));
  if (dice.Coin()) {
    request.free.hbm = static_cast<uint64_t>(all * dice.Part());
  } else if (dice.Coin()) {
    request.pull = PullMemory{.slots = 2, .slot_bytes = request.layout.WorkingBytes(size)};
  }
  return request;
}

void ExpectWithinBudgets(const PlanRequest& request, const Plan& plan) {
  TierBytes taken;
  bool hbm = false, nvme = false;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const ChunkPlacement& chunk = plan.chunks[i];
    taken[chunk.state] += request.layout.StateBytes(request.elements[i]);
    ASSERT_TRUE(chunk.working.has_value() || request.pull.has_value());
    if (chunk.working.has_value()) taken[*chunk.working] += request.layout.WorkingBytes(request.elements[i]);
    if (request.durable && chunk.state != TierKind::kNvme) taken.nvme += request.layout.StateBytes(request.elements[i]);
    ASSERT_TRUE(!chunk.working.has_value() || chunk.working == TierKind::kDram || chunk.working == chunk.state);
    hbm = hbm || chunk.state == TierKind::kHbm;
    nvme = nvme || chunk.state == TierKind::kNvme;
  }
  taken.dram += plan.slice_bytes + plan.pull.bytes();
  if (nvme) taken.dram += request.staging_bytes;
  if (!nvme && hbm && request.durable) taken.dram += request.flush_buffer_bytes;
  taken.nvme += request.nvme_fixed_bytes + plan.spill_bytes;
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    EXPECT_LE(taken[tier], request.free[tier]) << TierName(tier);
  }
}

// A forward and a backward pass without a working copy: the disk reads fp32, the processor makes bf16.
double PullSeconds(const MachineProfile& machine, absl::Span<const PlacedChunk> chunks) {
  double seconds = 0;
  for (const PlacedChunk& chunk : chunks) {
    if (chunk.placement.working.has_value()) continue;
    const double n = 2.0 * static_cast<double>(chunk.elements);
    if (chunk.placement.state == TierKind::kNvme) seconds += 4 * n / static_cast<double>(machine.disk_read_bytes_per_s);
    seconds += (4 + 2) * n / 2 / static_cast<double>(machine.dram_copy_bytes_per_s.one_thread);
  }
  return seconds;
}

double Simulated(const PlanRequest& request, const Plan& plan) {
  StepShape shape = request.shape;
  shape.durable = request.durable;
  std::vector<PlacedChunk> chunks;
  double gradients = 0;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    chunks.push_back({request.elements[i], plan.chunks[i]});
    gradients += static_cast<double>(2 * request.elements[i]);
  }
  shape.read_back_share = plan.reads_back ? static_cast<double>(plan.read_back_bytes) / gradients : 0;
  const double syncs = shape.durable && shape.logged ? 3e-6 * shape.machine->disk_append_p50_us : 0;
  return SimulateStep(shape, request.layout, chunks) + syncs + PullSeconds(*shape.machine, chunks);
}

TEST(CandidatesTest, TheChosenPlanIsTheBestOnRandomMachines) {
  constexpr int kPlans = 500;
  int planned = 0, compared = 0, better = 0;
  double worst = 1, model_low = 1, model_high = 1;
  for (uint64_t seed = 1; planned < kPlans; ++seed) {
    ASSERT_LT(seed, 10 * kPlans) << "hardly any request fits";
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Dice dice(seed);
    const MachineProfile machine = RandomMachine(dice);
    const PlanRequest request = RandomRequest(dice, &machine);
    const absl::StatusOr<Plan> plan = MakePlan(request);
    double best = 1e9;
    for (const Choice& choice : Choices(request)) {
      Candidate candidate = Arrange(request, choice);
      if (!candidate.fits()) continue;
      ASSERT_TRUE(plan.ok()) << plan.status();
      ExpectWithinBudgets(request, candidate.plan);
      Predict(request, &candidate.plan);
      const StepPrediction& other = *candidate.plan.prediction;
      EXPECT_LE(plan->prediction->total + plan->prediction->pulls, (other.total + other.pulls) * (1 + 1e-9));
      best = std::min(best, Simulated(request, candidate.plan));
      ++compared;
    }
    if (!plan.ok()) continue;
    ++planned;
    better += plan->choice == Choice() ? 0 : 1;
    const double simulated = Simulated(request, *plan);
    EXPECT_LE(simulated, 1.1 * best) << plan->Explain();
    EXPECT_GE(plan->prediction->total, 0.999 * plan->prediction->bound()) << "shorter than its lower bound";
    worst = std::max(worst, simulated / best);
    const double predicted = plan->prediction->total + plan->prediction->pulls;
    model_low = std::min(model_low, predicted / simulated);
    model_high = std::max(model_high, predicted / simulated);
    EXPECT_TRUE(MakePlan(request)->SameAs(*plan)) << "not the same plan twice";
  }
  std::printf(
      "%d plans of %d candidates, %d not the simplest; simulated at most %.3f of the best candidate; predicted "
      "over simulated %.3f to %.3f\n",
      planned, compared, better, worst, model_low, model_high);
  EXPECT_GT(better, kPlans / 4);
}

}  // namespace
}  // namespace ballast::storage
