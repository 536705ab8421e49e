#include "ballast/proto/model/brief_open.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::model {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

// Sets every field of the message, and in each message once more every field.
void Fill(Message* message, int depth) {
  const google::protobuf::Reflection& access = *message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message->GetDescriptor()->field(i);
    const bool many = field->is_repeated();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        if (depth > 0)
          Fill(many ? access.AddMessage(message, field) : access.MutableMessage(message, field), depth - 1);
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        many ? access.AddString(message, field, "text") : access.SetString(message, field, "text");
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        many ? access.AddBool(message, field, true) : access.SetBool(message, field, true);
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        many ? access.AddInt64(message, field, 7) : access.SetInt64(message, field, 7);
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        many ? access.AddUInt64(message, field, 7) : access.SetUInt64(message, field, 7);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        many ? access.AddUInt32(message, field, 7) : access.SetUInt32(message, field, 7);
        break;
      default:
        break;  // numbers of messages within
    }
  }
}

TEST(BriefOpenTest, ABriefOpenLeavesOutTheSpecAlone) {
  v1::OpenRequest open;
  Fill(&open, 3);
  for (int i = 0; i < open.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = open.GetDescriptor()->field(i);
    const auto& access = *open.GetReflection();
    ASSERT_TRUE(field->is_repeated() ? access.FieldSize(open, field) > 0 : access.HasField(open, field))
        << field->name();
  }
  v1::OpenRequest brief = MakeBrief(open);
  EXPECT_TRUE(IsBrief(brief));
  EXPECT_FALSE(IsBrief(open));
  EXPECT_EQ(brief.spec().name(), "text");
  EXPECT_LT(brief.spec().ByteSizeLong(), 10u);
  *brief.mutable_spec() = open.spec();
  EXPECT_EQ(brief.SerializeAsString(), open.SerializeAsString());
}

TEST(BriefOpenTest, WhoOpenedAnOpenIsToldItBriefly) {
  v1::OpenRequest open;
  Fill(&open, 3);
  EXPECT_TRUE(IsBrief(TellOpen(open, "text")));
  EXPECT_FALSE(IsBrief(TellOpen(open, "another group")));
  EXPECT_FALSE(IsBrief(TellOpen(open, "")));
  open.clear_group();
  EXPECT_FALSE(IsBrief(TellOpen(open, "")));
  EXPECT_EQ(TellOpen(open, "").SerializeAsString(), open.SerializeAsString());
}

v1::OpenRequest OpenOf(int tensors) {
  v1::OpenRequest open;
  open.mutable_epoch()->set_counter(1);
  open.set_group("group");
  open.set_protocol_version(kProtocolVersion);
  v1::JobSpec* const spec = open.mutable_spec();
  spec->set_name("job");
  spec->set_chunk_elements(1 << 16);
  spec->set_group_count(1);
  v1::Registration* const registration = spec->add_registrations();
  registration->set_version(-1);
  for (int i = 0; i < tensors; ++i) {
    v1::TensorSpec* const tensor = registration->add_tensors();
    tensor->set_name(absl::StrCat("w", i));
    tensor->set_unit(absl::StrCat("unit", i / 3));
    tensor->add_shape(1 + 7919 * i % 100000);
  }
  open.set_spec_digest(SpecDigest(*spec));
  *open.mutable_tiling() = EvenTiling(3);
  return open;
}

// Random holders and fillers of 16 shards.
v1::Table RandomTable(std::mt19937_64* random) {
  v1::Table table;
  table.set_replicas(2);
  const uint32_t servers = 2 + (*random)() % 4;
  for (uint32_t i = 0; i < servers; ++i) {
    v1::Member* const member = table.add_members();
    member->set_server_id(absl::StrCat("server", i));
    member->set_weight(1);
  }
  for (int s = 0; s < 16; ++s) {
    v1::Shard* const shard = table.add_shards();
    for (uint32_t i = 0; i < servers; ++i) {
      const uint64_t what = (*random)() % 3;
      if (what == 0) shard->add_holders(i);
      if (what == 1) shard->add_fillers(i);
    }
    if (shard->holders().empty()) {
      shard->clear_fillers();
      shard->add_holders(static_cast<uint32_t>((*random)() % servers));
    }
  }
  return table;
}

