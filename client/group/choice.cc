#include "ballast/client/group/choice.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"

namespace ballast::client {
namespace {

bool AsksForOthers(const v1::Wish& wish) {
  return !wish.servers().empty() || !wish.not_().empty() || wish.replicas() != 0 || wish.count() != 0;
}

}  // namespace

bool Choice::HeedsForOthers() const { return heeds_wish_ && AsksForOthers(wish_); }

const v1::Member* Choice::FindMember(const std::string& server_id, uint64_t disk) const {
  const auto found = absl::c_find_if(now_.members(), [&](const v1::Member& member) {
    return member.server_id() == server_id && member.disk() == disk;
  });
  return found == now_.members().end() ? nullptr : &*found;
}

bool Choice::IsLeftOver(const v1::GetJobResponse& answer) const {
  return !IsMember(answer) && answer.exists() && answer.life() != 0 && answer.life() == now_.life();
}

std::vector<std::string> Choice::Counted(const model::Found& found) const {
  std::vector<std::string> counted;
  for (const uint32_t m : found.counted) counted.push_back(now_.members(static_cast<int>(m)).server_id());
  return counted;
}

// Servers that the wish excludes are no spares, even where the rest of the wish is not heeded.
v1::Wish Choice::Heeded() const { return heeds_wish_ ? wish_ : v1::Wish(); }

bool Choice::AwaitsWished(const std::set<std::string>& away) const {
  const v1::Wish wish = Heeded();
  return absl::c_any_of(wish.servers(), [&](const std::string& id) {
    const auto is_named = [&](const v1::Member& server) { return server.server_id() == id; };
    const bool is_away = away.contains(id) || absl::c_any_of(absent_, is_named);
    return is_away && absl::c_none_of(now_.members(), is_named);
  });
}

std::vector<v1::Member> Choice::Servers(const KnownServers& known) const {
  const std::vector<std::string> counted = Counted(known.found);
  v1::Wish wish = Heeded();
  // Until a server that the wish names answers, nobody leaves for it, and no other server takes its place. A lost
  // member is replaced, and copies are made, all the same.
  const bool awaits = AwaitsWished(known.away);
  const size_t needed = std::max<size_t>(static_cast<size_t>(now_.members_size()), model::WantedCopies(now_, wish));
  const bool waits = awaits && counted.size() >= needed;
  if (awaits) {
    wish.clear_not_();
    wish.set_count(static_cast<uint32_t>(needed));
  }
  std::vector<std::string> others;
  for (const v1::GetJobResponse& answer : known.answers) {
    const std::string& id = answer.server_id();
    const std::string target = model::TargetOf(id, answer.disk());
    if (known.without_removed && IsRemoved(answer)) continue;  // it may join in a later epoch
    const bool is_free = !waits || absl::c_linear_search(wish_.servers(), id);
    const bool may_join = is_free && reached_.contains(target) && !absl::c_linear_search(wish_.not_(), id);
    if (!IsMember(answer) && !may_join) continue;
    if (!absl::c_linear_search(counted, id) && !excluded_.contains(id)) others.push_back(id);
  }
  std::vector<v1::Member> chosen;
  for (const std::string& id : model::ChooseServers(now_, wish, counted, std::move(others))) {
    const auto server = absl::c_find_if(known.servers, [&](const v1::Member& one) { return one.server_id() == id; });
    if (server != known.servers.end()) chosen.push_back(*server);
  }
  return chosen;
}

v1::Table Choice::NextTable(const KnownServers& known, const model::Layout& layout, const v1::Epoch& epoch) const {
  std::vector<v1::Member> servers;
  if (copies_) servers = Servers(known);
  // With the same servers copies stay where they are, whatever the servers' budgets have become.
  const bool level = static_cast<int>(servers.size()) != now_.members_size() ||
                     !absl::c_all_of(servers, [&](const auto& one) { return IsMember(one); });
  for (v1::Member& server : servers) {
    for (const v1::Member& member : now_.members()) {
      if (!level && member.server_id() == server.server_id()) server.set_weight(member.weight());
    }
  }
  const std::vector<uint64_t> elements = model::ShardElements(layout, now_.shards_size());
  const model::Wanted wanted{
      .servers = servers, .replicas = model::WantedCopies(now_, Heeded()), .shard_elements = elements, .level = level};
  v1::Table next = model::NextTable(now_, known.found, wanted, epoch);
  next.set_wanted_servers(model::WantedServers(now_, Heeded()));
  return model::SameTable(next, now_) ? now_ : next;
}

std::optional<std::string> Choice::GiveWay(const std::string& server_id, const model::Found& found,
                                           absl::string_view why) {
  const bool counts = absl::c_linear_search(Counted(found), server_id);
  v1::Wish wish = wish_;
  wish.clear_now();
  const bool wished = HeedsForOthers() && (counts || absl::c_linear_search(wish.servers(), server_id));
  std::string line;
  if (wished) {
    heeds_wish_ = false;
    line = absl::StrCat("the wish for ", model::ShowWish(now_, wish), " is not heeded, and its servers stay: ", why);
  } else if (!counts) {
    line = absl::StrCat("server '", server_id, "' does not join: ", why);
  } else if (copies_) {
    copies_ = false;
    line = absl::StrCat("no further copies are made: ", why);
  } else {
    return std::nullopt;
  }
  if (!counts) excluded_.insert(server_id);
  return line;
}

}  // namespace ballast::client
