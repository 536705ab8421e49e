// A reader's hold on a version, its pulls of whole tensors, and the session's view of its job.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/reading/hold.h"
#include "ballast/client/reading/job_view.h"
#include "ballast/client/reading/pulls.h"
#include "ballast/client/transactions/open_job.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/fake_server.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

class HoldTest : public ::testing::Test {
 protected:
  HoldTest() {
    for (FakeServer* server : servers_.servers) {
      server->on_pin = [this](const v1::PinRequest& request) -> absl::StatusOr<v1::PinResponse> {
        pins_.push_back(request);
        if (pins_.size() == fails_at_)
          return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone, "past");
        v1::PinResponse response;
        response.add_tensor_steps(5);
        return response;
      };
      server->on_unpin = [this](const v1::UnpinRequest& request) {
        unpins_.push_back(request);
        return v1::UnpinResponse();
      };
    }
  }

  FakeServers servers_{2};
  std::vector<v1::PinRequest> pins_;
  std::vector<v1::UnpinRequest> unpins_;
  size_t fails_at_ = 0;  // the pin that fails, counted from 1
};

TEST_F(HoldTest, AllServersHoldTheVersionForOneHolder) {
  {
    Hold hold(servers_.router.get(), "job", absl::Seconds(90));
    EXPECT_EQ(hold.version(), -1);
    const auto pinned = hold.Take(8, absl::InfiniteFuture());
    ASSERT_TRUE(pinned.ok()) << pinned.status();
    EXPECT_EQ(pinned->tensor_steps(0), 5);
    EXPECT_EQ(hold.version(), 8);
    ASSERT_EQ(pins_.size(), 2);
    for (const v1::PinRequest& pin : pins_) {
      EXPECT_EQ(pin.version(), 8);
      EXPECT_FALSE(pin.durable());
      EXPECT_EQ(pin.lease_ms(), 90'000);
      EXPECT_NE(pin.holder(), 0) << "the group's";
      EXPECT_EQ(pin.holder(), pins_[0].holder());
    }
    EXPECT_EQ(hold.RenewIfDue(), absl::OkStatus());
    EXPECT_EQ(pins_.size(), 2) << "none is due";
  }
  ASSERT_EQ(unpins_.size(), 2);
  for (const v1::UnpinRequest& unpin : unpins_) {
    EXPECT_EQ(unpin.version(), 8);
    EXPECT_EQ(unpin.holder(), pins_[0].holder());
  }
}

TEST_F(HoldTest, AVersionThatOneServerLacksIsHeldByNone) {
  fails_at_ = 2;
  Hold hold(servers_.router.get(), "job", absl::Seconds(90));
  EXPECT_EQ(model::ReasonOf(hold.Take(8, absl::InfiniteFuture()).status()), model::kVersionGone);
  EXPECT_EQ(hold.version(), -1);
  EXPECT_EQ(unpins_.size(), 2);
  hold.LetGo();
  EXPECT_EQ(unpins_.size(), 2);
}

TEST_F(HoldTest, TheNextVersionReplacesTheLast) {
  Hold hold(servers_.router.get(), "job", absl::Seconds(90));
  ASSERT_TRUE(hold.Take(8, absl::InfiniteFuture()).ok());
  ASSERT_TRUE(hold.Take(9, absl::InfiniteFuture()).ok());
  ASSERT_EQ(unpins_.size(), 2);
  EXPECT_EQ(unpins_[0].version(), 8);
  EXPECT_NE(pins_[0].holder(), pins_[2].holder()) << "a late unpin of the one must not end the other";
}

TEST_F(HoldTest, ALeaseThatRunsOutIsRenewed) {
  Hold hold(servers_.router.get(), "job", absl::Milliseconds(30));
  ASSERT_TRUE(hold.Take(8, absl::InfiniteFuture()).ok());
  absl::SleepFor(2 * hold.renew_after());  // clocks differ a little
  ASSERT_EQ(hold.RenewIfDue(), absl::OkStatus());
  ASSERT_EQ(pins_.size(), 4);
  EXPECT_EQ(pins_[3].holder(), pins_[0].holder());
  fails_at_ = 5;
  absl::SleepFor(2 * hold.renew_after());
  EXPECT_EQ(model::ReasonOf(hold.RenewIfDue()), model::kVersionGone);
}

// The reader goes on before the next renewal is due: else it would do nothing but wait for the server.
TEST_F(HoldTest, AServerThatIsDownHoldsUpNoReading) {
  Hold hold(servers_.router.get(), "job", absl::Seconds(9));
  ASSERT_TRUE(hold.Take(8, absl::InfiniteFuture()).ok());
  servers_[1].on_pin = [](const v1::PinRequest&) -> absl::StatusOr<v1::PinResponse> {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  absl::SleepFor(hold.renew_after() + absl::Milliseconds(50));
  EXPECT_EQ(pins_.size(), 2);
  (void)hold.RenewIfDue();
  EXPECT_EQ(pins_.size(), 3);
  (void)hold.RenewIfDue();
  EXPECT_EQ(pins_.size(), 3) << "the next is due already";
}

// Notes how long the last Pin may take.
class TimedPins final : public ForwardingTransport {
 public:
  explicit TimedPins(absl::Duration* allowed)
      : ForwardingTransport(std::make_unique<FakeServer>("s0")), allowed_(allowed) {}
  void Pin(const v1::PinRequest& request, absl::Time deadline, Callback<v1::PinResponse> done) override {
    *allowed_ = deadline - absl::Now();
    ForwardingTransport::Pin(request, deadline, std::move(done));
  }

 private:
  absl::Duration* const allowed_;
};

// A renewal that waited for a dead server as long as the lease came too late for those that live.
TEST(HoldRenewalTest, ARenewalLeavesTimeForTheNext) {
  absl::Duration allowed;
  std::vector<std::unique_ptr<Transport>> servers;
  servers.push_back(std::make_unique<TimedPins>(&allowed));
  Router router(std::move(servers), RouterOptions{});
  const absl::Duration lease = absl::Milliseconds(300);
  Hold hold(&router, "job", lease);
  ASSERT_TRUE(hold.Take(8, absl::InfiniteFuture()).ok());
  absl::SleepFor(2 * hold.renew_after());
  (void)hold.RenewIfDue();
  EXPECT_LE(allowed, lease / 2);
}

class WholePullsTest : public ::testing::Test {
 protected:
  // Element i of a unit is i.
  WholePullsTest() {
    v1::OpenRequest open = OpenOnFakes(2, 1);
    v1::TensorSpec* tensor = open.mutable_spec()->mutable_registrations(0)->add_tensors();
    tensor->set_name("parts");
    tensor->set_unit("w");
    tensor->add_shape(4);
    tensor->add_shape(6);
    tensor->set_part_dimension(1);
    tensor->set_parts(2);
    open.set_spec_digest(model::SpecDigest(open.spec()));
    auto plan = model::EpochPlan::Make(open);
    EXPECT_TRUE(plan.ok()) << plan.status();
    plan_ = std::make_shared<const model::EpochPlan>(*std::move(plan));
    for (uint32_t i = 0; i < 2; ++i) {
      servers_[i].on_pull = [this](const v1::PullRequest& request, absl::Span<std::byte> to) {
        if (!fails_.ok()) return fails_;
        EXPECT_EQ(request.version(), 8);
        EXPECT_EQ(request.content(), v1::CONTENT_MASTER);
        EXPECT_EQ(to.size(), (request.end() - request.begin()) * sizeof(float));
        for (uint64_t e = request.begin(); e < request.end(); ++e) {
          const auto value = static_cast<float>(e);
          std::memcpy(to.data() + (e - request.begin()) * sizeof(float), &value, sizeof(value));
        }
        return absl::OkStatus();
      };
    }
    EXPECT_TRUE(hold_.Take(8, absl::InfiniteFuture()).ok());
  }
  absl::StatusOr<std::vector<float>> Pull(uint32_t index) {
    const model::Tensor& tensor = plan_->layout().tensors()[index];
    std::vector<float> values(tensor.range.size());
    WholePulls pulls(servers_.router.get(), &hold_, plan_, v1::CONTENT_MASTER, absl::Minutes(2));
    BALLAST_RETURN_IF_ERROR(
        pulls.Start(tensor, {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)}));
    BALLAST_RETURN_IF_ERROR(pulls.Wait());
    return values;
  }

  FakeServers servers_{2};
  std::shared_ptr<const model::EpochPlan> plan_;
  Hold hold_{servers_.router.get(), "job", absl::Minutes(2)};
  absl::Status fails_;
};

TEST_F(WholePullsTest, ATensorIsPulledFromTheServersOfItsChunks) {
  const auto values = Pull(0);
  ASSERT_TRUE(values.ok()) << values.status();
  const uint64_t begin = plan_->layout().tensors()[0].range.begin;
  for (uint64_t i = 0; i < values->size(); ++i) ASSERT_EQ((*values)[i], static_cast<float>(begin + i));
  for (uint32_t server = 0; server < 2; ++server) {
    for (const v1::PullRequest& pull : servers_[server].pulled()) {
      const auto pieces = plan_->layout().Cut(pull.unit(), {pull.begin(), pull.end()});
      ASSERT_TRUE(pieces.ok());
      ASSERT_EQ(pieces->size(), 1);
      EXPECT_EQ(plan_->holders_of((*pieces)[0].chunk)[0], server);
    }
  }
}

TEST_F(WholePullsTest, ATensorThatServersHoldInPartsComesInRowMajorOrder) {
  const auto values = Pull(3);
  ASSERT_TRUE(values.ok()) << values.status();
  // Two blocks of 4 x 3, one behind the other.
  for (uint64_t row = 0; row < 4; ++row) {
    for (uint64_t column = 0; column < 6; ++column) {
      EXPECT_EQ((*values)[row * 6 + column], static_cast<float>(column / 3 * 12 + row * 3 + column % 3));
    }
  }
}

TEST_F(WholePullsTest, AFailedPullIsTheWaitsError) {
  fails_ = model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone, "past");
  EXPECT_EQ(model::ReasonOf(Pull(0).status()), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(Pull(3).status()), model::kVersionGone);
}

