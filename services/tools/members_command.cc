#include "ballast/services/tools/members_command.h"

#include <algorithm>
#include <compare>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/model/wish.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/proto/registry/roster.h"
#include "ballast/services/tools/key_age.h"

namespace ballast::services {
namespace {

constexpr int kAllThere = 0, kNotAll = 1, kMisused = 2;

using Key = registry::Registry::Found<v1::JobKey>;

int Complain(const absl::Status& status, int code) {
  std::fprintf(stderr, "ballastctl: members: %s\n", std::string(status.message()).c_str());
  return code;
}

absl::Status NotRestored(absl::string_view why) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kKeyLost, absl::StrCat(why, ". Wrote nothing"));
}

// Shards of `places` that name the member.
std::vector<uint32_t> ShardsOf(const v1::Table& table, uint32_t member,
                               const google::protobuf::RepeatedField<uint32_t>& (v1::Shard::*places)() const) {
  std::vector<uint32_t> shards;
  for (int s = 0; s < table.shards_size(); ++s) {
    const auto& members = (table.shards(s).*places)();
    if (std::find(members.begin(), members.end(), member) != members.end()) {
      shards.push_back(static_cast<uint32_t>(s));
    }
  }
  return shards;
}

// "holds 341 of 1024 shards, has copied 12 of 20 others, gives up 3", as the server itself tells of its copies.
std::string ShowPlaces(const MembersCommand& command, const v1::Table& table, uint32_t member,
                       const std::string& address) {
  const std::vector<uint32_t> fills = ShardsOf(table, member, &v1::Shard::fillers);
  const size_t leaves = ShardsOf(table, member, &v1::Shard::leaving).size();
  std::string text = absl::StrCat("holds ", ShardsOf(table, member, &v1::Shard::holders).size(), " of ",
                                  table.shards_size(), " shards");
  if (!fills.empty()) {
    const auto job = address.empty() ? absl::StatusOr<v1::GetJobResponse>(absl::UnavailableError(""))
                                     : FetchJob(address, command.job, command.asking, /*without_open=*/true);
    const auto filled = std::count_if(fills.begin(), fills.end(), [&](uint32_t shard) {
      return job.ok() && model::HasBit(job->filled_shards(), shard);
    });
    absl::StrAppend(&text, job.ok() ? absl::StrCat(", has copied ", filled, " of ", fills.size(), " shards")
                                    : absl::StrCat(", is to copy ", fills.size(), " shards and does not answer"));
  }
  if (leaves > 0) absl::StrAppend(&text, ", gives ", leaves, " up once others have them");
  return text;
}

// Copies that were found to differ, as the servers tell that have them: each once.
void ShowDiffering(const MembersCommand& command, const std::vector<v1::ServerEntry>& there) {
  std::vector<std::string> addresses;
  for (const v1::ServerEntry& entry : there) addresses.push_back(entry.address());
  std::set<std::string> lines;
  for (const ServerView& server : LookAt(addresses, command.asking)) {
    for (const v1::JobStatus& job : server.status.jobs()) {
      if (job.name() == command.job) lines.insert(job.differing().begin(), job.differing().end());
    }
  }
  if (lines.empty()) return;
  std::printf("copies DIFFER, and which are right is not known (BallastReplicasDiffer in the runbook):\n");
  for (const std::string& line : lines) std::printf("  %s\n", line.c_str());
}

void ShowWish(const MembersCommand& command, const v1::Table& table, registry::Registry* registry) {
  const auto wish = registry->FindWish(command.job, absl::Now() + command.asking.timeout);
  if (!wish.ok()) {
    std::printf("what an operator wants of it cannot be read: %s\n", std::string(wish.status().message()).c_str());
  } else if (wish->has_value() && (*wish)->value.life() == table.life()) {
    std::printf("an operator wants %s\n", model::ShowWish(table, (*wish)->value).c_str());
  }
  const uint32_t wanted = model::WantedServers(
      table, wish.ok() && wish->has_value() && (*wish)->value.life() == table.life() ? (*wish)->value : v1::Wish());
  if (static_cast<uint32_t>(table.members_size()) < wanted) {
    std::printf("it wants %u servers, and has %d: its group takes further ones that are registered\n", wanted,
                table.members_size());
  }
}

