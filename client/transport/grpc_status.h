// Errors on the wire: absl::Status <-> google.rpc.Status with one google.rpc.ErrorInfo. Used for gRPC's
// "grpc-status-details-bin" trailer and for errors exchanged between ranks.
#pragma once

#include "absl/status/status.h"
#include "ballast/v1/error.pb.h"

namespace ballast::client {

// The reason (model::ReasonOf) becomes ErrorInfo.reason, domain "ballast"; details (model::DetailsOf) become
// its metadata.
v1::RpcStatus ToWire(const absl::Status& status);

// Returns the status spelled by `wire`; codes out of range become UNKNOWN. Ignores ErrorInfo of foreign domains.
absl::Status FromWire(const v1::RpcStatus& wire);

}  // namespace ballast::client
