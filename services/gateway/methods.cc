#include "ballast/services/gateway/methods.h"

#include <optional>

#include "ballast/proto/base/status.h"

namespace ballast::services {

absl::Status Unparsed(const google::protobuf::Descriptor* type) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                      absl::StrCat("the bytes that came are no ", type->full_name()));
}

absl::StatusOr<ParseRoom::Lease> TakeRoom(const google::protobuf::Descriptor* type, const grpc::ByteBuffer& message,
                                          ParseRoom* room) {
  BALLAST_RETURN_IF_ERROR(room->CheckFree(message.Length()));
  const std::optional<uint64_t> bytes = ParsedBytes(type, message, ParseRoom::kBytesMax);
  if (!bytes.has_value()) return Unparsed(type);
  return room->Take(*bytes);
}

bool ParseMessage(CallReactor* reactor, const grpc::ByteBuffer& bytes, google::protobuf::Message* to) {
  grpc::ByteBuffer buffer(bytes);  // shares the slices; deserialising consumes its buffer
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, google::protobuf::Message>(&buffer, to).ok()) return true;
  reactor->Fail(Unparsed(to->GetDescriptor()));
  return false;
}

}  // namespace ballast::services
