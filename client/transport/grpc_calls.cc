#include "ballast/client/transport/grpc_calls.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "ballast/client/transport/grpc_pull_reader.h"
#include "ballast/client/transport/grpc_status.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// gRPC's codes and absl's are the same numbers: this is the whole table.
static_assert(static_cast<int>(grpc::StatusCode::CANCELLED) == static_cast<int>(absl::StatusCode::kCancelled));
static_assert(static_cast<int>(grpc::StatusCode::DEADLINE_EXCEEDED) ==
              static_cast<int>(absl::StatusCode::kDeadlineExceeded));
static_assert(static_cast<int>(grpc::StatusCode::UNAVAILABLE) == static_cast<int>(absl::StatusCode::kUnavailable));
static_assert(static_cast<int>(grpc::StatusCode::UNAUTHENTICATED) ==
              static_cast<int>(absl::StatusCode::kUnauthenticated));

void ReleasePush(void* call) { static_cast<PushCall*>(call)->Release(); }

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::RpcStatus wire;
  if (!status.error_details().empty() && wire.ParseFromString(status.error_details()) && wire.code() != 0) {
    return FromWire(wire);
  }
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  if (code == absl::StatusCode::kUnavailable) return model::Error(code, model::kServerDown, status.error_message());
  // A refusal by gRPC itself, not by a server (a server's has details). gRPC drops calls when all calls together hold
  // too much memory, and a dropped call succeeds later. A message beyond the size limit never succeeds.
  if (code == absl::StatusCode::kResourceExhausted && !absl::StrContains(status.error_message(), "larger than max")) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy, status.error_message());
  }
  return absl::Status(code, status.error_message());
}

grpc::Status CallSet::Erase(grpc::ClientContext* context, const grpc::Status& status) {
  bool cancelled = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto call = cancelled_.find(context);
    cancelled = call->second;
    cancelled_.erase(call);
  }
  if (status.error_code() != grpc::StatusCode::CANCELLED || cancelled) return status;
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server reset the call, as it does when it stops");
}

grpc::ByteBuffer EncodePush(const v1::PushRequest& header, absl::Span<const std::byte> payload, PushCall* owner) {
  std::string head = header.SerializeAsString();
  head.push_back(static_cast<char>(kPayloadTag));
  for (uint64_t length = payload.size(); true; length >>= 7) {
    head.push_back(static_cast<char>((length & 0x7f) | (length > 0x7f ? 0x80 : 0)));
    if (length <= 0x7f) break;
  }
  const grpc::Slice slices[] = {
      grpc::Slice(head), grpc::Slice(const_cast<std::byte*>(payload.data()), payload.size(), &ReleasePush, owner)};
  return grpc::ByteBuffer(slices, 2);
}

}  // namespace ballast::client
