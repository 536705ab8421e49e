// A disk that hangs under a job's update: the job's own calls, and drops.
#include <memory>

#include "ballast/proto/base/status.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/hung_disk.h"

namespace ballast::services {
namespace {

class HungUpdateTest : public HungDiskTest, public ::testing::WithParamInterface<v1::Durability> {
 protected:
  HungUpdateTest() : first_({server_.get()}, Spec("job", GetParam()), 1) {}

  // Step 1 is decided, and its update waits for the disk.
  void Hang() {
    ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
    ASSERT_EQ(first_.Start(), absl::OkStatus());
    ASSERT_EQ(first_.Initialise(Ones), absl::OkStatus());
    ASSERT_GT(NvmeStateBytes(server_.get(), "job"), 0u);
    ASSERT_EQ(first_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones), absl::OkStatus());
    HoldTier(GatedOperation::kWrite);
    ASSERT_TRUE(first_.Finish(UpdateHeader(Tensors())).ok());
    disk_.AwaitWaiting();
  }

  TrainerGroup first_;
};

INSTANTIATE_TEST_SUITE_P(Durabilities, HungUpdateTest, ::testing::Values(v1::DURABILITY_NONE, v1::DURABILITY_STEP),
                         [](const auto& info) { return v1::Durability_Name(info.param); });

TEST_P(HungUpdateTest, AFenceAndAnOpenDoNotWait) {
  ASSERT_NO_FATAL_FAILURE(Hang());
  ASSERT_EQ(Fence(server_.get(), "job", 2), absl::OkStatus());
  TrainerGroup second({server_.get()}, Spec("job", GetParam()), 1, 2);
  EXPECT_EQ(second.Start(), absl::OkStatus());
  EXPECT_EQ(second.step(), 2);
  disk_.Release();
  EXPECT_EQ(second.Read(0, v1::CONTENT_WORKING, 1).status(), absl::OkStatus());
  EXPECT_EQ(Step(second), absl::OkStatus());
}

TEST_P(HungUpdateTest, APinThatWaitsIsRefusedWhenItIsUnpinned) {
  ASSERT_NO_FATAL_FAILURE(Hang());
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_version(1);
  Answer<v1::PinResponse> pins[2];
  for (auto& answer : pins) server_->Pin(pin, absl::InfiniteFuture(), answer.reply());
  EXPECT_FALSE(pins[0].arrived());
  v1::UnpinRequest unpin;
  unpin.set_job("job");
  unpin.set_version(1);
  Answer<v1::UnpinResponse> unpinned;
  server_->Unpin(unpin, unpinned.reply());
  ASSERT_EQ(unpinned.Wait().status(), absl::OkStatus());
  for (auto& answer : pins) {
    const absl::Status status = answer.Wait().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("version 1 was unpinned meanwhile"));
  }
  Answer<v1::PinResponse> again;
  server_->Pin(pin, absl::InfiniteFuture(), again.reply());
  disk_.Release();
  EXPECT_EQ(again.Wait().status(), absl::OkStatus()) << "another request pins it";
}

TEST_P(HungUpdateTest, ADropThatWaitsHoldsUpNoOtherCall) {
  TrainerGroup other({server_.get()}, MakeSpec("other", {{"small", "u", 256, 0}}), 1);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(Hang());
  const auto caller = std::make_shared<Caller>();
  Answer<v1::DropJobResponse> waits, dropped, again;
  server_->DropJob(DropOf(first_), waits.reply(), {absl::InfiniteFuture(), caller});
  server_->DropJob(DropOf(other), dropped.reply());
  EXPECT_EQ(dropped.Wait().status(), absl::OkStatus());
  EXPECT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  EXPECT_FALSE(waits.arrived());
  EXPECT_EQ(server_->counters().waiting_requests, 1u);
  caller->Leave();
  EXPECT_EQ(waits.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(server_->counters().waiting_requests, 0u);
  server_->DropJob(DropOf(first_), again.reply());
  EXPECT_EQ(model::ReasonOf(again.Wait().status()), model::kBusy) << "the drop goes on";
  disk_.Release();
  absl::Status fenced;
  do {
    absl::SleepFor(absl::Milliseconds(1));
    fenced = Fence(server_.get(), "job", 1);
  } while (model::ReasonOf(fenced) == model::kBusy);
  EXPECT_EQ(fenced, absl::OkStatus()) << "the name is free";
}

}  // namespace
}  // namespace ballast::services
