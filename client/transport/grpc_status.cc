#include "ballast/client/transport/grpc_status.h"

#include "ballast/proto/base/status.h"
#include "ballast/v1/types.pb.h"

namespace ballast::client {
namespace {
constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kDomain[] = "ballast";
}  // namespace

v1::RpcStatus ToWire(const absl::Status& status) {
  v1::RpcStatus wire;
  wire.set_code(static_cast<int32_t>(status.code()));
  wire.set_message(std::string(status.message()));
  if (const std::string reason = model::ReasonOf(status); !reason.empty()) {
    v1::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(kDomain);
    for (const auto& [key, value] : model::DetailsOf(status)) (*info.mutable_metadata())[key] = value;
    google::protobuf::Any* detail = wire.add_details();
    detail->set_type_url(kErrorInfoUrl);
    detail->set_value(info.SerializeAsString());
  }
  return wire;
}

absl::Status FromWire(const v1::RpcStatus& wire) {
  if (wire.code() == 0) return absl::OkStatus();
  const auto code = wire.code() > 0 && wire.code() <= static_cast<int32_t>(absl::StatusCode::kUnauthenticated)
                        ? static_cast<absl::StatusCode>(wire.code())
                        : absl::StatusCode::kUnknown;
  for (const google::protobuf::Any& detail : wire.details()) {
    v1::ErrorInfo info;
    if (detail.type_url() == kErrorInfoUrl && info.ParseFromString(detail.value()) && info.domain() == kDomain) {
      absl::Status status = model::Error(code, info.reason(), wire.message());
      for (const auto& [key, value] : info.metadata()) model::SetDetail(key, value, &status);
      return status;
    }
  }
  return absl::Status(code, wire.message());
}

}  // namespace ballast::client