// A job on two servers, as a reader finds it.
class JobViewTest : public ::testing::Test {
 protected:
  JobViewTest() {
    open_ = OpenOnFakes(2, 1);
    for (size_t i = 0; i < 2; ++i) {
      jobs_[i].set_server_id("s" + std::to_string(i));
      jobs_[i].set_exists(true);
      jobs_[i].set_committed(6);
      jobs_[i].set_leases_pins(true);
      jobs_[i].set_life(i == 0 ? 76 : 1);  // 76 ^ 1 == 77
      *jobs_[i].mutable_promised() = open_.epoch();
      servers_[i].on_get_job = [this, i](const v1::GetJobRequest& request) {
        ++asked_;
        v1::GetJobResponse job = jobs_[i];
        if (!request.without_open() && job.exists()) *job.mutable_open() = open_;
        return job;
      };
    }
    EXPECT_EQ(view_.Meet(absl::InfiniteFuture()), absl::OkStatus());
  }
  void ExpectRefused(const char* reason, const char* words) {
    const absl::Status status = view_.Look(absl::InfiniteFuture()).status();
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }

  v1::OpenRequest open_;
  v1::GetJobResponse jobs_[2];
  int asked_ = 0;
  FakeServers servers_{2};
  JobView view_{servers_.router.get(), "job"};
};

