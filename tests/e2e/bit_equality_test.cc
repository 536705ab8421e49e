// The master weights after a few steps must equal the weights of a single process without servers, bit for bit,
// whatever the number of servers and trainers, the tiers and the transport, and also if the world size changes in
// mid-run.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "ballast/proto/model/optimizer.h"
#include "ballast/tests/e2e/job_fixture.h"

namespace ballast {
namespace {

constexpr int64_t kSteps = 4;

const client::Corpus& Text() {
  static const client::Corpus* corpus = new client::Corpus(*client::Corpus::Load({LICENSE_FILE}));
  return *corpus;
}

uint32_t ReferenceDigest() {
  static const uint32_t digest = *TrainLocally(Text(), 2, kSteps);
  return digest;
}

std::string PlacementName(Placement placement) {
  return placement == Placement::kDram ? "Dram" : placement == Placement::kNvme ? "Nvme" : "Mixed";
}

class BitEqualityTest : public ::testing::TestWithParam<std::tuple<int, int, Placement, Wire>> {};

TEST_P(BitEqualityTest, EqualsTheRunWithoutServers) {
  const auto [servers, world_size, placement, wire] = GetParam();
  const auto cluster = Cluster::Start(servers, placement, wire);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto digest = TrainOnServers(**cluster, Text(), world_size, kSteps, client::Resume::kNever);
  ASSERT_TRUE(digest.ok()) << digest.status();
  EXPECT_EQ(*digest, ReferenceDigest());
  // The tiers are those that were asked for.
  const storage::TierBytes state = (*cluster)->StateBytes();
  EXPECT_EQ(state.dram > 0, placement != Placement::kNvme) << state.dram;
  EXPECT_EQ(state.nvme > 0, placement != Placement::kDram) << state.nvme;
  EXPECT_EQ((*cluster)->SharedBytes() > 0, wire == Wire::kShared);
}

std::string NameOf(const ::testing::TestParamInfo<BitEqualityTest::ParamType>& info) {
  const auto [servers, world_size, placement, wire] = info.param;
  const char* const wire_name = wire == Wire::kGrpc ? "Grpc" : wire == Wire::kShared ? "Shared" : "Embedded";
  return "S" + std::to_string(servers) + "W" + std::to_string(world_size) + PlacementName(placement) + wire_name;
}

INSTANTIATE_TEST_SUITE_P(Matrix, BitEqualityTest,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(1, 2, 4),
                                            ::testing::Values(Placement::kDram, Placement::kNvme, Placement::kMixed),
                                            ::testing::Values(Wire::kGrpc, Wire::kEmbedded)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Shared, BitEqualityTest,
                         ::testing::Combine(::testing::Values(2), ::testing::Values(1, 4),
                                            ::testing::Values(Placement::kMixed), ::testing::Values(Wire::kShared)),
                         NameOf);

// Optimizers and formats besides the default, on two servers and two ranks, with state in DRAM and on NVMe.
TEST(OptimizerTest, EveryOptimizerAndFormatEqualsTheRunWithoutServers) {
  using kernels::Dtype;
  using kernels::MomentFormat;
  using kernels::OptimizerKind;
  const kernels::OptimizerSpec specs[] = {
      {.moments = MomentFormat::kBf16},
      {.moments = MomentFormat::kI8},
      {.moments = MomentFormat::kF8},
      {.amsgrad = true, .moments = MomentFormat::kI8},
      {.kind = OptimizerKind::kAdam, .amsgrad = true},
      {.kind = OptimizerKind::kAdam, .moments = MomentFormat::kF8},
      {.kind = OptimizerKind::kSgd},
      {.kind = OptimizerKind::kSgd, .momentum = true, .moments = MomentFormat::kBf16},
      {.kind = OptimizerKind::kSgd, .momentum = true, .nesterov = true},
      {.kind = OptimizerKind::kAdagrad},
      {.kind = OptimizerKind::kAdagrad, .moments = MomentFormat::kI8},
      {.kind = OptimizerKind::kLion},
      {.kind = OptimizerKind::kLion, .moments = MomentFormat::kF8},
      {.kind = OptimizerKind::kAdemamix},
      {.kind = OptimizerKind::kAdemamix, .moments = MomentFormat::kBf16},
      {.kind = OptimizerKind::kAdamwScheduleFree},
      {.gradient = Dtype::kF32, .working = Dtype::kF32},
      {.gradient = Dtype::kF16, .working = Dtype::kF16},
      {.moments = MomentFormat::kI8, .gradient = Dtype::kF32, .working = Dtype::kBf16},
      {.working = Dtype::kE4m3Blocks},
  };
  std::set<uint32_t> digests = {ReferenceDigest()};
  for (const kernels::OptimizerSpec& spec : specs) {
    SCOPED_TRACE(model::Show(spec));
    const auto reference = TrainLocally(Text(), 2, kSteps, spec);
    ASSERT_TRUE(reference.ok()) << reference.status();
    const auto cluster = Cluster::Start(2, Placement::kMixed, Wire::kEmbedded, spec);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    const auto digest = TrainOnServers(**cluster, Text(), 2, kSteps, client::Resume::kNever, spec);
    ASSERT_TRUE(digest.ok()) << digest.status();
    EXPECT_EQ(*digest, *reference);
    // Each is another computation.
    EXPECT_TRUE(digests.insert(*digest).second);
    const storage::TierBytes state = (*cluster)->StateBytes();
    EXPECT_GT(state.dram, 0);
    EXPECT_GT(state.nvme, 0);
  }
}

TEST(WorldSizeChangeTest, EqualsTheRunWithoutServers) {
  for (const Wire wire : {Wire::kGrpc, Wire::kShared, Wire::kEmbedded}) {
    const auto cluster = Cluster::Start(2, Placement::kMixed, wire);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    ASSERT_TRUE(TrainOnServers(**cluster, Text(), 2, 1, client::Resume::kNever).ok());
    ASSERT_TRUE(TrainOnServers(**cluster, Text(), 4, 2, client::Resume::kMust).ok());
    ASSERT_TRUE(TrainOnServers(**cluster, Text(), 1, 3, client::Resume::kAuto).ok());
    const auto digest = TrainOnServers(**cluster, Text(), 3, kSteps, client::Resume::kAuto);
    ASSERT_TRUE(digest.ok()) << digest.status();
    EXPECT_EQ(*digest, ReferenceDigest());
  }
}

TEST(ReferenceTest, ThreadsDoNotMoveABitAndStepsDo) {
  EXPECT_EQ(*TrainLocally(Text(), 1, kSteps), ReferenceDigest());
  EXPECT_EQ(*TrainLocally(Text(), 4, kSteps), ReferenceDigest());
  EXPECT_NE(*TrainLocally(Text(), 1, kSteps - 1), ReferenceDigest());
}

}  // namespace
}  // namespace ballast
