#include "ballast/services/tools/drop_command.h"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/proto/registry/roster.h"

namespace ballast::services {
namespace {

constexpr int kDropped = 0, kLeft = 1;

using Key = registry::Registry::Found<v1::JobKey>;

bool DropAt(const std::string& server, const DropCommand& command) {
  const absl::Status status = DropJob(server, command.job, command.asking);
  const bool had_none = absl::IsNotFound(status);
  std::printf("%s: %s\n", server.c_str(),
              status.ok() ? absl::StrCat("dropped job '", command.job, "'").c_str()
              : had_none  ? absl::StrCat("has no job '", command.job, "'").c_str()
                          : std::string(status.message()).c_str());
  return status.ok() || had_none;
}

absl::Status BadLost(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      absl::StrCat("--lost: ", message, "; nothing was dropped"));
}

// All members of the key are among `entries` or said to be lost, and none is both.
absl::Status CheckLost(const DropCommand& command, const Key& key, const std::vector<v1::ServerEntry>& entries) {
  std::vector<v1::Member> missing;
  for (const v1::ServerEntry& entry : registry::MembersAmong(key.value, entries, &missing)) {
    if (std::find(command.lost.begin(), command.lost.end(), entry.server_id()) == command.lost.end()) continue;
    return BadLost(absl::StrCat("server '", entry.server_id(), "' is at ", entry.address(), "; leave it out"));
  }
  for (const std::string& lost : command.lost) {
    const bool is_member = std::any_of(missing.begin(), missing.end(),
                                       [&](const v1::Member& member) { return member.server_id() == lost; });
    if (!is_member) return BadLost(absl::StrCat("job '", command.job, "' has no member '", lost, "' that is missing"));
  }
  std::erase_if(missing, [&](const v1::Member& member) {
    return std::find(command.lost.begin(), command.lost.end(), member.server_id()) != command.lost.end();
  });
  if (missing.empty()) return absl::OkStatus();
  const std::string names = absl::StrJoin(
      missing, ",", [](std::string* out, const v1::Member& member) { absl::StrAppend(out, member.server_id()); });
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                      absl::StrCat("job '", command.job,
                                   "' lies on servers that are not registered now: ", registry::ShowMembers(missing),
                                   ". Start them, so that they forget the job too; or, if they are lost ",
                                   "for ever, add --lost ", names, ". Nothing was dropped"));
}

absl::Status Erase(const DropCommand& command, const Key& key, registry::Registry* registry) {
  BALLAST_ASSIGN_OR_RETURN(const bool erased,
                           registry->EraseJob(command.job, key.revision, absl::Now() + command.asking.timeout));
  if (!erased) {
    return model::Error(absl::StatusCode::kAborted, model::kBusy,
                        absl::StrCat("the key ", registry->JobKeyName(command.job),
                                     " changed meanwhile: a trainer opens the job. End it, and drop the job again"));
  }
  std::printf("%s: erased\n", registry->JobKeyName(command.job).c_str());
  // What an operator wanted of it concerns no later job of the name, and may stay if this fails.
  const absl::Time deadline = absl::Now() + command.asking.timeout;
  const auto wish = registry->FindWish(command.job, deadline);
  if (wish.ok() && wish->has_value()) (void)registry->EraseWish(command.job, (*wish)->revision, deadline);
  return absl::OkStatus();
}

// The addresses of all servers that are registered, and the job's key, which must not want others.
absl::StatusOr<std::vector<std::string>> LookUp(const DropCommand& command, registry::Registry* registry,
                                                std::optional<Key>* key) {
  const absl::Time deadline = absl::Now() + command.asking.timeout;
  BALLAST_ASSIGN_OR_RETURN(const auto entries, registry->List(deadline));
  BALLAST_ASSIGN_OR_RETURN(*key, registry->FindJob(command.job, deadline));
  if (key->has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckLost(command, **key, entries));
  } else if (!command.lost.empty()) {
    return BadLost(absl::StrCat("job '", command.job, "' has no key ", registry->JobKeyName(command.job),
                                ", so nothing waits for servers that are lost; leave --lost out"));
  }
  std::vector<std::string> addresses;
  for (const v1::ServerEntry& entry : entries) addresses.push_back(entry.address());
  return addresses;
}

int Complain(const absl::Status& status) {
  std::fprintf(stderr, "ballastctl: drop: %s\n", std::string(status.message()).c_str());
  return kLeft;
}

}  // namespace

int RunDrop(const DropCommand& command) {
  const auto urls = registry::RegistryUrlIn(command.servers);
  if (!urls.ok()) return Complain(urls.status());
  std::vector<std::string> servers = command.servers;
  std::optional<registry::Registry> registry;
  std::optional<Key> key;
  if (urls->empty() && !command.lost.empty()) {
    return Complain(BadLost("only a registry knows of members; name it by --servers etcd://host:port/prefix"));
  }
  if (!urls->empty()) {
    registry.emplace(urls->front());
    auto found = LookUp(command, &*registry, &key);
    if (!found.ok()) return Complain(found.status());
    servers = *std::move(found);
  }
  bool dropped = true;
  for (const std::string& server : servers) dropped = DropAt(server, command) && dropped;
  if (!dropped) return kLeft;
  if (key.has_value()) {
    if (const absl::Status erased = Erase(command, *key, &*registry); !erased.ok()) return Complain(erased);
  }
  return kDropped;
}

}  // namespace ballast::services
