#include "ballast/proto/registry/roster.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/registry/registry_url.h"

namespace ballast::registry {
namespace {

// Of one question of AwaitServers.
constexpr absl::Duration kAskMax = absl::Seconds(2);
constexpr absl::Duration kPauseMax = absl::Seconds(2);

}  // namespace

absl::Duration Pauses::Next() {
  const absl::Duration pause = full_ * absl::Uniform(random_, 0.5, 1.0);
  full_ = std::min(kPauseMax, full_ * 2);
  return pause;
}

std::string ShowMembers(const std::vector<v1::Member>& members) {
  return absl::StrJoin(members, ", ", [](std::string* out, const v1::Member& member) {
    absl::StrAppend(out, "'", member.server_id(), "'");
    if (!member.address().empty()) absl::StrAppend(out, " (last seen at ", member.address(), ")");
  });
}

std::vector<v1::ServerEntry> MembersAmong(const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries,
                                          std::vector<v1::Member>* missing) {
  std::vector<v1::ServerEntry> members;
  for (const v1::Member& member : key.table().members()) {
    const auto entry = std::find_if(entries.begin(), entries.end(), [&](const v1::ServerEntry& one) {
      return one.server_id() == member.server_id() && one.disk() == member.disk();
    });
    if (entry != entries.end()) {
      members.push_back(*entry);
    } else {
      missing->push_back(member);
    }
  }
  return members;
}

absl::Status CheckMembers(const std::string& job, const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries) {
  for (const v1::Member& member : key.table().members()) {
    for (const v1::ServerEntry& entry : entries) {
      const bool told = entry.disk() != 0;  // else an earlier release wrote it
      if (!told || entry.server_id() != member.server_id() || entry.disk() == member.disk()) continue;
      return model::Error(
          absl::StatusCode::kFailedPrecondition, model::kOtherServer,
          absl::StrCat("job '", job, "' lies on server '", member.server_id(), "' with data directory number ",
                       model::ShowDisk(member.disk()), ", and the server of that name at ", entry.address(),
                       " has number ", model::ShowDisk(entry.disk()),
                       ": its data directory is another one, without the job. Start the server with the directory that "
                       "it had; if that is lost for ever, drop the job: `ballastctl drop --job ",
                       job, " --lost ", member.server_id(), "`"));
    }
  }
  return absl::OkStatus();
}

namespace {

v1::ServerEntry LastSeen(const v1::Member& member) {
  v1::ServerEntry entry;
  entry.set_server_id(member.server_id());
  entry.set_disk(member.disk());
  entry.set_address(member.address());
  return entry;
}

// Whether each chunk is on a member that is registered.
bool IsCovered(const v1::JobKey& key, const std::vector<v1::ServerEntry>& entries) {
  std::vector<bool> registered;
  for (const v1::Member& member : key.table().members()) {
    registered.push_back(std::any_of(entries.begin(), entries.end(), [&](const v1::ServerEntry& one) {
      return one.server_id() == member.server_id() && one.disk() == member.disk();
    }));
  }
  return model::ShardsWithout(key.table(), registered, model::Copies::kAny).empty();
}

absl::Status NotEnough(const Registry& registry, const std::vector<v1::ServerEntry>& entries, absl::Duration timeout) {
  const std::string found = absl::StrJoin(entries, ", ", [](std::string* out, const v1::ServerEntry& entry) {
    absl::StrAppend(out, entry.server_id(), " at ", entry.address());
  });
  return model::Error(
      absl::StatusCode::kUnavailable, model::kServerDown,
      absl::StrCat("expected ", registry.url().servers, " servers at ", FormatRegistryUrl(registry.url()), " within ",
                   absl::FormatDuration(timeout), ", found ", entries.size(), entries.empty() ? "" : ": ", found,
                   "; do they run with this `discovery`?"));
}

absl::Status MembersMissing(const Registry& registry, const std::string& job, const std::vector<v1::Member>& missing,
                            const std::vector<v1::ServerEntry>& entries, absl::Duration timeout) {
  const auto name = [](std::string* out, const auto& server) { absl::StrAppend(out, server.server_id()); };
  return model::Error(
      absl::StatusCode::kUnavailable, model::kServerDown,
      absl::StrCat("job '", job, "' lies on servers that were not registered at ", FormatRegistryUrl(registry.url()),
                   " within ", absl::FormatDuration(timeout), ": ", ShowMembers(missing),
                   "; registered are: ", entries.empty() ? "none" : absl::StrJoin(entries, ", ", name),
                   ". Start those that are missing, with their data directories. If they are lost for ever, the job "
                   "is: drop it (`ballastctl drop --job ",
                   job, " --lost ", absl::StrJoin(missing, ",", name), "`), and the name is free for a new one"));
}

// The servers of a job with places, of which `missing` are not registered.
std::vector<v1::ServerEntry> WithOthers(std::vector<v1::ServerEntry> members, const std::vector<v1::Member>& missing,
                                        const std::vector<v1::ServerEntry>& entries, Servers which) {
  const auto has = [](const std::vector<v1::ServerEntry>& list, const std::string& id) {
    return std::any_of(list.begin(), list.end(), [&](const v1::ServerEntry& one) { return one.server_id() == id; });
  };
  for (const v1::ServerEntry& entry : entries) {
    const bool may_join = which == Servers::kSpares && entry.state() == v1::SERVER_STATE_SERVING;
    if (may_join && !has(members, entry.server_id())) members.push_back(entry);
  }
  for (const v1::Member& member : missing) {
    if (!has(members, member.server_id())) members.push_back(LastSeen(member));
  }
  return members;
}

}  // namespace

bool HasCopies(const v1::JobKey& key) { return !key.table().shards().empty(); }

absl::StatusOr<std::vector<v1::ServerEntry>> AwaitServers(Registry* registry, const std::string& job,
                                                          absl::Duration timeout,
                                                          const std::function<bool()>& interrupted, Servers which) {
  const absl::Time deadline = absl::Now() + timeout;
  Pauses pauses;
  for (;;) {
    const absl::Time until = std::min(deadline, absl::Now() + kAskMax);
    auto entries = registry->List(until);
    // The key is read after the entries: whoever finds none has seen at least the servers that the first group saw.
    absl::StatusOr<std::optional<Registry::Found<v1::JobKey>>> key = std::optional<Registry::Found<v1::JobKey>>();
    if (entries.ok() && !job.empty()) key = registry->FindJob(job, until);
    absl::Status trouble;
    if (!entries.ok() || !key.ok()) {
      trouble = entries.ok() ? key.status() : entries.status();
      if (!absl::IsUnavailable(trouble)) return trouble;
    } else if (key->has_value()) {
      const bool has_copies = HasCopies((*key)->value);
      if (!has_copies) BALLAST_RETURN_IF_ERROR(CheckMembers(job, (*key)->value, *entries));
      std::vector<v1::Member> missing;
      std::vector<v1::ServerEntry> members = MembersAmong((*key)->value, *entries, &missing);
      if (!has_copies && missing.empty()) return members;
      if (has_copies && IsCovered((*key)->value, *entries)) {
        return WithOthers(std::move(members), missing, *entries, which);
      }
      trouble = MembersMissing(*registry, job, missing, *entries, timeout);
    } else {
      if (entries->size() >= registry->url().servers) return entries;
      trouble = NotEnough(*registry, *entries, timeout);
    }
    if (interrupted && interrupted()) return absl::CancelledError("interrupted while servers were looked for");
    const absl::Duration pause = pauses.Next();
    if (absl::Now() + pause >= deadline) return trouble;
    absl::SleepFor(pause);
  }
}

absl::StatusOr<std::vector<std::string>> FindServers(const std::vector<std::string>& servers, absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<RegistryUrl> urls, RegistryUrlIn(servers));
  if (urls.empty()) return servers;
  Registry registry(urls.front());
  BALLAST_ASSIGN_OR_RETURN(const auto entries, AwaitServers(&registry, "", timeout, nullptr));
  std::vector<std::string> addresses;
  for (const v1::ServerEntry& entry : entries) addresses.push_back(entry.address());
  return addresses;
}

}  // namespace ballast::registry
