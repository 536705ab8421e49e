// Groups that open a job whose servers may change.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/tests/client/session/mortal_servers.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

// The other one makes the key and opens the job after this one has found no key, and before it asks the servers.
TEST(SessionMembersTest, TwoGroupsThatMakeAJobAtOnceHaveOneJob) {
  MortalServers servers;
  SessionOptions options = TestOptions();
  options.replicas = 2;
  options.resume = Resume::kAuto;
  Reference reference(TestTensors());
  const auto group = MakeLoopbackGroup(1), others = MakeLoopbackGroup(1);
  BeforeCall nothing, before;
  int opened = 0;
  before.get_job = [&](int) {
    if (opened++ > 0) return;
    auto other = Session::Open(options, TestTensors(), servers.Connect(&nothing), others[0].get());
    ASSERT_TRUE(other.ok()) << other.status();
    ASSERT_EQ(InitialiseAll(**other), absl::OkStatus());
    ASSERT_EQ(TrainStep(**other, 1).status(), absl::OkStatus());
    reference.Step(1, TestStep());
  };
  auto session = Session::Open(options, TestTensors(), servers.Connect(&before), group[0].get());
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_GT(opened, 0);
  EXPECT_EQ((*session)->version(), 1);
  EXPECT_EQ(reference.Compare(**session, 1), absl::OkStatus());
  ASSERT_EQ(TrainStep(**session, 2).status(), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
