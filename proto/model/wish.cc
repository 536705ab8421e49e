#include "ballast/proto/model/wish.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::model {
namespace {

using Names = google::protobuf::RepeatedPtrField<std::string>;

bool Contains(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void Erase(Names* names, const std::string& name) {
  names->erase(std::remove(names->begin(), names->end(), name), names->end());
}

bool IsMember(const v1::Table& table, const std::string& server) {
  return std::any_of(table.members().begin(), table.members().end(),
                     [&](const v1::Member& member) { return member.server_id() == server; });
}

// Whether the job has the server, or shall have it, as far as is known.
bool IsWanted(const v1::Table& table, const v1::Wish& wish, const std::string& server) {
  if (Contains(wish.not_(), server)) return false;
  return IsMember(table, server) || Contains(wish.servers(), server);
}

absl::Status Bad(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadConfig, absl::StrCat(message, "; nothing was changed"));
}

std::string Quoted(const Names& names) {
  return absl::StrJoin(names, ", ",
                       [](std::string* out, const std::string& name) { absl::StrAppend(out, "'", name, "'"); });
}

std::string ShowServers(const v1::Table& table, const v1::Wish& wish) {
  Names names;
  for (const v1::Member& member : table.members()) {
    if (!Contains(wish.not_(), member.server_id())) *names.Add() = member.server_id();
  }
  for (const std::string& server : wish.servers()) {
    if (!IsMember(table, server)) *names.Add() = server;
  }
  return Quoted(names);
}

absl::Status CheckIsIn(const v1::Table& table, const v1::Wish& wish, const std::string& server) {
  if (IsWanted(table, wish, server)) return absl::OkStatus();
  return Bad(
      absl::StrCat("the job does not have server '", server, "'; it has, or shall have, ", ShowServers(table, wish)));
}

absl::Status CheckIsNotIn(const v1::Table& table, const v1::Wish& wish, const std::string& server) {
  if (!IsWanted(table, wish, server)) return absl::OkStatus();
  return Bad(absl::StrCat("the job has server '", server, "' already, or was told to take it; it has, or shall have, ",
                          ShowServers(table, wish)));
}

void Take(const std::string& server, v1::Wish* wish) {
  Erase(wish->mutable_not_(), server);
  Erase(wish->mutable_servers(), server);
  wish->add_servers(server);
}

void Exclude(const std::string& server, v1::Wish* wish) {
  Erase(wish->mutable_servers(), server);
  wish->add_not_(server);
}

}  // namespace

uint32_t WantedServers(const v1::Table& table, const v1::Wish& wish) {
  if (wish.count() > 0) return wish.count();
  return table.wanted_servers() > 0 ? table.wanted_servers() : static_cast<uint32_t>(table.members_size());
}

uint32_t WantedCopies(const v1::Table& table, const v1::Wish& wish) {
  return wish.replicas() > 0 ? wish.replicas() : table.replicas();
}

std::vector<std::string> ChooseServers(const v1::Table& table, const v1::Wish& wish,
                                       absl::Span<const std::string> members, std::vector<std::string> others) {
  std::sort(others.begin(), others.end());
  std::vector<std::string> chosen;
  const auto take = [&](const std::string& server) {
    const bool known = std::find(chosen.begin(), chosen.end(), server) != chosen.end();
    if (!known && !Contains(wish.not_(), server) && chosen.size() < WantedServers(table, wish))
      chosen.push_back(server);
  };
  for (const std::string& server : members) take(server);
  for (const std::string& server : wish.servers()) {
    if (std::binary_search(others.begin(), others.end(), server)) take(server);
  }
  for (const std::string& server : others) take(server);
  // Whoever is to leave stays as long as there is no other server for its copy: one that was to come may be lost.
  for (const std::string& server : members) {
    if (chosen.size() >= WantedCopies(table, wish)) break;
    if (std::find(chosen.begin(), chosen.end(), server) == chosen.end()) chosen.push_back(server);
  }
  return chosen;
}

