// A kept version is read as a whole before its restore: once for an epoch, and refused where it is damaged.
#include "ballast/services/job/restore_checks.h"

#include <optional>
#include <string>

#include "ballast/proto/base/status.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

class RestoreChecksTest : public JobPartTest {
 protected:
  RestoreChecksTest() {
    spec_.set_durability(v1::DURABILITY_EVERY_K);
    spec_.set_pin_interval(1000);
    durable_ = true;
    on_pin_due_ = [this] {
      core_.mu.AssertHeld();
      kept_.PinDue();
    };
  }
  // Tasks of the job's threads may be due.
  ~RestoreChecksTest() override { core_.JoinThreads(); }
  // Version 0 is the server's own pin.
  void OpenAndKeep() {
    Open();
    StepOfValues(3);
    StepOfValues(4);
  }
  v1::SealRequest RestoreOf(int64_t version) const {
    v1::SealRequest seal;
    seal.set_job("job");
    seal.mutable_epoch()->set_counter(epoch_);
    seal.set_step(step_);
    seal.mutable_header()->set_kind(v1::STEP_KIND_RESTORE);
    seal.mutable_header()->set_restored_version(version);
    return seal;
  }
  absl::StatusOr<bool> Checked(const v1::SealRequest& seal) {
    JobMutexLock lock(&core_.mu);
    return checks_.Checked(seal);
  }
  bool FoundUnreadable(int64_t version) {
    JobMutexLock lock(&core_.mu);
    return checks_.FoundUnreadable(version);
  }
  uint64_t Reads() const { return disk_.operations(storage::SimOperation::kRead); }

  Flushes flushes_{&core_, &journal_};
  KeptCopies copies_{&core_, &journal_};
  KeptVersions kept_{&core_, &journal_, &flushes_, &copies_};
  RestoreChecks checks_{&core_, &copies_};
};

TEST_F(RestoreChecksTest, AVersionIsReadOnceForAnEpoch) {
  OpenAndKeep();
  const uint64_t before = Reads();
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(false));
  EXPECT_EQ(Reads(), before) << "the worker reads";
  RunAll();
  EXPECT_GT(Reads(), before);
  const uint64_t after = Reads();
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(true));
  RunAll();
  EXPECT_EQ(Reads(), after);

  Open();
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(false)) << "another group";
  RunAll();
  EXPECT_GT(Reads(), after);
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(true));
}

TEST_F(RestoreChecksTest, WhatTheMachineRefusesNeedsNoReading) {
  OpenAndKeep();
  EXPECT_EQ(Checked(RestoreOf(1)), absl::StatusOr<bool>(true)) << "nothing keeps it";
  v1::SealRequest stale = RestoreOf(0);
  stale.mutable_epoch()->set_counter(epoch_ - 1);
  EXPECT_EQ(Checked(stale), absl::StatusOr<bool>(true));
  v1::SealRequest later = RestoreOf(0);
  later.set_step(step_ + 1);
  EXPECT_EQ(Checked(later), absl::StatusOr<bool>(true));
}

TEST_F(RestoreChecksTest, ADamagedVersionIsRefused) {
  OpenAndKeep();
  const auto entry = ReadJobEntry(catalog_, "job");
  ASSERT_TRUE(entry.ok()) << entry.status();
  const storage::DurableChunk kept = PinnedChunks(entry->pins.front()).front();
  disk_.Corrupt(tiers_->nvme()->file().path(), kept.offset, kept.bytes);
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(false));
  EXPECT_FALSE(FoundUnreadable(0));
  RunAll();
  EXPECT_TRUE(FoundUnreadable(0));
  const absl::Status refused = Checked(RestoreOf(0)).status();
  EXPECT_EQ(model::ReasonOf(refused), model::kChecksum) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("server 's' cannot restore version 0 of job 'job'"));
}

TEST_F(RestoreChecksTest, AVersionThatWasForgottenIsReadAgain) {
  OpenAndKeep();
  (void)Checked(RestoreOf(0));
  RunAll();
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(true));
  Locked([&] { checks_.Forget(0); });
  EXPECT_EQ(Checked(RestoreOf(0)), absl::StatusOr<bool>(false));
}

}  // namespace
}  // namespace ballast::services
