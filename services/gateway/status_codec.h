// The table from this project's errors to gRPC's: the same code, the message, and a google.rpc.Status with one
// ErrorInfo in the details, as standard tools read it.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace ballast::services {

grpc::Status ToGrpc(const absl::Status& status);
// The status that a server sent, with its reason if ErrorInfo's domain is ours.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace ballast::services