namespace {

// How many servers the job wants beside those that it has, or was told to take: as many may have been lost. The table
// has forgotten their names.
size_t LostMembers(const v1::Table& table, const v1::Wish& wish) {
  size_t known = 0;
  for (const v1::Member& member : table.members()) known += IsWanted(table, wish, member.server_id());
  for (const std::string& server : wish.servers()) known += !IsMember(table, server);
  return std::max<size_t>(WantedServers(table, wish), known) - known;
}

// `unnamed`: how many such servers nobody has named yet.
absl::Status CheckIsOrWasIn(const v1::Table& table, const v1::Wish& wish, const std::string& server, Lost lost,
                            size_t* unnamed) {
  const absl::Status is_in = CheckIsIn(table, wish, server);
  if (is_in.ok() || *unnamed == 0 || Contains(wish.not_(), server)) return is_in;
  if (lost == Lost::kNone) {
    return Annotate(is_in, absl::StrCat("the job lacks ", *unnamed, " server(s), whose ids nobody keeps: if '", server,
                                        "' is one, and lost for good, add --lost"));
  }
  --*unnamed;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::Wish> WishToAdd(const v1::Table& table, v1::Wish wish, absl::Span<const std::string> servers) {
  const uint32_t count = WantedServers(table, wish) + static_cast<uint32_t>(servers.size());
  for (const std::string& server : servers) {
    BALLAST_RETURN_IF_ERROR(CheckIsNotIn(table, wish, server));
    Take(server, &wish);
  }
  wish.set_count(count);
  return wish;
}

absl::StatusOr<v1::Wish> WishToDrain(const v1::Table& table, v1::Wish wish, absl::Span<const std::string> servers,
                                     Lost lost) {
  const uint32_t before = WantedServers(table, wish), copies = WantedCopies(table, wish);
  if (before < copies + servers.size()) {
    return Bad(absl::StrCat("the job wants ", copies, " copies of each chunk on ", before, " server(s), and without ",
                            servers.size(), " of them there is no server for each copy: add one first, replace one, ",
                            "or ask for fewer copies (`ballastctl replicas`)"));
  }
  size_t unnamed = LostMembers(table, wish);
  for (const std::string& server : servers) {
    BALLAST_RETURN_IF_ERROR(CheckIsOrWasIn(table, wish, server, lost, &unnamed));
    Exclude(server, &wish);
  }
  wish.set_count(before - static_cast<uint32_t>(servers.size()));
  return wish;
}

absl::StatusOr<v1::Wish> WishToReplace(const v1::Table& table, v1::Wish wish, const std::string& old_server,
                                       const std::string& by, Lost lost) {
  size_t unnamed = LostMembers(table, wish);
  BALLAST_RETURN_IF_ERROR(CheckIsOrWasIn(table, wish, old_server, lost, &unnamed));
  BALLAST_RETURN_IF_ERROR(CheckIsNotIn(table, wish, by));
  wish.set_count(WantedServers(table, wish));
  Exclude(old_server, &wish);
  Take(by, &wish);
  return wish;
}

bool IsRemoved(const v1::Wish& wish, const v1::Member& member) {
  return std::any_of(wish.now().begin(), wish.now().end(), [&](const v1::Removal& one) {
    return one.server_id() == member.server_id() && Compare(one.since(), member.since()) == 0;
  });
}

absl::StatusOr<v1::Wish> WishToRemove(const v1::Table& table, v1::Wish wish, absl::Span<const std::string> servers) {
  v1::Wish next = wish;
  next.clear_now();  // of memberships that have ended
  std::vector<bool> stays;
  for (const v1::Member& member : table.members()) {
    const bool named = std::find(servers.begin(), servers.end(), member.server_id()) != servers.end();
    stays.push_back(!named && !IsRemoved(wish, member));
    if (stays.back()) continue;
    v1::Removal* const removal = next.add_now();
    removal->set_server_id(member.server_id());
    *removal->mutable_since() = member.since();
  }
  for (const std::string& server : servers) {
    if (IsMember(table, server)) continue;
    return Bad(
        absl::StrCat("server '", server, "' has nothing of the job; its members are ", ShowServers(table, v1::Wish())));
  }
  const std::string lacking = ShardsWithout(table, stays);
  if (lacking.empty()) return next;
  return Bad(absl::StrCat(lacking, " would be lost: no other server holds them. Wait until others have copied them ",
                          "(`ballastctl members`), or let them copy first (`ballastctl drain`)"));
}

absl::StatusOr<v1::Wish> WishForCopies(const v1::Table& table, v1::Wish wish, uint32_t replicas) {
  const uint32_t servers = WantedServers(table, wish);
  if (replicas < 1 || replicas > kReplicasMax || replicas > servers) {
    return Bad(absl::StrCat("expected 1 to ", kReplicasMax, " copies of each chunk, and a server for each; got ",
                            replicas, ", and the job wants ", servers,
                            " server(s). `ballastctl add` gives it more servers"));
  }
  wish.set_replicas(replicas);
  return wish;
}

std::string ShowWish(const v1::Table& table, const v1::Wish& wish) {
  const uint32_t copies = WantedCopies(table, wish);
  std::string text = absl::StrCat(WantedServers(table, wish), " server(s)");
  if (!wish.servers().empty()) absl::StrAppend(&text, ", ", Quoted(wish.servers()), " before others");
  if (!wish.not_().empty()) absl::StrAppend(&text, ", without ", Quoted(wish.not_()));
  Names removed;
  for (const v1::Member& member : table.members()) {
    if (IsRemoved(wish, member)) *removed.Add() = member.server_id();
  }
  if (!removed.empty()) absl::StrAppend(&text, ", ", Quoted(removed), " removed at once");
  return absl::StrCat(text, ", ", copies, copies == 1 ? " copy" : " copies", " of each chunk");
}

}  // namespace ballast::model
