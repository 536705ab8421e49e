// A push's message, whose payload stays where gRPC received it if it is large.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/threads/pushed_bytes.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

struct PushMessage {
  grpc::ByteBuffer buffer;           // of a large payload
  std::string joined;                // another payload: a push may wait, and would keep gRPC's receive buffers
  v1::PushRequest header;            // without the payload
  PushedBytes::Pieces payload = {};  // in `buffer` or `joined`
};

// Takes the bytes out of `message`. INVALID_ARGUMENT (BAD_REQUEST): they are no PushRequest, or have more than a header
// of 16 KiB and one payload.
absl::StatusOr<std::shared_ptr<PushMessage>> ReadPush(grpc::ByteBuffer* message);

}  // namespace ballast::services
