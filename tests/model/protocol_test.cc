#include "ballast/proto/model/protocol.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::model {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using ::testing::HasSubstr;

void AddUnknown(Message* message, int number = 77) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(number, 1);
}

void ExpectDiffers(const absl::Status& status, absl::StatusCode code, const std::vector<std::string>& texts) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(ReasonOf(status), kVersionsDiffer) << status;
  for (const std::string& text : texts) EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  EXPECT_THAT(std::string(status.message()), HasSubstr("same version of Ballast on all servers and trainers"));
}

v1::OpenRequest MakeOpen() {
  v1::OpenRequest open;
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name("job");
  spec->set_chunk_elements(1 << 16);
  spec->set_group_count(1);
  v1::TensorSpec* tensor = spec->add_registrations()->add_tensors();
  tensor->set_name("w");
  tensor->set_unit("u");
  tensor->add_shape(1000);
  v1::Member* member = open.add_members();
  member->set_server_id("s");
  member->set_weight(1);
  *open.mutable_tiling() = EvenTiling(1);
  open.set_spec_digest(SpecDigest(*spec));
  open.set_protocol_version(kProtocolVersion);
  return open;
}

// Calls `visit` with `message`, each of its single fields changed in turn, and each list with one entry more.
void ChangeEachField(Message* message, const std::string& path, const std::function<void(const std::string&)>& visit) {
  const Reflection& access = *message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->field(i);
    const std::string name = absl::StrCat(path, ".", field->name());
    std::unique_ptr<Message> before(message->New());
    before->CopyFrom(*message);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        field->is_repeated() ? access.AddString(message, field, "x") : access.SetString(message, field, "other");
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        field->is_repeated() ? access.AddUInt64(message, field, 0)
                             : access.SetUInt64(message, field, access.GetUInt64(*message, field) + 1);
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        access.SetInt64(message, field, access.GetInt64(*message, field) - 1);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        access.SetUInt32(message, field, access.GetUInt32(*message, field) + 1);
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        access.SetBool(message, field, !access.GetBool(*message, field));
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        access.SetEnumValue(message, field, access.GetEnumValue(*message, field) + 1);
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        ChangeEachField(access.MutableRepeatedMessage(message, field, 0), name, visit);
        access.AddMessage(message, field);
        break;
      default:
        FAIL() << "a field that this test does not change: " << name;
    }
    visit(name);
    message->CopyFrom(*before);
  }
}

TEST(SpecDigestTest, EveryFieldOfTheSpecMovesIt) {
  v1::JobSpec spec = MakeOpen().spec();
  std::set<std::string> digests = {SpecDigest(spec)};
  EXPECT_EQ(digests.begin()->size(), 32u);
  int fields = 0;
  ChangeEachField(&spec, "JobSpec", [&](const std::string& name) {
    ++fields;
    EXPECT_TRUE(digests.insert(SpecDigest(spec)).second) << name;
  });
  EXPECT_EQ(fields, 15 + 2 + 10) << "JobSpec, Registration, TensorSpec";
  EXPECT_TRUE(digests.contains(SpecDigest(spec))) << "the spec is back, and so is its digest";
}

// Logs hold digests: another rule would make every job of an older version unreadable.
TEST(SpecDigestTest, StaysWhatItIs) {
  v1::JobSpec spec;
  EXPECT_EQ(absl::BytesToHexString(SpecDigest(spec)),
            "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc");
  EXPECT_EQ(absl::BytesToHexString(SpecDigest(MakeOpen().spec())),
            "223c752adbcbd63f4ff38dedc55979779e2f70616e8e1276762a4f4eb67c5da3");
}

TEST(SpecDigestTest, AFieldAtItsDefaultAndAnUnknownFieldAreNotInIt) {
  v1::JobSpec spec = MakeOpen().spec();
  const std::string digest = SpecDigest(spec);
  spec.set_amsgrad(false);
  spec.set_pin_interval(0);
  AddUnknown(&spec);
  EXPECT_EQ(SpecDigest(spec), digest);
}

