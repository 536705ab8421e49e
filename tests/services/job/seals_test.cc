// Seals of a step's ranks: held until the step is prepared, or answered with what is missing.
#include "ballast/services/job/seals.h"

#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/job/updates.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/services/space/prediction.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kPatientMs = 50'000;

class SealsTest : public JobPartTest {
 protected:
  ~SealsTest() override {
    EndTimers();
    core_.JoinThreads();
  }
  Answer<v1::SealResponse> Begin(v1::SealRequest seal, uint32_t wait_ms) {
    seal.set_wait_ms(wait_ms);
    Answer<v1::SealResponse> answer;
    seals_.Seal(seal, absl::InfiniteFuture(), answer.reply());
    RunAll();
    return answer;
  }
  void PushAll(float value) {
    for (uint32_t i = 0; i < plan().slices().size(); ++i) {
      ASSERT_EQ(PushSlice(i, v1::SLICE_KIND_VALUE, value), absl::OkStatus());
    }
  }

  Flushes flushes_{&core_, &journal_};
  ReadPins pins_{&core_};
  Prediction prediction_{&core_};
  ChunkMoves moves_{&core_, &flushes_, &prediction_};
  KeptCopies kept_copies_{&core_, &journal_};
  KeptVersions kept_{&core_, &journal_, &flushes_, &kept_copies_};
  Filling filling_{&core_, &kept_copies_, &kept_};
  DamagedChunks damaged_{&core_, &filling_, &kept_copies_};
  Updates updates_{&core_, &journal_, &room_, &flushes_, &pins_, &moves_, &damaged_};
  Seals seals_{&core_, &journal_, &kept_, &filling_, &updates_};
};

TEST_F(SealsTest, ASealIsHeldUntilTheStepIsPrepared) {
  Open();
  Answer<v1::SealResponse> held = Begin(SealOf(ValuesHeader(tensors())), kPatientMs);
  EXPECT_FALSE(held.arrived());
  PushAll(3);
  RunAll();
  ASSERT_TRUE(held.arrived());
  ASSERT_TRUE(held.Wait().ok()) << held.Wait().status();
  EXPECT_TRUE(held.Wait()->has_prepared());
}

TEST_F(SealsTest, WithoutPatienceTheAnswerSaysWhatIsMissing) {
  Open();
  ASSERT_EQ(PushSlice(0, v1::SLICE_KIND_VALUE, 3), absl::OkStatus());
  Answer<v1::SealResponse> answer = Begin(SealOf(ValuesHeader(tensors())), 0);
  ASSERT_TRUE(answer.arrived());
  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  ASSERT_TRUE(answer.Wait()->has_pending());
  EXPECT_EQ(answer.Wait()->pending().missing_count(), plan().slices().size() - 1);
}

TEST_F(SealsTest, ASealOfAnEarlierEpochIsRefusedAndHoldsNothingUp) {
  Open();
  v1::SealRequest stale = SealOf(ValuesHeader(tensors()));
  Open();
  Answer<v1::SealResponse> held = Begin(SealOf(ValuesHeader(tensors())), kPatientMs);
  Answer<v1::SealResponse> refused = Begin(stale, kPatientMs);
  ASSERT_TRUE(refused.arrived());
  EXPECT_EQ(model::ReasonOf(refused.Wait().status()), model::kStaleEpoch);
  EXPECT_FALSE(held.arrived());
  PushAll(3);
  RunAll();
  EXPECT_TRUE(held.arrived() && held.Wait().ok());
}

TEST_F(SealsTest, ARestoreWaitsUntilItsVersionWasRead) {
  spec_.set_durability(v1::DURABILITY_EVERY_K);
  spec_.set_pin_interval(1000);
  durable_ = true;
  on_pin_due_ = [this] {
    core_.mu.AssertHeld();
    kept_.PinDue();
  };
  Open();
  StepOfValues(3);
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_RESTORE);
  header.set_restored_version(0);
  v1::SealRequest seal = SealOf(header);
  seal.set_wait_ms(0);
  Answer<v1::SealResponse> early;
  seals_.Seal(seal, absl::InfiniteFuture(), early.reply());
  const absl::Status busy = early.Wait().status();
  EXPECT_EQ(model::ReasonOf(busy), model::kBusy);
  EXPECT_THAT(busy.ToString(), HasSubstr("the pinned version is being read"));
  RunAll();
  Answer<v1::SealResponse> again = Begin(seal, 0);
  ASSERT_TRUE(again.arrived());
  EXPECT_NE(model::ReasonOf(again.Wait().status()), model::kBusy);
}

}  // namespace
}  // namespace ballast::services
