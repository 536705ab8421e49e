// The client's transport over gRPC.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/transport.h"

namespace ballast::client {

// `address`: "host:port". Connects lazily: a server that is down shows as UNAVAILABLE (SERVER_DOWN) on calls.
std::unique_ptr<Transport> MakeGrpcTransport(const std::string& address);
// One per address, for those that a user gave. INVALID_ARGUMENT (BAD_CONFIG) if one of them is no address of a server.
absl::StatusOr<std::vector<std::unique_ptr<Transport>>> MakeGrpcTransports(const std::vector<std::string>& addresses);

// glibc trims its heap around gRPC's read buffers, which costs more than the transfer itself: sets M_TRIM_THRESHOLD,
// M_MMAP_THRESHOLD and M_TOP_PAD for the process. Call once at program start; a library must not.
void TuneMallocForTransfers();

}  // namespace ballast::client
