#include "ballast/proto/model/step_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "absl/strings/escaping.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::model {
namespace {

using ::testing::HasSubstr;

class HeaderTest : public ::testing::Test {
 protected:
  HeaderTest() {
    v1::OpenRequest open;
    open.mutable_spec()->set_name("job");
    open.mutable_spec()->set_chunk_elements(1 << 16);
    open.mutable_spec()->set_group_count(1);
    SetOptimizer({}, open.mutable_spec());
    v1::Registration* registration = open.mutable_spec()->add_registrations();
    registration->set_version(-1);
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name("w");
    tensor->set_unit("u");
    tensor->add_shape(1000);
    v1::Member* member = open.add_members();
    member->set_server_id("s");
    member->set_weight(1);
    *open.mutable_tiling() = EvenTiling(2);
    plan_ = *EpochPlan::Make(open);
    header_.set_kind(v1::STEP_KIND_UPDATE);
    header_.add_groups()->set_learning_rate(1e-3);
    header_.set_gradient_scale(1);
    header_.set_gradient_presence(MakeBitmap(1, {0}));
    header_.set_value_presence(MakeBitmap(1, {}));
  }
  EpochPlan plan_;
  v1::StepHeader header_;
  const std::vector<std::string> blobs_ = {"a", "b"};
};

// Gives a field another value.
void Change(const std::string& name, google::protobuf::Message* message) {
  using Field = google::protobuf::FieldDescriptor;
  const Field* field = message->GetDescriptor()->FindFieldByName(name);
  const google::protobuf::Reflection& access = *message->GetReflection();
  switch (field->cpp_type()) {
    case Field::CPPTYPE_DOUBLE:
      return access.SetDouble(message, field, std::nextafter(access.GetDouble(*message, field), HUGE_VAL));
    case Field::CPPTYPE_BOOL:
      return access.SetBool(message, field, !access.GetBool(*message, field));
    case Field::CPPTYPE_ENUM:
      return access.SetEnumValue(message, field, access.GetEnumValue(*message, field) + 1);
    case Field::CPPTYPE_STRING:
      return access.SetString(message, field, access.GetString(*message, field) + "x");
    default:
      FAIL() << "a field that this test does not change: " << name;
  }
}

TEST_F(HeaderTest, EveryFieldMovesThePlanHash) {
  const std::string base = PlanHash(plan_, 3, 0, header_, blobs_);
  EXPECT_EQ(base.size(), 32u);
  EXPECT_EQ(base, PlanHash(plan_, 3, 0, header_, blobs_));
  EXPECT_NE(base, PlanHash(plan_, 4, 0, header_, blobs_));
  EXPECT_NE(base, PlanHash(plan_, 3, 1, header_, blobs_));
  EXPECT_NE(base, PlanHash(plan_, 3, 0, header_, std::vector<std::string>{"ab", ""}));
  for (const char* field : {"kind", "gradient_scale", "max_norm", "gradient_presence", "value_presence"}) {
    v1::StepHeader changed = header_;
    Change(field, &changed);
    EXPECT_NE(base, PlanHash(plan_, 3, 0, changed, blobs_)) << field;
  }
  std::set<std::string> hashes = {base};
  const google::protobuf::Descriptor& group = *v1::GroupHyper::descriptor();
  for (int i = 0; i < group.field_count(); ++i) {
    v1::StepHeader changed = header_;
    Change(group.field(i)->name(), changed.mutable_groups(0));
    EXPECT_TRUE(hashes.insert(PlanHash(plan_, 3, 0, changed, blobs_)).second) << group.field(i)->name();
  }
  EXPECT_EQ(hashes.size(), 13u);
}

// Logs hold prepared records with such hashes, and a recovery computes the hashes again.
TEST_F(HeaderTest, TheHashOfAnOpenWithoutADigestStaysWhatItWas) {
  EXPECT_EQ(absl::BytesToHexString(PlanHash(plan_, 3, 2, header_, blobs_)),
            "60c7385c5118827676a3e7d322f8aa95e2faaf2e12e783394e15cb897bff0850");
  header_.set_kind(v1::STEP_KIND_VALUES);
  header_.set_value_array(1);
  header_.add_value_tensor_steps(7);
  EXPECT_EQ(absl::BytesToHexString(PlanHash(plan_, 3, 2, header_, blobs_)),
            "e8059e3721b2dd5b9b4e9064ea65f7c6438bf34d9dfa06d33b8d7ccc0ad4e176");
}

// Two specs with the same tensors and tiling, of jobs that compute different things.
TEST_F(HeaderTest, TheSpecMovesThePlanHash) {
  std::set<std::string> hashes = {PlanHash(plan_, 3, 0, header_, blobs_)};
  v1::OpenRequest open = plan_.open();
  for (const v1::Optimizer optimizer : {v1::OPTIMIZER_ADAMW, v1::OPTIMIZER_LION}) {
    open.mutable_spec()->set_optimizer(optimizer);
    open.set_spec_digest(SpecDigest(open.spec()));
    const auto plan = EpochPlan::Make(open);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(hashes.insert(PlanHash(*plan, 3, 0, header_, blobs_)).second) << v1::Optimizer_Name(optimizer);
  }
}

TEST_F(HeaderTest, TheProtocolVersionMovesThePlanHash) {
  std::set<std::string> hashes;
  v1::OpenRequest open = plan_.open();
  open.set_spec_digest(SpecDigest(open.spec()));
  for (const uint32_t version : {0, 5, 6}) {
    open.set_protocol_version(version);
    const auto plan = EpochPlan::Make(open);
    if (version > kProtocolVersion) {
      EXPECT_EQ(ReasonOf(plan.status()), kVersionsDiffer) << "of a log that a later version wrote";
      continue;
    }
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(hashes.insert(PlanHash(*plan, 3, 0, header_, blobs_)).second) << version;
  }
}

TEST_F(HeaderTest, WhatValuesAreMovesThePlanHash) {
  header_.set_kind(v1::STEP_KIND_VALUES);
  std::set<std::string> hashes;
  for (const uint32_t array : {0, 1, 2}) {
    for (const std::vector<uint64_t>& steps : {std::vector<uint64_t>{}, {0}, {7}}) {
      header_.set_value_array(array);
      header_.mutable_value_tensor_steps()->Assign(steps.begin(), steps.end());
      EXPECT_TRUE(hashes.insert(PlanHash(plan_, 3, 0, header_, blobs_)).second) << array << " " << steps.size();
    }
  }
}

TEST_F(HeaderTest, MomentsAndStepCountsAreOfValuesAlone) {
  const auto refused = [&](int64_t step, const std::string& words) {
    const absl::Status status = CheckHeader(plan_, step, header_, blobs_);
    EXPECT_EQ(ReasonOf(status), kBadRequest) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  header_.set_value_array(1);
  refused(1, "VALUES steps only");
  header_.set_value_array(0);
  header_.add_value_tensor_steps(3);
  refused(1, "VALUES steps only");
  header_.set_kind(v1::STEP_KIND_VALUES);
  header_.set_gradient_presence(MakeBitmap(1, {}));
  header_.set_value_presence(MakeBitmap(1, {0}));
  for (const uint32_t array : {0, 1, 2}) {
    header_.set_value_array(array);
    EXPECT_TRUE(CheckHeader(plan_, 1, header_, blobs_).ok()) << array;
  }
  refused(0, "must give its master weights");  // no moments before
  header_.set_value_array(3);
  refused(1, "keeps 2 moment(s)");
  header_.set_value_array(0);
  EXPECT_TRUE(CheckHeader(plan_, 0, header_, blobs_).ok());
  header_.add_value_tensor_steps(3);
  refused(1, "each of 1 tensors or none, got 2");
}

TEST_F(HeaderTest, ChecksSayWhatWasExpected) {
  EXPECT_TRUE(CheckHeader(plan_, 1, header_, blobs_).ok());
  const auto refused = [&](const v1::StepHeader& header, const std::vector<std::string>& blobs,
                           const std::string& words) {
    const absl::Status status = CheckHeader(plan_, 1, header, blobs);
    EXPECT_EQ(ReasonOf(status), kBadRequest);
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  refused(header_, {"a"}, "one blob per rank (2), got 1");
  refused(header_, {std::string(40000, 'x'), std::string(40000, 'x')}, "may take 65536 bytes, got 80000");
  refused(header_, {std::string(30000, 'x'), std::string(40000, 'x')},
          "got 70000 from 2 ranks, the most (40000) from rank 1; if all ranks seal as much, each has 32768");
  v1::StepHeader header = header_;
  header.add_groups();
  refused(header, blobs_, "1 parameter group(s), got 2");
  header = header_;
  header.set_kind(v1::STEP_KIND_RESTORE);
  header.set_gradient_presence(std::string(1, '\0'));
  EXPECT_TRUE(CheckHeader(plan_, 1, header, blobs_).ok()) << CheckHeader(plan_, 1, header, blobs_);
  for (int i = 0; i < 300; ++i) header.add_groups()->set_learning_rate(1);
  refused(header, blobs_, "expected hyper-parameters for 1 parameter group(s), got 301");
  header = header_;
  header.mutable_groups(0)->set_beta1(1);
  refused(header, blobs_, "betas in [0, 1)");
  header = header_;
  header.set_gradient_scale(std::numeric_limits<double>::infinity());
  refused(header, blobs_, "finite in fp32");
  header.set_gradient_scale(1e39);  // infinite in fp32
  refused(header, blobs_, "finite in fp32");
  header = header_;
  header.set_gradient_presence("");
  refused(header, blobs_, "must have 1 bytes");
  header = header_;
  header.set_gradient_presence("\x02");
  refused(header, blobs_, "names tensor 1; the job has 1");
  header = header_;
  header.set_kind(v1::STEP_KIND_VALUES);
  refused(header, blobs_, "VALUES step");
}

TEST_F(HeaderTest, TensorsWithoutValuesMustGetThemFirst) {
  EXPECT_TRUE(CheckHeader(plan_, 1, header_, blobs_).ok());
  const absl::Status status = CheckHeader(plan_, 0, header_, blobs_);
  EXPECT_EQ(ReasonOf(status), kBadRequest);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tensor 'w' was registered at version -1 and has no values yet"));
  header_.set_value_presence(MakeBitmap(1, {0}));
  EXPECT_TRUE(CheckHeader(plan_, 0, header_, blobs_).ok());
}

}  // namespace
}  // namespace ballast::model
