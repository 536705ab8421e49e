#include "ballast/services/gateway/status_codec.h"

#include <string>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/v1/error.pb.h"
#include "ballast/v1/types.pb.h"

namespace ballast::services {
namespace {

constexpr char kDomain[] = "ballast";
constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
// Messages name bounded things, but some quote a request; gRPC drops whole trailers beyond its metadata limit of 8 KiB.
constexpr size_t kMessageBytesMax = 2048, kDetailBytesMax = 512;

constexpr bool SameNumber(absl::StatusCode ours, grpc::StatusCode theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
// The table of codes is the identity, as these assertions check.
static_assert(SameNumber(absl::StatusCode::kOk, grpc::StatusCode::OK));
static_assert(SameNumber(absl::StatusCode::kCancelled, grpc::StatusCode::CANCELLED));
static_assert(SameNumber(absl::StatusCode::kUnknown, grpc::StatusCode::UNKNOWN));
static_assert(SameNumber(absl::StatusCode::kInvalidArgument, grpc::StatusCode::INVALID_ARGUMENT));
static_assert(SameNumber(absl::StatusCode::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED));
static_assert(SameNumber(absl::StatusCode::kNotFound, grpc::StatusCode::NOT_FOUND));
static_assert(SameNumber(absl::StatusCode::kAlreadyExists, grpc::StatusCode::ALREADY_EXISTS));
static_assert(SameNumber(absl::StatusCode::kPermissionDenied, grpc::StatusCode::PERMISSION_DENIED));
static_assert(SameNumber(absl::StatusCode::kResourceExhausted, grpc::StatusCode::RESOURCE_EXHAUSTED));
static_assert(SameNumber(absl::StatusCode::kFailedPrecondition, grpc::StatusCode::FAILED_PRECONDITION));
static_assert(SameNumber(absl::StatusCode::kAborted, grpc::StatusCode::ABORTED));
static_assert(SameNumber(absl::StatusCode::kOutOfRange, grpc::StatusCode::OUT_OF_RANGE));
static_assert(SameNumber(absl::StatusCode::kUnimplemented, grpc::StatusCode::UNIMPLEMENTED));
static_assert(SameNumber(absl::StatusCode::kInternal, grpc::StatusCode::INTERNAL));
static_assert(SameNumber(absl::StatusCode::kUnavailable, grpc::StatusCode::UNAVAILABLE));
static_assert(SameNumber(absl::StatusCode::kDataLoss, grpc::StatusCode::DATA_LOSS));
static_assert(SameNumber(absl::StatusCode::kUnauthenticated, grpc::StatusCode::UNAUTHENTICATED));

// At most `bytes` of UTF-8 text, whole characters, as protobuf and gRPC's trailers need.
absl::string_view CutAtCharacter(absl::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message(CutAtCharacter(status.message(), kMessageBytesMax));
  v1::RpcStatus details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  if (const std::string reason = model::ReasonOf(status); !reason.empty()) {
    v1::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(kDomain);
    for (const auto& [key, value] : model::DetailsOf(status)) {
      if (key.size() + value.size() <= kDetailBytesMax) (*info.mutable_metadata())[key] = value;
    }
    google::protobuf::Any* any = details.add_details();
    any->set_type_url(kErrorInfoUrl);
    info.SerializeToString(any->mutable_value());
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message, details.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::ErrorInfo told;
  v1::RpcStatus details;
  if (details.ParseFromString(status.error_details())) {
    for (const google::protobuf::Any& any : details.details()) {
      v1::ErrorInfo info;
      const bool ours =
          any.type_url() == kErrorInfoUrl && info.ParseFromString(any.value()) && info.domain() == kDomain;
      if (ours) told = std::move(info);
    }
  }
  absl::Status error =
      model::Error(static_cast<absl::StatusCode>(status.error_code()), told.reason(), status.error_message());
  for (const auto& [key, value] : told.metadata()) model::SetDetail(key, value, &error);
  return error;
}

}  // namespace ballast::services
