// Versions on the disk: whole in the catalog, or not there.
#include "ballast/services/job/kept_versions.h"

#include <memory>
#include <string>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class KeptVersionsTest : public JobPartTest {
 protected:
  KeptVersionsTest() {
    spec_.set_durability(v1::DURABILITY_EVERY_K);
    spec_.set_pin_interval(1000);
    durable_ = true;
    on_pin_due_ = [this] {
      core_.mu.AssertHeld();
      kept_.PinDue();
    };
    on_pin_changed_ = [this](const v1::PinnedVersion& pin) {
      core_.mu.AssertHeld();
      kept_.PinChanged(pin);
    };
  }
  v1::PinRequest RequestOf(int64_t version) const {
    v1::PinRequest request;
    request.set_version(version);
    request.set_durable(true);
    request.mutable_epoch()->set_counter(epoch_);
    return request;
  }
  Answer<v1::PinResponse> Send(const v1::PinRequest& request) {
    Answer<v1::PinResponse> answer;
    kept_.Pin(request, absl::InfiniteFuture(), answer.reply());
    return answer;
  }
  absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request) {
    Answer<v1::PinResponse> answer = Send(request);
    RunAll();
    return answer.arrived() ? answer.Wait() : absl::StatusOr<v1::PinResponse>(absl::UnavailableError("it waits"));
  }
  absl::StatusOr<v1::UnpinResponse> Unpin(int64_t version) {
    v1::UnpinRequest request;
    request.set_version(version);
    request.set_durable(true);
    request.mutable_epoch()->set_counter(epoch_);
    Answer<v1::UnpinResponse> answer;
    kept_.Unpin(request, nullptr, answer.reply());
    RunAll();
    return answer.arrived() ? answer.Wait() : absl::StatusOr<v1::UnpinResponse>(absl::UnavailableError("it waits"));
  }
  // The versions that a restart would find.
  std::vector<int64_t> InCatalog() {
    std::vector<int64_t> versions;
    const auto entry = ReadJobEntry(catalog_, "job");
    EXPECT_TRUE(entry.ok()) << entry.status();
    for (const v1::PinnedVersion& pin : entry->pins) {
      versions.push_back(pin.version());
      EXPECT_EQ(PinnedChunks(pin).size(), chunks_.size());
    }
    return versions;
  }
  absl::Status Failure() {
    JobMutexLock lock(&core_.mu);
    return core_.failure();
  }
  uint64_t PinBytes() const { return tiers_->usage().parts[static_cast<size_t>(storage::TierPart::kPins)].nvme; }

  Flushes flushes_{&core_, &journal_};
  KeptCopies copies_{&core_, &journal_};
  KeptVersions kept_{&core_, &journal_, &flushes_, &copies_};
};

TEST_F(KeptVersionsTest, APinIsAnsweredOnceTheCatalogHasAllOfIt) {
  Open();
  StepOfValues(3);  // version 0, which the server pins by itself
  StepOfValues(4);
  ASSERT_THAT(InCatalog(), ElementsAre(0));
  Answer<v1::PinResponse> answer = Send(RequestOf(1));
  EXPECT_FALSE(answer.arrived());
  EXPECT_THAT(InCatalog(), ElementsAre(0));
  RunAll();
  const auto pinned = answer.Wait();
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  EXPECT_EQ(pinned->blobs_size(), 1);
  EXPECT_EQ(pinned->registration_count(), 1);
  EXPECT_THAT(InCatalog(), ElementsAre(0, 1));
  EXPECT_TRUE(Pin(RequestOf(1)).ok()) << "asked for twice";
}

TEST_F(KeptVersionsTest, AnUnpinnedVersionLeavesCatalogAndDisk) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  const uint64_t before = PinBytes();
  ASSERT_TRUE(Pin(RequestOf(1)).ok());
  EXPECT_GT(PinBytes(), before);
  StepOfValues(5);
  const auto unpinned = Unpin(1);
  ASSERT_TRUE(unpinned.ok()) << unpinned.status();
  EXPECT_FALSE(unpinned->stays_automatic());
  EXPECT_THAT(InCatalog(), ElementsAre(0));
  EXPECT_EQ(PinBytes(), before);
  EXPECT_TRUE(Unpin(1).ok()) << "it is gone already";
}

