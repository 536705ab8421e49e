// The one table from this project's errors to gRPC's: same code, the message, and a google.rpc.Status with one
// ErrorInfo in the details, which standard tools read.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace ballast::services {

grpc::Status ToGrpc(const absl::Status& status);
// The status that a server sent; the reason is restored where ErrorInfo's domain is ours.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace ballast::services
