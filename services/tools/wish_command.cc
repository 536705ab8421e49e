#include "ballast/services/tools/wish_command.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/wish.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/proto/registry/roster.h"
#include "ballast/services/tools/key_age.h"

namespace ballast::services {
namespace {

constexpr int kWritten = 0, kRefused = 1, kNoRegistry = 2;
constexpr int kTries = 16;

using Key = registry::Registry::Found<v1::JobKey>;
using Entries = std::vector<v1::ServerEntry>;

const char* NameOf(WishCommand::Kind kind) {
  switch (kind) {
    case WishCommand::Kind::kAdd:
      return "add";
    case WishCommand::Kind::kDrain:
      return "drain";
    case WishCommand::Kind::kRemove:
      return "remove";
    case WishCommand::Kind::kReplace:
      return "replace";
    case WishCommand::Kind::kReplicas:
      return "replicas";
  }
  return "";
}

int Complain(const WishCommand& command, const absl::Status& status, int code) {
  std::fprintf(stderr, "ballastctl: %s: %s\n", NameOf(command.kind), std::string(status.message()).c_str());
  return code;
}

absl::StatusOr<v1::Wish> NextWish(const WishCommand& command, const v1::Table& table, const v1::Wish& so_far) {
  const model::Lost lost = command.lost ? model::Lost::kSome : model::Lost::kNone;
  switch (command.kind) {
    case WishCommand::Kind::kAdd:
      return model::WishToAdd(table, so_far, command.named);
    case WishCommand::Kind::kDrain:
      return model::WishToDrain(table, so_far, command.named, lost);
    case WishCommand::Kind::kRemove:
      return model::WishToRemove(table, so_far, command.named);
    case WishCommand::Kind::kReplace:
      return model::WishToReplace(table, so_far, command.named.front(), command.by, lost);
    case WishCommand::Kind::kReplicas:
      break;
  }
  return model::WishForCopies(table, so_far, command.replicas);
}

// The servers that the command brings in must be there.
absl::Status CheckRegistered(const WishCommand& command, const Entries& entries) {
  std::vector<std::string> needed;
  if (command.kind == WishCommand::Kind::kAdd) needed = command.named;
  if (command.kind == WishCommand::Kind::kReplace) needed = {command.by};
  for (const std::string& server : needed) {
    const auto found = std::find_if(entries.begin(), entries.end(),
                                    [&](const v1::ServerEntry& entry) { return entry.server_id() == server; });
    if (found != entries.end()) continue;
    const auto name = [](std::string* out, const v1::ServerEntry& entry) { absl::StrAppend(out, entry.server_id()); };
    return model::Error(absl::StatusCode::kNotFound, model::kServerDown,
                        absl::StrCat("server '", server, "' is not registered; registered are ",
                                     entries.empty() ? "none" : absl::StrJoin(entries, ", ", name),
                                     ". Start it with this `discovery`. Nothing was changed"));
  }
  return absl::OkStatus();
}

absl::Status CheckLostAreAway(const WishCommand& command, const Entries& entries) {
  for (const v1::ServerEntry& entry : entries) {
    const bool named = std::find(command.named.begin(), command.named.end(), entry.server_id()) != command.named.end();
    if (!command.lost || !named) continue;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("--lost: server '", entry.server_id(), "' is not lost, but registered at ",
                                     entry.address(), ". Nothing was changed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Key> FindTable(const WishCommand& command, registry::Registry* registry, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(auto key, registry->FindJob(command.job, deadline));
  if (!key.has_value()) {
    return absl::NotFoundError(absl::StrCat("there is no key ", registry->JobKeyName(command.job),
                                            ": no job of this name was opened by this registry. Nothing was changed"));
  }
  if (registry::HasCopies(key->value)) return *std::move(key);
  return model::Error(
      absl::StatusCode::kUnimplemented, model::kUnsupported,
      absl::StrCat("job '", command.job, "' has one copy of each chunk and no table of them, and keeps ",
                   "the servers that it has: servers can be changed of jobs that were made with ",
                   "replicas of 2 or more. Nothing was changed"));
}

v1::Member MemberOf(const v1::ServerEntry& entry) {
  v1::Member server;
  server.set_server_id(entry.server_id());
  server.set_disk(entry.disk());
  server.set_address(entry.address());
  server.set_weight(static_cast<double>(entry.hbm_bytes() + entry.dram_bytes() + entry.nvme_bytes()) / (1 << 30));
  return server;
}

// As the group that opens the job will choose, if all stay as they are.
std::vector<v1::Member> Choose(const v1::Table& table, const v1::Wish& wish, const Entries& entries) {
  std::vector<std::string> members, others;
  for (const v1::ServerEntry& entry : entries) {
    const bool is_member = std::any_of(table.members().begin(), table.members().end(), [&](const v1::Member& member) {
      return member.server_id() == entry.server_id() && member.disk() == entry.disk() &&
             !model::IsRemoved(wish, member);
    });
    if (is_member) members.push_back(entry.server_id());
    if (!is_member && entry.state() == v1::SERVER_STATE_SERVING) others.push_back(entry.server_id());
  }
  std::vector<v1::Member> chosen;
  for (const std::string& id : model::ChooseServers(table, wish, members, std::move(others))) {
    const auto entry =
        std::find_if(entries.begin(), entries.end(), [&](const v1::ServerEntry& one) { return one.server_id() == id; });
    chosen.push_back(MemberOf(*entry));
  }
  const bool all_tell = std::all_of(chosen.begin(), chosen.end(), [](const auto& one) { return one.weight() > 0; });
  for (v1::Member& server : chosen) {
    if (!all_tell) server.set_weight(1);
  }
  return chosen;
}

// Elements of each shard, by a server that knows the job's tensors; all alike if nobody tells.
std::vector<uint64_t> ElementsOf(const WishCommand& command, const v1::Table& table, const Entries& entries) {
  for (const v1::ServerEntry& entry : entries) {
    const auto job = FetchJob(entry.address(), command.job, command.asking);
    if (!job.ok() || !job->has_open() || job->life() != table.life()) continue;
    const auto layout = model::Layout::Make(job->open().spec());
    if (layout.ok()) return model::ShardElements(*layout, table.shards_size());
  }
  return std::vector<uint64_t>(static_cast<size_t>(table.shards_size()), 1);
}

// Of each shard: the members that have it, as far as the table and the registry tell.
std::vector<std::vector<uint32_t>> FilledBy(const v1::Table& table, const std::vector<bool>& there, bool fillers_too) {
  std::vector<std::vector<uint32_t>> filled;
  for (const v1::Shard& shard : table.shards()) {
    std::vector<uint32_t>& members = filled.emplace_back();
    for (const uint32_t m : shard.holders()) {
      if (there[m]) members.push_back(m);
    }
    for (const uint32_t m : shard.fillers()) {
      if (there[m] && fillers_too) members.push_back(m);
    }
    std::sort(members.begin(), members.end());
  }
  return filled;
}

int CountOf(const v1::Table& table, const std::string& server, bool fillers) {
  int shards = 0;
  for (const v1::Shard& shard : table.shards()) {
    for (const uint32_t m : fillers ? shard.fillers() : shard.holders()) {
      shards += table.members(static_cast<int>(m)).server_id() == server;
    }
  }
  return shards;
}

// What the next opening begins, and what it is once all copies are made.
void ShowTables(const v1::Table& now, const v1::Table& next, const v1::Table& then) {
  std::vector<std::string> servers;
  for (const v1::Table* table : {&now, &next}) {
    for (const v1::Member& member : table->members()) {
      if (std::find(servers.begin(), servers.end(), member.server_id()) == servers.end()) {
        servers.push_back(member.server_id());
      }
    }
  }
  for (const std::string& server : servers) {
    const int copies = CountOf(next, server, /*fillers=*/true), after = CountOf(then, server, /*fillers=*/false);
    std::printf("  %s  holds %d of %d shards now%s; then %s\n", server.c_str(), CountOf(now, server, /*fillers=*/false),
                now.shards_size(), copies > 0 ? absl::StrCat(", copies ", copies).c_str() : "",
                after > 0 ? absl::StrCat(after).c_str() : "none: it leaves");
  }
}

void Preview(const WishCommand& command, const v1::Table& now, const v1::Wish& wish, const Entries& entries) {
  std::vector<bool> there;
  for (const v1::Member& member : now.members()) {
    there.push_back(std::any_of(entries.begin(), entries.end(), [&](const v1::ServerEntry& entry) {
      return entry.server_id() == member.server_id() && entry.disk() == member.disk() &&
             !model::IsRemoved(wish, member);
    }));
  }
  if (const std::string lacking = model::ShardsWithout(now, there); !lacking.empty()) {
    std::printf("  %s are on no server that is registered: the job waits for its servers before it changes them\n",
                lacking.c_str());
    return;
  }
  const std::vector<v1::Member> servers = Choose(now, wish, entries);
  const std::vector<uint64_t> elements = ElementsOf(command, now, entries);
  const model::Wanted wanted{
      .servers = servers, .replicas = model::WantedCopies(now, wish), .shard_elements = elements, .level = true};
  const v1::Table next = model::NextTable(now, FilledBy(now, there, false), wanted, v1::Epoch());
  const std::vector<bool> all(static_cast<size_t>(next.members_size()), true);
  ShowTables(now, next, model::NextTable(next, FilledBy(next, all, true), wanted, v1::Epoch()));
  for (const v1::Member& server : servers) {
    if (std::find(wish.not_().begin(), wish.not_().end(), server.server_id()) == wish.not_().end()) continue;
    std::printf("  %s stays until there is a server for each copy without it\n", server.server_id().c_str());
  }
  if (servers.size() < model::WantedServers(now, wish)) {
    std::printf("  %zu of %u servers are there: the job takes another one as soon as one is registered\n",
                servers.size(), model::WantedServers(now, wish));
  }
}

// Tells the operator what others wanted so far. `before`: what this command has told; nullopt: nothing yet.
void ShowSoFar(const v1::Table& table, const v1::Wish& so_far, const std::optional<v1::Wish>& before) {
  const std::string wish = model::ShowWish(table, so_far);
  if (before.has_value() && before->SerializeAsString() != so_far.SerializeAsString()) {
    std::printf("another operator wrote meanwhile: %s; this wish comes on top\n", wish.c_str());
  } else if (!before.has_value() && so_far.ByteSizeLong() > 0) {
    std::printf("so far: %s\n", wish.c_str());
  }
}

// Writes by compare-and-swap, on top of whatever another operator wrote meanwhile.
absl::StatusOr<v1::Wish> Write(const WishCommand& command, const v1::Table& table, registry::Registry* registry,
                               absl::Time deadline) {
  std::optional<v1::Wish> before;
  for (int tries = 0; tries < kTries; ++tries) {
    BALLAST_ASSIGN_OR_RETURN(const auto found, registry->FindWish(command.job, deadline));
    const bool counts = found.has_value() && found->value.life() == table.life();
    const v1::Wish so_far = counts ? found->value : v1::Wish();
    ShowSoFar(table, so_far, before);
    before = so_far;
    BALLAST_ASSIGN_OR_RETURN(v1::Wish next, NextWish(command, table, so_far));
    next.set_life(table.life());
    const int64_t revision = found.has_value() ? found->revision : 0;
    BALLAST_ASSIGN_OR_RETURN(const bool written, registry->PutWish(command.job, next, revision, deadline));
    if (written) return next;
  }
  return model::Error(absl::StatusCode::kAborted, model::kBusy,
                      absl::StrCat("other operators keep writing ", registry->WishKeyName(command.job)));
}

absl::Status Run(const WishCommand& command, registry::Registry* registry) {
  const absl::Time deadline = absl::Now() + command.asking.timeout;
  BALLAST_ASSIGN_OR_RETURN(const Entries entries, registry->List(deadline));
  BALLAST_ASSIGN_OR_RETURN(const Key key, FindTable(command, registry, deadline));
  const absl::Status newest = CheckKeyIsNewest(command.job, key.value, entries, command.asking, registry);
  if (!newest.ok()) return model::Annotate(newest, "Nothing was changed");
  BALLAST_RETURN_IF_ERROR(CheckRegistered(command, entries));
  BALLAST_RETURN_IF_ERROR(CheckLostAreAway(command, entries));
  const v1::Table& table = key.value.table();
  BALLAST_ASSIGN_OR_RETURN(const v1::Wish wish, Write(command, table, registry, deadline));
  std::printf("job '%s' shall have %s\n", command.job.c_str(), model::ShowWish(table, wish).c_str());
  Preview(command, table, wish, entries);
  std::printf(
      "The group at work begins with it within seconds; if none is, the next one does when it opens the job. "
      "`ballastctl "
      "members --job %s` shows how far copies are.\n",
      command.job.c_str());
  return absl::OkStatus();
}

}  // namespace

int RunWish(const WishCommand& command) {
  const auto urls = registry::RegistryUrlIn(command.servers);
  if (!urls.ok()) return Complain(command, urls.status(), kNoRegistry);
  if (urls->empty()) {
    return Complain(
        command,
        absl::InvalidArgumentError("only jobs that a registry keeps track of change their servers: expected "
                                   "--servers etcd://host:port/prefix, got a list"),
        kNoRegistry);
  }
  registry::Registry registry(urls->front());
  const absl::Status written = Run(command, &registry);
  return written.ok() ? kWritten : Complain(command, written, kRefused);
}

}  // namespace ballast::services
