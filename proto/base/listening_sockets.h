// Sockets that listen on an address, as all ports of a server do.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/base/address.h"

namespace ballast::model {

// One for each address of the host, not inherited and not blocking; at least one. `address->port`: 0 for a free one,
// then the port really taken. The error's message is the system's.
absl::StatusOr<std::vector<int>> ListenOn(Address* address, int backlog);

// As gRPC spells a peer, "ipv4:10.0.0.3:4711", but without a scope and without percent signs; "unknown" for an address
// of no host.
std::string PeerName(const sockaddr_storage& address);
// The peer of a connection; "unknown" once the connection is gone.
std::string PeerName(int fd);

}  // namespace ballast::model