TEST_F(KeptVersionsTest, TheServersOwnPinStaysThoughNobodyAsksForIt) {
  Open();
  StepOfValues(3);
  ASSERT_TRUE(Pin(RequestOf(0)).ok());
  const auto unpinned = Unpin(0);
  ASSERT_TRUE(unpinned.ok()) << unpinned.status();
  EXPECT_TRUE(unpinned->stays_automatic());
  EXPECT_THAT(InCatalog(), ElementsAre(0));
}

TEST_F(KeptVersionsTest, APinIsOfTheEpochThatAsks) {
  Open();
  StepOfValues(3);
  v1::PinRequest request = RequestOf(0);
  request.clear_epoch();
  EXPECT_EQ(model::ReasonOf(Pin(request).status()), model::kBadRequest);
  request = RequestOf(0);
  Open();
  EXPECT_EQ(model::ReasonOf(Pin(request).status()), model::kStaleEpoch);
}

TEST_F(KeptVersionsTest, APinThatAFenceOvertakesIsGivenUp) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  const uint64_t before = PinBytes();
  Answer<v1::PinResponse> answer = Send(RequestOf(1));
  Locked([&] {  // before the worker gets to it
    v1::FenceRequest fence;
    fence.set_job("job");
    fence.mutable_epoch()->set_counter(++epoch_);
    fence.set_protocol_version(model::kProtocolVersion);
    ASSERT_TRUE(core_.machine->Fence(fence).ok());
  });
  RunAll();
  EXPECT_EQ(model::ReasonOf(answer.Wait().status()), model::kStaleEpoch);
  EXPECT_THAT(InCatalog(), ElementsAre(0));
  EXPECT_EQ(PinBytes(), before);
  EXPECT_EQ(Failure(), absl::OkStatus());
}

TEST_F(KeptVersionsTest, OnlyTheNewestVersionIsPinned) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  StepOfValues(5);
  EXPECT_EQ(model::ReasonOf(Pin(RequestOf(1)).status()), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(Pin(RequestOf(3)).status()), model::kBehind);
  v1::PinRequest tell = RequestOf(2);
  tell.set_only_tell(true);
  EXPECT_EQ(model::ReasonOf(Pin(tell).status()), model::kVersionGone) << "a question pins nothing";
  EXPECT_THAT(InCatalog(), ElementsAre(0));
}

TEST_F(KeptVersionsTest, APinThatDoesNotFitLeavesTheJobAsItWas) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  const storage::NvmeRoom all =
      *tiers_->nvme()->Promise(tiers_->budget().nvme - tiers_->used().nvme, "all that is left");
  const absl::Status refused = Pin(RequestOf(1)).status();
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("version 1 of job 'job' cannot be pinned on server 's'"));
  EXPECT_EQ(Failure(), absl::OkStatus());
  StepOfValues(5);
  EXPECT_THAT(InCatalog(), ElementsAre(0));
}

TEST_F(KeptVersionsTest, ACatalogThatFailsStopsTheJob) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  catalog_.fails = absl::InternalError("the catalog's disk is full");
  const absl::Status failed = Pin(RequestOf(1)).status();
  EXPECT_THAT(failed.ToString(), HasSubstr("the catalog's disk is full"));
  EXPECT_THAT(Failure().ToString(), HasSubstr("takes no more writes"));
}

TEST_F(KeptVersionsTest, AJobThatKeepsNothingOnTheDiskPinsNothingThere) {
  spec_ = MakeSpec("job", SmallModel());
  durable_ = false;
  on_pin_due_ = nullptr;
  Open();
  StepOfValues(3);
  const absl::Status refused = Pin(RequestOf(0)).status();
  EXPECT_EQ(model::ReasonOf(refused), model::kUnsupported) << refused;
}

TEST_F(KeptVersionsTest, SixteenVersionsAreKeptForRequests) {
  Open();
  for (int64_t version = 0; version < 16; ++version) {
    StepOfValues(1);
    ASSERT_TRUE(Pin(RequestOf(version)).ok()) << version;
  }
  StepOfValues(1);
  const absl::Status full = Pin(RequestOf(16)).status();
  EXPECT_EQ(model::ReasonOf(full), model::kBudget) << full;
  ASSERT_TRUE(Unpin(5).ok());
  EXPECT_TRUE(Pin(RequestOf(16)).ok());
}

}  // namespace
}  // namespace ballast::services
