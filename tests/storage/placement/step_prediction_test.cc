#include "ballast/storage/placement/step_prediction.h"

#include "ballast/storage/placement/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kElements = uint64_t{1} << 20;
constexpr double kStateBytes = 3.0 * 4 * kElements + StateLayout::kLabelBytes;

// Round figures: a chunk in DRAM takes 1 ms, and its state 10 ms to be read and written.
MachineProfile Machine() {
  MachineProfile m;
  m.threads = 4;
  m.update_f32_elements_per_s.one_thread = 500 * kElements;
  m.update_f32_elements_per_s.all_threads = 1000 * kElements;
  m.update_f8_elements_per_s.one_thread = 250 * kElements;
  m.update_f8_elements_per_s.all_threads = 800 * kElements;
  m.digest_bytes_per_s.one_thread = static_cast<uint64_t>(1000 * kStateBytes);
  m.digest_bytes_per_s.all_threads = static_cast<uint64_t>(4000 * kStateBytes);
  m.disk_read_bytes_per_s = static_cast<uint64_t>(250 * kStateBytes);
  m.disk_write_bytes_per_s = static_cast<uint64_t>(500 * kStateBytes);
  m.disk_mixed_bytes_per_s = static_cast<uint64_t>(200 * kStateBytes);
  m.disk_append_p50_us = 100;
  return m;
}

std::vector<PlacedChunk> Chunks(uint64_t dram, uint64_t nvme) {
  std::vector<PlacedChunk> chunks(dram, {kElements, {.state = TierKind::kDram}});
  chunks.resize(dram + nvme, {kElements, {.state = TierKind::kNvme}});
  return chunks;
}

StepShape Shape(const MachineProfile* machine, int threads = 4) {
  return {.machine = machine, .threads = threads, .staging_bytes = static_cast<uint64_t>(4 * kStateBytes)};
}

TEST(StepPredictionTest, InDramComputeIsAll) {
  const MachineProfile machine = Machine();
  const StepPrediction p = PredictStep(Shape(&machine), StateLayout(), Chunks(100, 0));
  EXPECT_THAT(p.total, DoubleNear(0.1, 1e-6));
  EXPECT_EQ(p.disk, 0);
  EXPECT_THAT(p.unmeasured, IsEmpty());
  EXPECT_THAT(p.Explain(), HasSubstr("bound by compute"));
}

TEST(StepPredictionTest, ThreadsAddUntilMemoryGivesNoMore) {
  const MachineProfile machine = Machine();
  const auto total = [&](int threads) {
    return PredictStep(Shape(&machine, threads), StateLayout(), Chunks(100, 0)).total;
  };
  EXPECT_THAT(total(1), DoubleNear(0.2, 1e-6));
  EXPECT_THAT(total(2), DoubleNear(0.1, 1e-6));
  EXPECT_THAT(total(3), DoubleNear(0.1, 1e-6));
  EXPECT_THAT(total(64), DoubleNear(0.1, 1e-6));
}

TEST(StepPredictionTest, SlicesThatAreReadBackAreReadAndDigested) {
  const MachineProfile machine = Machine();
  StepShape shape = Shape(&machine);
  shape.durable = true;
  const StepPrediction before = PredictStep(shape, StateLayout(), Chunks(100, 0));
  shape.read_back_share = 0.5;
  const StepPrediction p = PredictStep(shape, StateLayout(), Chunks(100, 0));
  const double read_back = 0.5 * 100 * 2 * kElements;
  EXPECT_EQ(before.disk_read, 0);
  EXPECT_THAT(p.disk_read, DoubleNear(read_back / (250 * kStateBytes), 1e-6));
  EXPECT_THAT(p.compute - before.compute, DoubleNear(read_back / (4000 * kStateBytes), 1e-6));
  // Gradients that are read together are updated one after the other, and the disk waits for the last ones.
  EXPECT_THAT(p.disk_idle, DoubleNear(0, 0.003));
  shape.durable = false;
  const StepPrediction spilt = PredictStep(shape, StateLayout(), Chunks(100, 0));
  EXPECT_EQ(spilt.disk_read, p.disk_read);
  EXPECT_THAT(spilt.log_write, DoubleNear(0.5 * p.log_write, 1e-6));
  EXPECT_EQ(spilt.sync, 0);
}

TEST(StepPredictionTest, OnNvmeTheDiskMovesStateTwice) {
  const MachineProfile machine = Machine();
  const StepPrediction p = PredictStep(Shape(&machine), StateLayout(), Chunks(0, 100));
  EXPECT_THAT(p.disk_read, DoubleNear(0.4, 1e-6));
  EXPECT_THAT(p.disk_write, DoubleNear(0.2, 1e-6));
  EXPECT_THAT(p.disk, DoubleNear(1, 1e-6));  // reads and writes share it
  EXPECT_THAT(p.compute, DoubleNear(0.1 + 2 * 100 / 4000.0, 1e-6));
  EXPECT_THAT(p.disk_idle, DoubleNear(0.00012, 1e-6)) << "the last kernel ends beside earlier writes";
  // At first there are reads alone, at last writes alone, each faster than both together.
  EXPECT_THAT(p.total, DoubleNear(0.9906, 1e-4));
  EXPECT_THAT(p.Explain(), HasSubstr("bound by the disk, which alone takes 0.600 s (the step is 65 % above that)"));
}

