// What ranks agree on, computed from their offers without a server.
#include "ballast/client/transactions/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::SealRequest Offer(uint32_t rank, const std::vector<uint32_t>& gradients, const std::vector<uint32_t>& values = {}) {
  v1::SealRequest offer;
  offer.set_job("Step");
  offer.set_step(7);
  offer.set_rank(rank);
  offer.add_blobs(rank == 0 ? "first" : "second");
  offer.mutable_header()->set_kind(v1::STEP_KIND_UPDATE);
  offer.mutable_header()->add_groups()->set_learning_rate(0.5);
  offer.mutable_header()->set_gradient_presence(model::MakeBitmap(10, gradients));
  offer.mutable_header()->set_value_presence(model::MakeBitmap(10, values));
  return offer;
}

TEST(AgreementTest, RanksBringGradientsOfOtherTensors) {
  const Offers offers = {Offer(0, {1}), Offer(1, {1, 9})};
  EXPECT_TRUE(CheckSameOffers(offers, false).ok());
  const Agreement agreed = Join(offers, false);
  EXPECT_EQ(agreed.header.gradient_presence(), model::MakeBitmap(10, {1, 9}));
  EXPECT_THAT(agreed.blobs, ElementsAre("first", "second"));
  EXPECT_TRUE(GradientsDiffer(offers, agreed.header));
  const Offers alike = {Offer(0, {1, 9}), Offer(1, {1, 9})};
  EXPECT_FALSE(GradientsDiffer(alike, Join(alike, false).header));
}

TEST(AgreementTest, WhatDiffersIsNamed) {
  const auto difference = [](const std::function<void(v1::SealRequest&)>& change) {
    Offers offers = {Offer(0, {1}), Offer(1, {1})};
    change(offers[1]);
    const absl::Status status = CheckSameOffers(offers, false);
    EXPECT_EQ(model::ReasonOf(status), model::kPlanMismatch);
    return std::string(status.message());
  };
  EXPECT_THAT(difference([](auto& offer) { offer.set_job("Norm"); }), HasSubstr("rank 1 called Norm against Step"));
  EXPECT_THAT(difference([](auto& offer) { offer.set_step(8); }), HasSubstr("is at step 8 against 7"));
  EXPECT_THAT(difference([](auto& offer) { offer.set_attempt(2); }), HasSubstr("has dropped 2 time(s) against 0"));
  EXPECT_THAT(difference([](auto& offer) { *offer.mutable_header()->mutable_value_presence() = "\1\1"; }),
              HasSubstr("has written other tensors"));
  EXPECT_THAT(difference([](auto& offer) { offer.mutable_header()->set_value_array(1); }), HasSubstr("another array"));
  EXPECT_THAT(difference([](auto& offer) { offer.mutable_header()->mutable_groups(0)->set_beta1(0.5); }),
              HasSubstr("other hyper-parameters for group 0"));
  EXPECT_THAT(difference([](auto& offer) { offer.mutable_header()->set_max_norm(2); }), HasSubstr("another header"));
}

// With placements each rank writes tensors of its own, and all of them are agreed on with their step counts.
TEST(AgreementTest, PlacedRanksWriteOtherTensors) {
  Offers offers = {Offer(0, {}, {0}), Offer(1, {}, {3})};
  for (v1::SealRequest& offer : offers) offer.mutable_header()->mutable_value_tensor_steps()->Resize(10, 0);
  offers[0].mutable_header()->set_value_tensor_steps(0, 5);
  offers[1].mutable_header()->set_value_tensor_steps(3, 6);
  EXPECT_FALSE(CheckSameOffers(offers, false).ok());
  EXPECT_TRUE(CheckSameOffers(offers, true).ok());
  const Agreement agreed = Join(offers, true);
  EXPECT_EQ(agreed.header.value_presence(), model::MakeBitmap(10, {0, 3}));
  EXPECT_EQ(agreed.header.value_tensor_steps(0), 5u);
  EXPECT_EQ(agreed.header.value_tensor_steps(3), 6u);
}

TEST(AgreementTest, ARankThatHasATensorWritesItToo) {
  v1::OpenRequest open;
  open.mutable_epoch()->set_counter(1);
  open.set_base(-1);
  open.mutable_spec()->set_name("j");
  open.mutable_spec()->set_chunk_elements(1 << 16);
  open.mutable_spec()->set_group_count(1);
  v1::TensorSpec* tensor = open.mutable_spec()->add_registrations()->add_tensors();
  tensor->set_name("w");
  tensor->set_unit("u");
  tensor->add_shape(10);
  v1::Member* member = open.add_members();
  member->set_server_id("s");
  member->set_weight(1);
  *open.mutable_tiling() = model::EvenTiling(1);
  auto plan = model::EpochPlan::Make(open);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const UnitMap units(std::make_shared<const model::EpochPlan>(*std::move(plan)), 0);
  v1::StepHeader own, agreed;
  agreed.set_value_presence(model::MakeBitmap(1, {0}));
  own.set_value_presence(model::MakeBitmap(1, {}));
  EXPECT_THAT(CheckWritten(units, own, agreed).ToString(),
              HasSubstr("has written values or another step count of tensor 'w'"));
  EXPECT_TRUE(CheckWritten(units, agreed, agreed).ok());
  EXPECT_TRUE(CheckWritten(units, own, own).ok());
}

TEST(AgreementTest, BrokenOffersNameTheirRank) {
  const std::string good = Offer(0, {}).SerializeAsString();
  EXPECT_TRUE(ParseOffers({good, good}).ok());
  EXPECT_THAT(ParseOffers({good, "x"}).status().ToString(), HasSubstr("rank 1 sent no offer"));
}

}  // namespace
}  // namespace ballast::client