void ExpectSamePlans(const EpochPlan& a, const EpochPlan& b) {
  EXPECT_EQ(a.open().SerializeAsString(), b.open().SerializeAsString());
  EXPECT_EQ(FieldHash(a.tiling_hash()).Finish(), FieldHash(b.tiling_hash()).Finish());
  ASSERT_EQ(a.layout().chunks().size(), b.layout().chunks().size());
  ASSERT_EQ(a.slices().size(), b.slices().size());
  for (uint64_t chunk = 0; chunk < a.layout().chunks().size(); ++chunk) {
    EXPECT_THAT(a.holders_of(chunk), ElementsAreArray(b.holders_of(chunk)));
    EXPECT_THAT(a.fillers_of(chunk), ElementsAreArray(b.fillers_of(chunk)));
    EXPECT_THAT(a.slices_of_chunk(chunk), ElementsAreArray(b.slices_of_chunk(chunk)));
    EXPECT_TRUE(a.layout().chunks()[chunk].range == b.layout().chunks()[chunk].range);
  }
  for (const v1::Member& member : a.members()) {
    EXPECT_EQ(a.short_chunks(member.server_id()), b.short_chunks(member.server_id()));
  }
}

TEST(BriefOpenTest, APlanOfABriefOpenIsThatOfTheWholeOne) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  v1::OpenRequest open = OpenOf(40);
  *open.mutable_table() = RandomTable(&random);
  auto before = EpochPlan::Make(open);
  ASSERT_TRUE(before.ok()) << before.status();
  for (uint64_t epoch = 2; epoch < 40; ++epoch) {
    open.mutable_epoch()->set_counter(epoch);
    open.set_continues(epoch % 2 == 0);
    open.clear_tensor_steps();
    for (int i = 0; i < 40; ++i) open.add_tensor_steps(random() % 1000);
    *open.mutable_table() = RandomTable(&random);
    const auto own = EpochPlan::Make(open);
    ASSERT_TRUE(own.ok()) << own.status();
    auto next = EpochPlan::Make(random() % 3 == 0 ? open : MakeBrief(open), &*before);
    ASSERT_TRUE(next.ok()) << next.status();
    ExpectSamePlans(*next, *own);
    EXPECT_EQ(&next->open().spec(), &before->open().spec()) << "shared";
    before = std::move(next);  // the plan before goes, and the spec stays
  }
}

TEST(BriefOpenTest, APlanOfAJobWithoutATableSharesItsSpecToo) {
  v1::OpenRequest open = OpenOf(40);
  open.clear_group();
  for (const char* id : {"a", "b"}) {
    v1::Member* const member = open.add_members();
    member->set_server_id(id);
    member->set_weight(1);
  }
  const auto before = EpochPlan::Make(open);
  ASSERT_TRUE(before.ok()) << before.status();
  open.mutable_epoch()->set_counter(2);
  open.set_base(7);
  open.mutable_base_decision()->set_step(7);
  open.set_restores(5);
  const auto own = EpochPlan::Make(open), next = EpochPlan::Make(open, &*before);
  ASSERT_TRUE(own.ok() && next.ok()) << own.status() << next.status();
  ExpectSamePlans(*next, *own);
  EXPECT_EQ(&next->open().spec(), &before->open().spec()) << "shared";
}

TEST(BriefOpenTest, ABriefOpenOfAnotherSpecOrTilingIsRefused) {
  std::mt19937_64 random(1);
  v1::OpenRequest open = OpenOf(40);
  *open.mutable_table() = RandomTable(&random);
  const auto before = EpochPlan::Make(open);
  ASSERT_TRUE(before.ok()) << before.status();
  const auto refused = [&](const v1::OpenRequest& brief, const EpochPlan* like) {
    const absl::Status status = EpochPlan::Make(brief, like).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_EQ(ReasonOf(status), kBadSpec);
    EXPECT_THAT(status.message(), HasSubstr("send it whole"));
  };
  ASSERT_TRUE(EpochPlan::Make(MakeBrief(open), &*before).ok());
  refused(MakeBrief(open), nullptr);
  v1::OpenRequest other = MakeBrief(open);
  other.set_spec_digest(SpecDigest(OpenOf(41).spec()));
  refused(other, &*before);
  other = MakeBrief(open);
  other.mutable_spec()->set_name("another");
  refused(other, &*before);
  other = MakeBrief(open);
  other.mutable_spec()->set_seed(5);  // more than the name
  refused(other, &*before);
  other = MakeBrief(open);
  *other.mutable_tiling() = EvenTiling(4);
  refused(other, &*before);
  // What a brief Open brings is looked at.
  other = MakeBrief(open);
  other.mutable_table()->mutable_shards(0)->clear_holders();
  EXPECT_TRUE(absl::IsInvalidArgument(EpochPlan::Make(other, &*before).status()));
}

}  // namespace
}  // namespace ballast::model