TEST(CheckOpenTest, TakesAnOpenWithItsDigestOrWithNone) {
  v1::OpenRequest open = MakeOpen();
  EXPECT_EQ(CheckOpen(open), absl::OkStatus());
  EXPECT_EQ(CheckSentOpen(open), absl::OkStatus());
  open.clear_protocol_version();
  EXPECT_EQ(CheckOpen(open), absl::OkStatus()) << "logs of version 4 hold such";
  ExpectDiffers(CheckSentOpen(open), absl::StatusCode::kInvalidArgument, {"job 'job'", "version 4 or before"});
  open.set_protocol_version(kProtocolVersion + 1);
  ExpectDiffers(CheckOpen(open), absl::StatusCode::kInvalidArgument,
                {"job 'job'", absl::StrCat("is of protocol version ", kProtocolVersion + 1)});
  open.clear_protocol_version();
  open.clear_spec_digest();
  EXPECT_EQ(CheckOpen(open), absl::OkStatus());
  EXPECT_TRUE(EpochPlan::Make(open).ok()) << "logs of version 0 hold such";
  ExpectDiffers(CheckSentOpen(open), absl::StatusCode::kInvalidArgument, {"job 'job'", "without spec_digest"});
}

TEST(CheckOpenTest, RefusesTheDigestOfAnotherSpec) {
  v1::OpenRequest open = MakeOpen();
  open.mutable_spec()->set_amsgrad(true);
  for (const absl::Status& status : {CheckOpen(open), EpochPlan::Make(open).status()}) {
    ExpectDiffers(status, absl::StatusCode::kInvalidArgument,
                  {"job 'job'", absl::StrCat("as protocol version ", kProtocolVersion, " reads it")});
  }
}

TEST(CheckOpenTest, NamesTheMessageWithAFieldOfALaterVersion) {
  const std::pair<const char*, std::function<Message*(v1::OpenRequest*)>> places[] = {
      {"ballast.v1.OpenRequest", [](auto* open) { return open; }},
      {"ballast.v1.Epoch", [](auto* open) { return open->mutable_epoch(); }},
      {"ballast.v1.JobSpec", [](auto* open) { return open->mutable_spec(); }},
      {"ballast.v1.Registration", [](auto* open) { return open->mutable_spec()->mutable_registrations(0); }},
      {"ballast.v1.TensorSpec",
       [](auto* open) { return open->mutable_spec()->mutable_registrations(0)->mutable_tensors(0); }},
      {"ballast.v1.RankRange", [](auto* open) { return open->mutable_tiling()->add_ranges(); }},
      {"ballast.v1.Member", [](auto* open) { return open->mutable_members(0); }},
      {"ballast.v1.Verdict", [](auto* open) { return open->mutable_base_decision()->mutable_verdict(); }},
  };
  for (const auto& [name, place] : places) {
    v1::OpenRequest open = MakeOpen();
    AddUnknown(place(&open), 99);
    for (const absl::Status& status : {CheckOpen(open), CheckSentOpen(open), EpochPlan::Make(open).status()}) {
      ExpectDiffers(status, absl::StatusCode::kInvalidArgument, {absl::StrCat("a ", name, " came with field 99")});
    }
  }
}

TEST(CheckServerVersionTest, NamesServerVersionAndFix) {
  EXPECT_EQ(CheckServerVersion("'s0' at host:1", kProtocolVersion), absl::OkStatus());
  const std::string expected = absl::StrCat("expected version ", kProtocolVersion);
  ExpectDiffers(CheckServerVersion("'s0' at host:1", kProtocolVersion + 1), absl::StatusCode::kFailedPrecondition,
                {"server 's0' at host:1", absl::StrCat("protocol version ", kProtocolVersion + 1), expected});
  ExpectDiffers(CheckServerVersion("host:1", 0), absl::StatusCode::kFailedPrecondition,
                {"server host:1", "protocol version 0 (it does not know Identify)", expected});
}

}  // namespace
}  // namespace ballast::model
