// Where servers are registered: etcd://host:port[,host:port...]/prefix[?servers=N].
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::registry {

struct RegistryUrl {
  std::vector<std::string> endpoints;  // host:port of etcd's members
  std::string prefix;                  // "training/run7": keys are /training/run7/servers/ID
  uint32_t servers = 1;                // how many must be registered before a client goes on
};

bool IsRegistryUrl(absl::string_view text);

// INVALID_ARGUMENT (BAD_CONFIG) for anything else. A prefix has letters, digits, '.', '_', '-' and '/'.
absl::StatusOr<RegistryUrl> ParseRegistryUrl(absl::string_view text);

// The URL of a list of servers that a user gave, or nothing where the list names servers. Programs cut lists at commas:
// `servers` may be a cut URL. INVALID_ARGUMENT (BAD_CONFIG) for a URL beside other servers.
absl::StatusOr<std::vector<RegistryUrl>> RegistryUrlIn(const std::vector<std::string>& servers);

// INVALID_ARGUMENT (BAD_CONFIG) unless `servers` are addresses, or the URL of a registry.
absl::Status CheckServers(const std::vector<std::string>& servers);

std::string FormatRegistryUrl(const RegistryUrl& url);

}  // namespace ballast::registry
