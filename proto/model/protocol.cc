#include "ballast/proto/model/protocol.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/field_hash.h"

namespace ballast::model {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr char kSameVersions[] = "run the same version of Ballast on all servers and trainers";

absl::Status Unknown(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kVersionsDiffer, absl::StrCat(message, "; ", kSameVersions));
}

// The first message with unknown fields, and the number of one of them. Passes over `checked`.
struct UnknownField {
  std::string message;
  int number = 0;
};

std::optional<UnknownField> FindUnknown(const Message& message, const Message* checked = nullptr) {
  if (&message == checked) return std::nullopt;
  const Reflection& access = *message.GetReflection();
  const auto& unknown = access.GetUnknownFields(message);
  if (!unknown.empty()) return UnknownField{message.GetDescriptor()->full_name(), unknown.field(0).number()};
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      if (!access.HasField(message, field)) continue;
      if (auto found = FindUnknown(access.GetMessage(message, field), checked); found.has_value()) return found;
      continue;
    }
    for (int j = 0; j < access.FieldSize(message, field); ++j) {
      if (auto found = FindUnknown(access.GetRepeatedMessage(message, field, j), checked); found.has_value())
        return found;
    }
  }
  return std::nullopt;
}

void AddFields(const Message& message, FieldHash* hash);

// `index`: of an element of a repeated field; -1 for a single field.
void AddValue(const Message& message, const FieldDescriptor* field, int index, FieldHash* hash) {
  const Reflection& access = *message.GetReflection();
  const auto get = [&](auto of_field, auto of_element) {
    return index < 0 ? (access.*of_field)(message, field) : (access.*of_element)(message, field, index);
  };
  std::string scratch;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return hash->Add(static_cast<uint64_t>(get(&Reflection::GetInt32, &Reflection::GetRepeatedInt32)));
    case FieldDescriptor::CPPTYPE_INT64:
      return hash->Add(static_cast<uint64_t>(get(&Reflection::GetInt64, &Reflection::GetRepeatedInt64)));
    case FieldDescriptor::CPPTYPE_UINT32:
      return hash->Add(uint64_t{get(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32)});
    case FieldDescriptor::CPPTYPE_UINT64:
      return hash->Add(uint64_t{get(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64)});
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return hash->Add(get(&Reflection::GetDouble, &Reflection::GetRepeatedDouble));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return hash->Add(double{get(&Reflection::GetFloat, &Reflection::GetRepeatedFloat)});
    case FieldDescriptor::CPPTYPE_BOOL:
      return hash->Add(uint64_t{get(&Reflection::GetBool, &Reflection::GetRepeatedBool)});
    case FieldDescriptor::CPPTYPE_ENUM:
      return hash->Add(static_cast<uint64_t>(get(&Reflection::GetEnumValue, &Reflection::GetRepeatedEnumValue)));
    case FieldDescriptor::CPPTYPE_STRING:
      return hash->Add(absl::string_view(index < 0
                                             ? access.GetStringReference(message, field, &scratch)
                                             : access.GetRepeatedStringReference(message, field, index, &scratch)));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return AddFields(index < 0 ? access.GetMessage(message, field) : access.GetRepeatedMessage(message, field, index),
                       hash);
  }
}

void AddFields(const Message& message, FieldHash* hash) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);  // by number, without defaults
  for (const FieldDescriptor* const field : fields) {
    hash->Add(static_cast<uint64_t>(field->number()));
    if (!field->is_repeated()) {
      AddValue(message, field, -1, hash);
      continue;
    }
    const int size = message.GetReflection()->FieldSize(message, field);
    hash->Add(static_cast<uint64_t>(size));
    for (int i = 0; i < size; ++i) AddValue(message, field, i, hash);
  }
  hash->Add(uint64_t{0});  // the end: no field has this number
}

}  // namespace

const char* Version() { return BALLAST_VERSION; }

std::string TargetOf(absl::string_view server_id, uint64_t disk) {
  return absl::StrCat(server_id, "/", ShowDisk(disk));
}

std::string ShowDisk(uint64_t disk) { return absl::StrCat(absl::Hex(disk, absl::kZeroPad16)); }

absl::Status CheckServerVersion(absl::string_view server, uint32_t version) {
  if (version == kProtocolVersion) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition, kVersionsDiffer,
               absl::StrCat("server ", server, " speaks protocol version ", version,
                            version == 0 ? " (it does not know Identify)" : "", "; expected version ", kProtocolVersion,
                            ", which this trainer speaks; ", kSameVersions));
}

absl::Status CheckKnown(const Message& message, const Message* checked) {
  const auto unknown = FindUnknown(message, checked);
  if (!unknown.has_value()) return absl::OkStatus();
  return Unknown(absl::StrCat("a ", unknown->message, " came with field ", unknown->number, ", which protocol version ",
                              kProtocolVersion, " does not have: a later version made it"));
}

std::string SpecDigest(const v1::JobSpec& spec) {
  FieldHash hash;
  AddFields(spec, &hash);
  return hash.Finish();
}

absl::Status CheckSentVersion(absl::string_view what, uint32_t version) {
  if (version == kProtocolVersion) return absl::OkStatus();
  return Unknown(absl::StrCat(
      what, " came from ",
      version == 0 ? "protocol version 4 or before, which do not say" : absl::StrCat("protocol version ", version),
      "; expected version ", kProtocolVersion, ", which this server speaks"));
}

absl::Status CheckOpen(const v1::OpenRequest& open, SpecIs spec) {
  const bool checked = spec == SpecIs::kChecked;
  BALLAST_RETURN_IF_ERROR(CheckKnown(open, checked ? &open.spec() : nullptr));
  if (open.protocol_version() > kProtocolVersion) {
    return Unknown(absl::StrCat("the Open of job '", open.spec().name(), "' is of protocol version ",
                                open.protocol_version(), "; expected version ", kProtocolVersion, " or before"));
  }
  if (checked || open.spec_digest().empty() || open.spec_digest() == SpecDigest(open.spec())) return absl::OkStatus();
  return Unknown(absl::StrCat("the Open of job '", open.spec().name(),
                              "' came with a spec_digest that is not the digest of its spec as protocol version ",
                              kProtocolVersion, " reads it: the version that made it reads the spec otherwise"));
}

absl::Status CheckSentOpen(const v1::OpenRequest& open) {
  BALLAST_RETURN_IF_ERROR(CheckKnown(open));
  if (!open.spec_digest().empty()) {
    return CheckSentVersion(absl::StrCat("the Open of job '", open.spec().name(), "'"), open.protocol_version());
  }
  return Unknown(absl::StrCat("the Open of job '", open.spec().name(), "' came without spec_digest, as of protocol ",
                              "version 0; expected version ", kProtocolVersion, ", which this server speaks"));
}

}  // namespace ballast::model
