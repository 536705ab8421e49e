// What a later epoch may change of a job, and when two messages are of the same step.
#include "ballast/services/step/open_checks.h"

#include <functional>
#include <string>

#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/services/step/step_state.h"
#include "ballast/tests/step/step_fixture.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using absl::StatusCode;

class OpenChecksTest : public StepMachineTest {
 protected:
  OpenChecksTest() {
    servers_ = {"a", "b"};
    open_ = MakeOpen(1, -1);
  }
  v1::OpenRequest Changed(const std::function<void(v1::OpenRequest*)>& change) const {
    v1::OpenRequest changed = open_;
    change(&changed);
    return changed;
  }
  static void Register(const char* name, int64_t version, v1::OpenRequest* open) {
    v1::Registration* more = open->mutable_spec()->add_registrations();
    more->set_version(version);
    v1::TensorSpec* tensor = more->add_tensors();
    tensor->set_name(name);
    tensor->set_unit(name);
    tensor->add_shape(256);
  }

  v1::OpenRequest open_;
};

TEST_F(OpenChecksTest, ALaterEpochMayChangeTheTilingAndAddTensors) {
  EXPECT_EQ(CheckContinues(open_, open_), absl::OkStatus());
  EXPECT_EQ(CheckContinues(open_, Changed([](auto* o) { *o->mutable_tiling() = model::EvenTiling(5); })),
            absl::OkStatus());
  EXPECT_EQ(CheckContinues(open_, Changed([](auto* o) { Register("third", 4, o); })), absl::OkStatus());
}

TEST_F(OpenChecksTest, WhatIsRegisteredStays) {
  const auto expect_refused = [&](const std::function<void(v1::OpenRequest*)>& change) {
    EXPECT_THAT(CheckContinues(open_, Changed(change)),
                Fails(StatusCode::kInvalidArgument, model::kBadSpec, "may only grow by further registrations"));
  };
  expect_refused([](auto* o) { o->mutable_spec()->clear_registrations(); });
  expect_refused([](auto* o) { o->mutable_spec()->mutable_registrations(0)->mutable_tensors(1)->set_name("other"); });
  expect_refused([](auto* o) { o->mutable_spec()->mutable_registrations(0)->mutable_tensors(0)->set_shape(0, 2048); });
  expect_refused([](auto* o) { o->mutable_spec()->mutable_registrations(0)->set_version(3); });
  expect_refused([](auto* o) { o->mutable_spec()->set_chunk_elements(1 << 17); });
  expect_refused([](auto* o) { o->mutable_spec()->set_working_dtype(v1::DTYPE_F32); });
  expect_refused([](auto* o) { o->mutable_spec()->set_durability(v1::DURABILITY_STEP); });
}

TEST_F(OpenChecksTest, ChunksStayOnTheirServers) {
  const auto expect_refused = [&](const std::function<void(v1::OpenRequest*)>& change) {
    EXPECT_THAT(CheckContinues(open_, Changed(change)),
                Fails(StatusCode::kUnimplemented, model::kUnsupported, "lies on 2 server(s)"));
  };
  expect_refused([](auto* o) { o->mutable_members()->RemoveLast(); });
  expect_refused([](auto* o) { o->mutable_members(1)->set_weight(2); });
  expect_refused([](auto* o) { o->mutable_members()->SwapElements(0, 1); });
  expect_refused([](auto* o) { o->mutable_members(1)->set_server_id("c"); });
  EXPECT_EQ(CheckContinues(open_, Changed([](auto* o) { o->mutable_members(1)->set_address("elsewhere:1"); })),
            absl::OkStatus())
      << "a server may get another address";
}

TEST_F(OpenChecksTest, NewTensorsBeginWithTheEpoch) {
  const auto at = [&](int64_t base, int64_t version) {
    return Changed([&](auto* o) {
      o->set_base(base);
      Register("third", version, o);
    });
  };
  EXPECT_EQ(CheckRegistered(at(4, 4), 1), absl::OkStatus());
  EXPECT_THAT(CheckRegistered(at(4, 3), 1),
              Fails(StatusCode::kInvalidArgument, model::kBadSpec, "says version 3; expected the epoch's base, 4"));
  EXPECT_EQ(CheckRegistered(at(4, 3), 2), absl::OkStatus()) << "both are known";
  EXPECT_EQ(CheckRegistered(at(-1, -1), 0), absl::OkStatus()) << "the job's first Open";
}

TEST_F(OpenChecksTest, AJobWithPinsTakesNoNewTensors) {
  every_k_ = 10;
  v1::OpenRequest open = MakeOpen(2, 20);
  Register("third", 20, &open);
  EXPECT_THAT(CheckRegistered(open, 1), Fails(StatusCode::kUnimplemented, model::kUnsupported, "every-K"));
  EXPECT_EQ(CheckRegistered(open, 2), absl::OkStatus());
  open.set_base(-1);
  open.mutable_spec()->mutable_registrations(1)->set_version(-1);
  EXPECT_EQ(CheckRegistered(open, 1), absl::OkStatus()) << "it has no state yet";
}

TEST_F(OpenChecksTest, ARepeatedOpenHasTheSamePlan) {
  EXPECT_TRUE(SamePlan(open_, Changed([](auto* o) {
                         *o->mutable_epoch() = MakeEpoch(9);
                         o->set_base(17);
                       })));
  EXPECT_FALSE(SamePlan(open_, Changed([](auto* o) { *o->mutable_tiling() = model::EvenTiling(3); })));
  EXPECT_FALSE(SamePlan(open_, Changed([](auto* o) { Register("third", 0, o); })));
  EXPECT_FALSE(SamePlan(open_, Changed([](auto* o) { o->mutable_members()->RemoveLast(); })));
  EXPECT_FALSE(SamePlan(open_, Changed([](auto* o) { o->mutable_members(0)->set_weight(3); })));
  EXPECT_FALSE(SamePlan(open_, Changed([](auto* o) { o->set_spec_digest("another"); })));
  EXPECT_FALSE(SamePlan(open_, Changed([](auto* o) { o->set_protocol_version(o->protocol_version() + 1); })));
}

TEST(StepKeyTest, OneStepIsTheSameStepEpochAttemptAndPlan) {
  v1::Decision a;
  a.set_step(4);
  a.set_attempt(2);
  a.set_plan_hash("hash");
  *a.mutable_epoch() = MakeEpoch(3);
  v1::PreparedRecord b;
  b.set_step(4);
  b.set_attempt(2);
  b.set_plan_hash("hash");
  *b.mutable_epoch() = MakeEpoch(3);
  EXPECT_TRUE(SameKey(a, b));
  EXPECT_EQ(ShowKey(a), "step 4 of epoch 3.7, attempt 2");
  for (const auto& change : std::vector<std::function<void(v1::PreparedRecord*)>>{
           [](auto* r) { r->set_step(5); }, [](auto* r) { r->set_attempt(1); },
           [](auto* r) { r->set_plan_hash("other"); }, [](auto* r) { *r->mutable_epoch() = MakeEpoch(4); },
           [](auto* r) { *r->mutable_epoch() = MakeEpoch(3, 8); }}) {
    v1::PreparedRecord other = b;
    change(&other);
    EXPECT_FALSE(SameKey(a, other)) << ShowKey(other);
  }
}

}  // namespace
}  // namespace ballast::services
