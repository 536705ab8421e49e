// The servers with which a program goes on: those of a job's key, or as many as the URL wants.
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

// Pauses between questions that many ask at a time: each about twice the last, up to two seconds, and none the same.
class Pauses {
 public:
  absl::Duration Next();

 private:
  absl::Duration full_ = absl::Milliseconds(100);
  absl::BitGen random_;
};

// Entries of servers that are registered at `url`, by id. If `job` (empty: none) has a key, those of its members, as
// soon as all are there; else all, as soon as there are `url.servers`. Asks again until `timeout`, or until
// `interrupted` (which may be empty) says so; then UNAVAILABLE (SERVER_DOWN), naming the members that are missing or
// those found, or the error of List; CANCELLED if interrupted. FAILED_PRECONDITION (OTHER_SERVER) at once if a member's
// name is another server's now.
absl::StatusOr<std::vector<v1::ServerEntry>> AwaitServers(Registry* registry, const std::string& job,
                                                          absl::Duration timeout,
                                                          const std::function<bool()>& interrupted);

// The members of `key` among `entries`, in the key's order; the names of the others are added to `missing`. Whoever has
// a member's name and another directory is no member.
std::vector<v1::ServerEntry> MembersAmong(const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries,
                                          std::vector<v1::Member>* missing);
// FAILED_PRECONDITION (OTHER_SERVER) if an entry has a member's name and another directory.
absl::Status CheckMembers(const std::string& job, const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries);
// "'e1' (last seen at host:port), 'e2'"
std::string ShowMembers(const std::vector<v1::Member>& members);

// Addresses for a list that a user gave: the list itself, or what is registered at its URL.
absl::StatusOr<std::vector<std::string>> FindServers(const std::vector<std::string>& servers, absl::Duration timeout);

}  // namespace ballast::registry