TEST(StepPredictionTest, TheDiskIdlesBehindChunksInMemory) {
  const MachineProfile machine = Machine();
  // 100 ms of compute come first, of which reads of 4 chunks fill 16. Then kernels take 1.5 ms each.
  const StepPrediction p = PredictStep(Shape(&machine), StateLayout(), Chunks(100, 100));
  EXPECT_THAT(p.disk_idle, DoubleNear(0.1 - 0.016 + 0.0015, 1e-6));
  EXPECT_THAT(p.total, DoubleNear(1.07, 0.015));
  // Chunks in DRAM, spread between chunks on NVMe, cost the disk nothing.
  std::vector<PlacedChunk> spread = Chunks(100, 100);
  for (size_t i = 0; i < spread.size(); ++i) spread[i].placement.state = i % 2 == 0 ? TierKind::kNvme : TierKind::kDram;
  EXPECT_THAT(PredictStep(Shape(&machine), StateLayout(), spread).total, DoubleNear(0.99, 0.005));
}

// Kernels at half their speed beside the disk, and the disk at four fifths beside kernels. Of 100 chunks in turn with
// as many in DRAM, kernels take 0.25 s alone.
TEST(StepPredictionTest, BothAtOnceAreSlower) {
  MachineProfile machine = Machine();
  std::vector<PlacedChunk> spread = Chunks(100, 100);
  for (size_t i = 0; i < spread.size(); ++i) spread[i].placement.state = i % 2 == 0 ? TierKind::kNvme : TierKind::kDram;
  const StepPrediction apart = PredictStep(Shape(&machine), StateLayout(), spread);
  machine.update_f32_beside_disk_elements_per_s = machine.update_f32_elements_per_s.all_threads / 2;
  machine.disk_mixed_beside_update_bytes_per_s = machine.disk_mixed_bytes_per_s * 4 / 5;
  const StepPrediction both = PredictStep(Shape(&machine), StateLayout(), spread);
  EXPECT_EQ(both.compute, apart.compute);
  EXPECT_EQ(both.disk, apart.disk);
  EXPECT_THAT(both.total, DoubleNear(apart.total + 2 * 0.25 / 5, 0.01));
  EXPECT_THAT(PredictStep(Shape(&machine), StateLayout(), Chunks(100, 0)).total, DoubleNear(0.1, 1e-6));
}

TEST(StepPredictionTest, DurabilityWritesTheLogFlushesAndSyncs) {
  const MachineProfile machine = Machine();
  StepShape shape = Shape(&machine);
  shape.durable = true;
  shape.flushed_share = 0.25;
  const StepPrediction p = PredictStep(shape, StateLayout(), Chunks(100, 0));
  EXPECT_THAT(p.log_write, DoubleNear(2.0 * kElements * 100 / (500 * kStateBytes), 1e-6));
  EXPECT_THAT(p.disk_write, DoubleNear(25 / 500.0, 1e-6));
  EXPECT_THAT(p.disk, DoubleNear(p.log_write + p.disk_write, 1e-6));  // nothing is read
  EXPECT_THAT(p.sync, DoubleNear(3e-4, 1e-9));
  // The last chunk's flush follows its update.
  EXPECT_THAT(p.total, DoubleNear(p.compute + p.sync + 0.25 / 500, 1e-6));
}

TEST(StepPredictionTest, AnotherOptimizerMovesItsBytesAtTheSameRate) {
  const MachineProfile machine = Machine();
  const auto compute = [&](const kernels::OptimizerSpec& spec) {
    return PredictStep(Shape(&machine), StateLayout(spec), Chunks(100, 0)).compute;
  };
  EXPECT_THAT(compute({.moments = kernels::MomentFormat::kF8}), DoubleNear(100 / 800.0, 1e-6));
  // One moment instead of two: 20 bytes instead of 28.
  EXPECT_THAT(compute({.kind = kernels::OptimizerKind::kLion}), DoubleNear(0.1 * 20 / 28, 1e-6));
}

TEST(StepPredictionTest, WhatIsNotMeasuredIsSaid) {
  const MachineProfile nothing{.threads = 4};
  std::vector<PlacedChunk> chunks = Chunks(1, 0);
  chunks.push_back({kElements, {.state = TierKind::kHbm, .working = TierKind::kDram}});
  const StepPrediction p = PredictStep(Shape(&nothing), StateLayout(), chunks);
  EXPECT_EQ(p.total, 0);
  EXPECT_THAT(p.unmeasured, ElementsAre("the optimizer", "the GPU's link", "the optimizer on the GPU"));
  EXPECT_THAT(p.Explain(), HasSubstr("Not counted, since the profile has no figure: the optimizer, "));
}

TEST(StepPredictionTest, APlanPredictsForAllOfTheJob) {
  const MachineProfile machine = Machine();
  PlanRequest request{.free = {.dram = uint64_t{1} << 40}, .elements = {kElements, kElements}};
  EXPECT_FALSE(MakePlan(request)->prediction.has_value());
  request.shape = Shape(&machine);
  request.placed = Chunks(2, 0);
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_TRUE(plan->prediction.has_value());
  EXPECT_THAT(plan->prediction->total, DoubleNear(0.004, 1e-6));
  EXPECT_THAT(plan->Explain(), HasSubstr("A step should take 0.004 s"));
}

}  // namespace
}  // namespace ballast::storage