TEST_F(JobViewTest, AReaderFollowsTheNewestOpen) {
  jobs_[1].set_committed(7);
  EXPECT_EQ(view_.plan(), nullptr);
  const auto version = view_.Look(absl::InfiniteFuture());
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, 7);
  ASSERT_NE(view_.plan(), nullptr);
  EXPECT_EQ(view_.plan()->open().epoch().counter(), 3);
  EXPECT_EQ(view_.life(), 77);
  const auto plan = view_.plan();
  asked_ = 0;
  ASSERT_TRUE(view_.Look(absl::InfiniteFuture()).ok());
  EXPECT_EQ(view_.plan(), plan) << "the epoch is the same";
  EXPECT_EQ(asked_, 2) << "without the Open, which may be large";
  open_.mutable_epoch()->set_counter(9);
  for (v1::GetJobResponse& job : jobs_) *job.mutable_promised() = open_.epoch();
  ASSERT_TRUE(view_.Look(absl::InfiniteFuture()).ok());
  EXPECT_EQ(view_.plan()->open().epoch().counter(), 9);
}

TEST_F(JobViewTest, WhatCannotBeReadIsRefusedByName) {
  jobs_[1].set_state_lost(true);
  ExpectRefused(model::kStateLost, "server 's1' was restarted without the state of job 'job'");
  jobs_[1].set_state_lost(false);
  jobs_[1].set_leases_pins(false);
  ExpectRefused(model::kUnsupported, "earlier release");
  jobs_[1].set_leases_pins(true);
  for (v1::GetJobResponse& job : jobs_) job.set_committed(-1);
  ExpectRefused(model::kBadRequest, "has no values yet");
  for (v1::GetJobResponse& job : jobs_) job.set_exists(false);
  ExpectRefused(model::kJobMissing, "the servers have no job 'job'");
}

