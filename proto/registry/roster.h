// Waits for a job's servers: those in its key, or as many as the URL asks for.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/random/random.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::registry {

// Pauses between a client's questions to the registry: each is about twice the last, up to two seconds, with jitter.
class Pauses {
 public:
  absl::Duration Next();

 private:
  absl::Duration full_ = absl::Milliseconds(100);
  absl::BitGen random_;
};

// kMembers: of a job with a key, its members alone. kSpares: if the key says where chunks are, also servers that serve
// and may become members.
enum class Servers { kMembers, kSpares };

// Waits for servers and returns their entries, by id. If `job` (empty: none) has a key, waits until all its members are
// registered, and returns these. If the key says where chunks are, it is enough that each chunk is on a member that is
// registered: members that are not come with the address where they were last seen, unless another server has their
// name by now. Otherwise waits until as many
// servers are registered as the registry's URL asks for, and returns all. After `timeout`: UNAVAILABLE (SERVER_DOWN)
// with the members that are missing or the servers found, or the error of List. CANCELLED once `interrupted` (which may
// be empty) returns true. FAILED_PRECONDITION (OTHER_SERVER) at once if another server now has a member's name.
absl::StatusOr<std::vector<v1::ServerEntry>> AwaitServers(Registry* registry, const std::string& job,
                                                          absl::Duration timeout,
                                                          const std::function<bool()>& interrupted,
                                                          Servers which = Servers::kMembers);

// Returns the members of `key` that `entries` has, in the key's order, and adds the other members to `missing`. A
// server with a member's name but another data directory is not the member.
std::vector<v1::ServerEntry> MembersAmong(const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries,
                                          std::vector<v1::Member>* missing);
// Whether the key says which server has which chunks, of which there may be copies.
bool HasCopies(const v1::JobKey& key);
// FAILED_PRECONDITION (OTHER_SERVER) if an entry has a member's name and another directory.
absl::Status CheckMembers(const std::string& job, const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries);
// "'e1' (last seen at host:port), 'e2'"
std::string ShowMembers(const std::vector<v1::Member>& members);

// Addresses for a user's list of servers: the list itself, or the servers that are registered at its URL.
absl::StatusOr<std::vector<std::string>> FindServers(const std::vector<std::string>& servers, absl::Duration timeout);

}  // namespace ballast::registry
