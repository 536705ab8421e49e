// Where servers are registered, and with which identity a program connects there:
// etcd://host:port[,host:port...]/prefix[?servers=N&ca=FILE&certificate=FILE&key=FILE&user=NAME&password_file=FILE].
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/proto/base/access.h"

namespace ballast::registry {

struct RegistryUrl {
  std::vector<std::string> endpoints;  // host:port of etcd's members
  std::string prefix;                  // "training/run7": keys are /training/run7/servers/ID
  uint32_t servers = 1;                // how many must be registered before a client goes on
  // TLS towards etcd: the CAs of its members, a certificate of one's own. No token_file.
  model::Access access;
  // etcd's own users; empty: none. The file holds the password.
  std::string user, password_file;

  std::vector<std::string> files() const { return {access.ca, access.certificate, access.key, password_file}; }
};

bool IsRegistryUrl(absl::string_view text);

// INVALID_ARGUMENT (BAD_CONFIG) for anything else, for a certificate without its key or without `ca`, for a user
// without a password, and for a password that would travel in the clear. A prefix has letters, digits, '.', '_', '-'
// and '/'; files have no '&' in their paths. Reads no file.
absl::StatusOr<RegistryUrl> ParseRegistryUrl(absl::string_view text);

// The URL in a user's list of servers, or an empty vector if the list names servers. Programs cut lists at commas, so
// `servers` may be the pieces of one URL. INVALID_ARGUMENT (BAD_CONFIG) for a list with a URL and other servers.
absl::StatusOr<std::vector<RegistryUrl>> RegistryUrlIn(const std::vector<std::string>& servers);

// INVALID_ARGUMENT (BAD_CONFIG) unless `servers` are addresses, or the URL of a registry.
absl::Status CheckServers(const std::vector<std::string>& servers);

// Without files and user: for messages.
std::string FormatRegistryUrl(const RegistryUrl& url);

}  // namespace ballast::registry
