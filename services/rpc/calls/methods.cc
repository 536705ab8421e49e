#include "ballast/services/rpc/calls/methods.h"

#include "ballast/proto/model/status.h"

namespace ballast::services {

void FailUnparsed(CallReactor* reactor, const google::protobuf::Message& type) {
  reactor->Fail(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                             absl::StrCat("the bytes that came are no ", type.GetTypeName())));
}

bool ParseMessage(CallReactor* reactor, const grpc::ByteBuffer& bytes, google::protobuf::Message* to) {
  grpc::ByteBuffer buffer(bytes);  // shares the slices; deserialising consumes its buffer
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, google::protobuf::Message>(&buffer, to).ok()) return true;
  FailUnparsed(reactor, *to);
  return false;
}

}  // namespace ballast::services