int Show(const MembersCommand& command, const Key& key, const std::vector<v1::ServerEntry>& entries,
         registry::Registry* registry) {
  const v1::Table& table = key.value.table();
  std::vector<v1::Member> missing;
  const std::vector<v1::ServerEntry> there = registry::MembersAmong(key.value, entries, &missing);
  std::printf("job '%s': %d server(s), %u cop%s of each chunk, claimed by epoch %llu\n", command.job.c_str(),
              table.members_size(), std::max(1u, table.replicas()), table.replicas() > 1 ? "ies" : "y",
              static_cast<unsigned long long>(key.value.claimed().counter()));
  for (int m = 0; m < table.members_size(); ++m) {
    const v1::Member& member = table.members(m);
    const auto found = std::find_if(there.begin(), there.end(), [&](const v1::ServerEntry& entry) {
      return entry.server_id() == member.server_id();
    });
    std::string line = absl::StrCat("  ", member.server_id(), "  ");
    if (table.shards().empty()) {
      absl::StrAppend(&line, "its share of the chunks");
    } else {
      absl::StrAppend(
          &line, ShowPlaces(command, table, static_cast<uint32_t>(m), found != there.end() ? found->address() : ""));
    }
    absl::StrAppend(&line, found != there.end()
                               ? absl::StrCat("; registered at ", found->address())
                               : absl::StrCat("; NOT REGISTERED (last seen at ", member.address(), ")"));
    std::printf("%s\n", line.c_str());
  }
  if (const int lacking = model::ShortShards(table); lacking > 0) {
    std::printf("%d of %d shards have fewer than %u copies\n", lacking, table.shards_size(), table.replicas());
  }
  if (table.replicas() > 1) ShowDiffering(command, there);
  if (!table.shards().empty()) ShowWish(command, table, registry);
  return missing.empty() ? kAllThere : kNotAll;
}

// The job as each registered server has it.
absl::StatusOr<std::vector<v1::GetJobResponse>> AskAll(const MembersCommand& command,
                                                       const std::vector<v1::ServerEntry>& entries) {
  std::vector<v1::GetJobResponse> answers;
  for (const v1::ServerEntry& entry : entries) {
    auto answer = FetchJob(entry.address(), command.job, command.asking);
    if (!answer.ok()) {
      return NotRestored(absl::StrCat("server '", entry.server_id(), "' at ", entry.address(),
                                      " is registered and did not answer: ", answer.status().message()));
    }
    answers.push_back(*std::move(answer));
  }
  return answers;
}

// The key by the newest Open that a server knows. All its members must be in it: a server that is not may know a later
// table.
absl::StatusOr<v1::JobKey> KeyFrom(const MembersCommand& command, const std::vector<v1::GetJobResponse>& answers) {
  v1::JobKey key;
  const v1::OpenRequest* newest = nullptr;
  for (const v1::GetJobResponse& answer : answers) {
    if (model::Compare(answer.promised(), key.claimed()) > 0) *key.mutable_claimed() = answer.promised();
    if (answer.has_open() && (newest == nullptr || model::Compare(answer.open().epoch(), newest->epoch()) > 0)) {
      newest = &answer.open();
    }
  }
  if (newest == nullptr) {
    return NotRestored(absl::StrCat("no registered server has job '", command.job, "'"));
  }
  if (!newest->has_table()) {
    return NotRestored(absl::StrCat("the servers of job '", command.job,
                                    "' never change, and the next group that opens the job writes its key"));
  }
  for (const v1::Member& member : newest->table().members()) {
    const auto found = std::find_if(answers.begin(), answers.end(), [&](const v1::GetJobResponse& answer) {
      return answer.server_id() == member.server_id() && answer.disk() == member.disk();
    });
    if (found == answers.end()) {
      return NotRestored(absl::StrCat("server '", member.server_id(), "' (data directory number ",
                                      model::ShowDisk(member.disk()), ") is not registered, and may know of a later ",
                                      "table: start it"));
    }
    if (!found->has_open() || model::Compare(found->open().epoch(), newest->epoch()) != 0) {
      return NotRestored(absl::StrCat("server '", member.server_id(), "' is not in epoch ", newest->epoch().counter(),
                                      ", the newest that a server knows: the table of that epoch may not be the last"));
    }
  }
  *key.mutable_table() = newest->table();
  return key;
}

