// Sockets that listen on an address, as all ports of a server do.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/model/address.h"

namespace ballast::model {

// One for each address of the host, not inherited and not blocking; at least one. `address->port`: 0 for a free one,
// then the port really taken. The error's message is the system's.
absl::StatusOr<std::vector<int>> ListenOn(Address* address, int backlog);

}  // namespace ballast::model
