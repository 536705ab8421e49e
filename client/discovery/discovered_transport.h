// Transports to servers that a registry names. If a server moves to another address, its transport follows.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/transport.h"
#include "ballast/proto/registry/registry_url.h"
#include "ballast/proto/registry/roster.h"

namespace ballast::client {

// Makes a transport to an address, or says why this client must not connect there.
using Connector = std::function<absl::StatusOr<std::unique_ptr<Transport>>(const std::string& address)>;

// Returns one transport for each server that `job` may use: the members in the job's key, with kSpares also servers
// that may become members; or without a key (or with an empty `job`) all servers registered at `url`. Waits as
// registry::AwaitServers does. Returns the errors of
// AwaitServers and of `connect`.
//
// When a call fails because its server seems down, a thread that all transports share reads the registry, at most twice
// a second, and less often the longer a server is away. Further calls to a server go to the address that is registered
// then. Calls under way at the old address end with UNAVAILABLE, and the router sends them again. A transport keeps the
// old address while the registry does not answer, or if `connect` refuses the new one.
absl::StatusOr<std::vector<std::unique_ptr<Transport>>> DiscoverTransports(const registry::RegistryUrl& url,
                                                                           Connector connect, const std::string& job,
                                                                           absl::Duration timeout,
                                                                           const std::function<bool()>& interrupted,
                                                                           registry::Servers which);

}  // namespace ballast::client