absl::Status Restore(const MembersCommand& command, const std::optional<Key>& key,
                     const std::vector<v1::ServerEntry>& entries, registry::Registry* registry) {
  BALLAST_ASSIGN_OR_RETURN(const auto answers, AskAll(command, entries));
  BALLAST_ASSIGN_OR_RETURN(const v1::JobKey restored, KeyFrom(command, answers));
  // An older table may stand beside the newest claim, if a backup was taken just then.
  const bool same =
      key.has_value() && key->value.table().members_size() == restored.table().members_size() &&
      std::equal(restored.table().shards().begin(), restored.table().shards().end(),
                 key->value.table().shards().begin(), key->value.table().shards().end(),
                 [](const v1::Shard& a, const v1::Shard& b) { return a.SerializeAsString() == b.SerializeAsString(); });
  const auto order =
      key.has_value() ? model::Compare(key->value.claimed(), restored.claimed()) : std::strong_ordering::less;
  if (order > 0 || (order == 0 && same)) {
    return NotRestored(absl::StrCat("the key ", registry->JobKeyName(command.job),
                                    " is there, and as new as what the servers have promised"));
  }
  BALLAST_ASSIGN_OR_RETURN(const bool written,
                           registry->PutJob(command.job, restored, key.has_value() ? key->revision : 0,
                                            absl::Now() + command.asking.timeout));
  if (!written) return NotRestored("somebody else wrote the key meanwhile");
  std::printf("%s: written, with %d servers\n", registry->JobKeyName(command.job).c_str(),
              restored.table().members_size());
  const auto wish = registry->FindWish(command.job, absl::Now() + command.asking.timeout);
  if (wish.ok() && wish->has_value() && (*wish)->value.life() == restored.table().life()) {
    std::printf("by etcd an operator wants %s; if that is old, say anew what you want, before a group opens the job\n",
                model::ShowWish(restored.table(), (*wish)->value).c_str());
  }
  return absl::OkStatus();
}

}  // namespace

int RunMembers(const MembersCommand& command) {
  const auto urls = registry::RegistryUrlIn(command.servers);
  if (!urls.ok()) return Complain(urls.status(), kMisused);
  if (urls->empty()) {
    return Complain(absl::InvalidArgumentError("only a registry knows of a job's servers: expected --servers "
                                               "etcd://host:port/prefix, got a list"),
                    kMisused);
  }
  registry::Registry registry(urls->front());
  const absl::Time deadline = absl::Now() + command.asking.timeout;
  const auto entries = registry.List(deadline);
  if (!entries.ok()) return Complain(entries.status(), kNotAll);
  const auto key = registry.FindJob(command.job, deadline);
  if (!key.ok()) return Complain(key.status(), kNotAll);
  if (command.restore) {
    const absl::Status restored = Restore(command, *key, *entries, &registry);
    return restored.ok() ? kAllThere : Complain(restored, kNotAll);
  }
  if (!key->has_value()) {
    return Complain(absl::NotFoundError(absl::StrCat("there is no key ", registry.JobKeyName(command.job),
                                                     ": no job of this name was opened by this registry, or etcd lost "
                                                     "it (--restore)")),
                    kNotAll);
  }
  const absl::Status newest = CheckKeyIsNewest(command.job, (*key)->value, *entries, command.asking, &registry);
  if (!newest.ok()) return Complain(newest, kNotAll);
  return Show(command, **key, *entries, &registry);
}

}  // namespace ballast::services
