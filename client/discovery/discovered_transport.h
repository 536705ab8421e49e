// Transports to servers found in a registry, and found again at another address.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/transport.h"
#include "ballast/proto/registry/registry_url.h"

namespace ballast::client {

// Makes a transport to an address, or says why this client must not connect there.
using Connector = std::function<absl::StatusOr<std::unique_ptr<Transport>>(const std::string& address)>;

// Returns a transport per server registered at `url` that `job` (empty: none) may lie on. Waits for servers, and fails,
// as registry::AwaitServers and `connect`. A server whose new address `connect` refuses stays at its old one.
//
// When a call fails as if its server were down, one thread for all the transports reads the registry, at most twice a
// second, and the less often the longer a server is away. Further calls to a server go to the address that is
// registered then. Calls under way at the old address end with UNAVAILABLE, so that the router sends them again. While
// the registry does not answer, each server keeps its last known address.
absl::StatusOr<std::vector<std::unique_ptr<Transport>>> DiscoverTransports(const registry::RegistryUrl& url,
                                                                           Connector connect, const std::string& job,
                                                                           absl::Duration timeout,
                                                                           const std::function<bool()>& interrupted);

}  // namespace ballast::client
