// Seals of a step: all ranks seal the same plan, or the epoch is over.
#include "ballast/services/step/seal_ledger.h"

#include <optional>
#include <string>
#include <vector>

#include "ballast/proto/model/step_header.h"
#include "ballast/tests/step/step_fixture.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using absl::StatusCode;

// Over the plan of a machine's epoch, with three ranks.
class SealLedgerTest : public StepMachineTest {
 protected:
  void SetUp() override {
    Start(1, /*world_size=*/3);
    seals_.Open(machine_->plan());
  }
  // Only rank 0 brings blobs, as clients do.
  v1::SealRequest Seal(uint32_t rank, uint64_t attempt = 0) const {
    v1::SealRequest seal = MakeSeal(rank, 0, attempt, Values());
    if (rank != 0) seal.clear_blobs();
    return seal;
  }

  SealLedger seals_;
};

TEST_F(SealLedgerTest, CountsEachRankOnce) {
  EXPECT_FALSE(seals_.any());
  EXPECT_EQ(seals_.UnsealedRanks(16), (std::vector<uint32_t>{0, 1, 2}));
  ASSERT_EQ(seals_.Seal(Seal(1)), absl::OkStatus());
  ASSERT_EQ(seals_.Seal(Seal(1)), absl::OkStatus()) << "a repeated call";
  EXPECT_EQ(seals_.unsealed_count(), 2);
  EXPECT_EQ(seals_.sealed_attempt(1), std::optional<uint64_t>(0));
  EXPECT_EQ(seals_.sealed_attempt(0), std::nullopt);
  EXPECT_EQ(seals_.UnsealedRanks(16), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(seals_.UnsealedRanks(1), std::vector<uint32_t>{0});
  ASSERT_EQ(seals_.Seal(Seal(0)), absl::OkStatus());
  EXPECT_FALSE(seals_.complete());
  EXPECT_EQ(seals_.UnsealedRanks(16), std::vector<uint32_t>{2});
  ASSERT_EQ(seals_.Seal(Seal(2)), absl::OkStatus());
  EXPECT_TRUE(seals_.complete());
  EXPECT_TRUE(seals_.UnsealedRanks(16).empty());
}

TEST_F(SealLedgerTest, KnowsASealThatItHas) {
  EXPECT_FALSE(seals_.Filed(Seal(1)));
  ASSERT_EQ(seals_.Seal(Seal(1)), absl::OkStatus());
  EXPECT_TRUE(seals_.Filed(Seal(1)));
  EXPECT_FALSE(seals_.Filed(Seal(2)));
  EXPECT_FALSE(seals_.Filed(Seal(1, /*attempt=*/1)));
  v1::SealRequest other = Seal(1);
  other.set_plan_hash("another plan");
  EXPECT_FALSE(seals_.Filed(other));
}

TEST_F(SealLedgerTest, TheBlobsComeWithRankZeroWheneverItComes) {
  ASSERT_EQ(seals_.Seal(Seal(2)), absl::OkStatus());
  EXPECT_TRUE(seals_.sealed().blobs().empty());
  v1::SealRequest without = Seal(0);
  without.clear_blobs();
  EXPECT_THAT(seals_.Seal(without), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "came without blobs"));
  EXPECT_EQ(seals_.agreement(), absl::OkStatus()) << "a bad request is no disagreement";
  ASSERT_EQ(seals_.Seal(Seal(0)), absl::OkStatus());
  ASSERT_EQ(seals_.sealed().blobs_size(), 3);
  EXPECT_EQ(seals_.sealed().blobs(1), "blob of rank 1");
  ASSERT_EQ(seals_.Seal(Seal(1)), absl::OkStatus());
  EXPECT_EQ(seals_.sealed().rank(), 0);
}

TEST_F(SealLedgerTest, BlobsThatTheHashDoesNotCoverAreRefused) {
  v1::SealRequest seal = Seal(0);
  seal.set_blobs(2, "another blob");
  EXPECT_THAT(seals_.Seal(seal), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "but its header and blobs"));
  EXPECT_FALSE(seals_.any());
  // Also where the first seal, without blobs, had that hash.
  ASSERT_EQ(seals_.Seal(Seal(1)), absl::OkStatus());
  EXPECT_THAT(seals_.Seal(seal), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "but its header and blobs"));
  EXPECT_EQ(seals_.unsealed_count(), 2);
  EXPECT_EQ(seals_.Seal(Seal(0)), absl::OkStatus());
}

TEST_F(SealLedgerTest, AHeaderThatDoesNotFitTheJobIsRefused) {
  v1::StepHeader header = Update();
  header.add_groups();
  EXPECT_EQ(seals_.Seal(MakeSeal(0, 0, 0, header)).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(seals_.any());
}

TEST_F(SealLedgerTest, AnotherPlanEndsTheEpochForEverybody) {
  ASSERT_EQ(seals_.Seal(Seal(0)), absl::OkStatus());
  v1::StepHeader header = Values();
  header.set_gradient_scale(2);
  v1::SealRequest other = MakeSeal(1, 0, 0, header);
  other.clear_blobs();
  const absl::Status mismatch = seals_.Seal(other);
  EXPECT_THAT(mismatch, Fails(StatusCode::kFailedPrecondition, model::kPlanMismatch, "this epoch is over"));
  EXPECT_EQ(seals_.agreement(), mismatch);
  EXPECT_EQ(seals_.Seal(Seal(2)), mismatch);
  EXPECT_EQ(seals_.sealed_attempt(1), std::nullopt);
  seals_.NextStep();
  EXPECT_EQ(seals_.agreement(), mismatch) << "a step does not mend an epoch";
  seals_.Open(machine_->plan());
  EXPECT_EQ(seals_.Seal(Seal(2)), absl::OkStatus());
}

TEST_F(SealLedgerTest, AnotherAttemptIsAnotherPlan) {
  ASSERT_EQ(seals_.Seal(Seal(0)), absl::OkStatus());
  EXPECT_THAT(seals_.Seal(Seal(1, /*attempt=*/1)),
              Fails(StatusCode::kFailedPrecondition, model::kPlanMismatch, "attempt 1"));
}

TEST_F(SealLedgerTest, TheNextStepHasNoSeal) {
  for (const uint32_t rank : {0, 1, 2}) ASSERT_EQ(seals_.Seal(Seal(rank)), absl::OkStatus());
  EXPECT_TRUE(seals_.UnsealedRanks(16).empty());
  seals_.NextStep();
  EXPECT_FALSE(seals_.any());
  EXPECT_EQ(seals_.UnsealedRanks(16), (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(seals_.sealed_attempt(0), std::nullopt);
}

}  // namespace
}  // namespace ballast::services