TEST_F(JobViewTest, AJobThatWasMadeAgainIsAnotherOne) {
  ASSERT_TRUE(view_.Look(absl::InfiniteFuture()).ok());
  EXPECT_EQ(view_.CheckLife(77, absl::InfiniteFuture()), absl::OkStatus());
  jobs_[1].set_life(2);
  EXPECT_EQ(model::ReasonOf(view_.CheckLife(77, absl::InfiniteFuture())), model::kVersionGone);
}

class OpenJobTest : public ::testing::Test {
 protected:
  OpenJobTest() {
    SessionOptions options;
    options.job = "job";
    options.step_timeout = absl::Seconds(77);
    std::vector<std::unique_ptr<Transport>> servers;
    servers.push_back(std::make_unique<FakeServer>("s0"));
    job_ = std::make_unique<OpenJob>(options, std::move(servers), collective_[0].get());
  }
  absl::Status Adopt(int64_t base, int64_t registered = -1) {
    v1::OpenRequest open = OpenOnFakes(1, 1);
    open.set_base(base);
    if (registered >= 0) {
      v1::Registration* more = open.mutable_spec()->add_registrations();
      more->set_version(registered);
      v1::TensorSpec* tensor = more->add_tensors();
      tensor->set_name("later");
      tensor->set_unit("v");
      tensor->add_shape(256);
    }
    open.set_spec_digest(model::SpecDigest(open.spec()));
    return job_->Adopt(std::make_shared<const v1::OpenRequest>(open));
  }

  std::vector<std::unique_ptr<Collective>> collective_ = MakeLoopbackGroup(1);
  std::unique_ptr<OpenJob> job_;
};

TEST_F(OpenJobTest, APlanIsTakenOverWithItsVersion) {
  ASSERT_EQ(Adopt(-1), absl::OkStatus());
  EXPECT_EQ(job_->seat().job, "job");
  EXPECT_EQ(job_->seat().version, -1);
  EXPECT_EQ(job_->tensor_count(), 3);
  EXPECT_EQ(job_->without_values(), (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_THAT(job_->CheckReadable(0).ToString(), HasSubstr("Initialise comes first"));
  job_->NextAttempt();
  EXPECT_EQ(job_->seat().attempt, 1);
  job_->CatchUp(0);
  EXPECT_EQ(job_->seat().attempt, 1);
  job_->CatchUp(4);
  EXPECT_EQ(job_->seat().attempt, 4);
  job_->Advance(0);
  EXPECT_EQ(job_->seat().attempt, 0) << "of the next step";
  EXPECT_TRUE(job_->without_values().empty());
  EXPECT_EQ(job_->CheckHasValues(0), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(job_->CheckReadable(2)), model::kUnknownUnit);
}

TEST_F(OpenJobTest, ATensorRegisteredSinceHasNoValues) {
  ASSERT_EQ(Adopt(4, /*registered=*/4), absl::OkStatus());
  EXPECT_EQ(job_->CheckHasValues(0), absl::OkStatus());
  EXPECT_THAT(job_->CheckHasValues(1).ToString(), HasSubstr("tensor 'later' has no values yet"));
  job_->Advance(5);
  EXPECT_EQ(job_->CheckHasValues(1), absl::OkStatus());
}

TEST_F(OpenJobTest, SomeErrorsEndTheSessionAndOthersDoNot) {
  ASSERT_EQ(Adopt(4), absl::OkStatus());
  const absl::Status mistake = model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest, "a mistake");
  EXPECT_EQ(job_->Conclude(mistake), mistake);
  EXPECT_EQ(job_->Usable(), absl::OkStatus());
  const absl::Status over = model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch, "over");
  EXPECT_EQ(job_->Conclude(over), over);
  EXPECT_EQ(job_->Usable(), over);
  EXPECT_EQ(job_->CheckReadable(0), over);
  EXPECT_EQ(job_->ended(), over);
}

TEST_F(OpenJobTest, AnOpenThatMakesNoPlanChangesNothing) {
  ASSERT_EQ(Adopt(4), absl::OkStatus());
  v1::OpenRequest bad = OpenOnFakes(1, 1);
  bad.clear_members();
  EXPECT_FALSE(job_->Adopt(std::make_shared<const v1::OpenRequest>(bad)).ok());
  EXPECT_EQ(job_->seat().version, 4);
  EXPECT_EQ(job_->open().members_size(), 1);
}

}  // namespace
}  // namespace ballast::client
