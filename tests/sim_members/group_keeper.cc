// Rule 31: what the group at work looks at before it claims, as client::Keeper does.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/tests/sim_members/group.h"

namespace ballast::sim_members {
namespace {

constexpr int kSilentAfter = 8;  // timeouts: failover_after

bool HasFillers(const v1::Table& table) {
  return std::any_of(table.shards().begin(), table.shards().end(),
                     [](const v1::Shard& shard) { return !shard.fillers().empty(); });
}

bool LacksServers(const v1::Table& table) {
  return model::ShortShards(table) > 0 || table.members_size() < static_cast<int>(table.wanted_servers());
}

}  // namespace

// The wish, and the servers that are registered.
std::string Group::Asked() const {
  std::string asked = absl::StrCat(around_.wish->replicas);
  for (const int server : around_.wish->servers) absl::StrAppend(&asked, "/", server);
  for (const auto& server : *around_.servers) {
    if (server->up()) absl::StrAppend(&asked, "/", server->index(), ":", server->disk());
  }
  return asked;
}

bool Group::ShouldLook() {
  const std::vector<int> members = MemberServers();
  if (std::any_of(members.begin(), members.end(), [&](int server) { return silence_[server] > kSilentAfter; })) {
    return true;
  }
  const bool full = unfilled_.size() == members.size() &&
                    std::all_of(unfilled_.begin(), unfilled_.end(), [](const auto& of) { return of.second == 0; });
  if (full && HasFillers(open_->table()) && around_.random->Percent(20)) return true;
  if (Asked() != considered_ && around_.random->Percent(2)) return true;
  // Copies that could not be made then may be made now.
  return LacksServers(open_->table()) && around_.random->Percent(1);
}

void Group::BeginLook() {
  phase_ = Phase::kLook;
  ++call_;
  patience_ = 0;
  seen_.clear();
  silent_.clear();
  asked_ = Asked();
  for (const int server : MemberServers()) {
    if (silence_[server] > kSilentAfter) silent_.insert(server);
  }
  Look(/*timeout=*/false);
}

void Group::Look(bool timeout) {
  if (timeout) ++patience_;
  const std::vector<int> members = MemberServers();
  for (int server = 0; server < kServers; ++server) {
    if (seen_.contains(server) || silent_.contains(server) || (!timeout && patience_ > 0)) continue;
    if (!Wanted(server) && std::find(members.begin(), members.end(), server) == members.end()) continue;
    Call<v1::GetJobResponse>(
        server,
        [](Server& target) -> services::Outcome<v1::GetJobResponse> { return target.machine().DescribeProgress(); },
        [this, server, call = call_](absl::StatusOr<v1::GetJobResponse> response) {
          if (phase_ != Phase::kLook || call != call_) return;
          seen_[server] = *std::move(response);
          TryLook();
        },
        By::kKeeper);
  }
  patience_ = std::max(patience_, 1);
  if (timeout) TryLook();
}

void Group::TryLook() {
  const v1::Table& now = open_->table();
  const auto heard = [&](int server) { return seen_.contains(server) || silent_.contains(server); };
  const std::vector<int> members = MemberServers();
  const bool members_heard = std::all_of(members.begin(), members.end(), heard);
  const std::vector<int>& wished = around_.wish->servers;
  const bool all_heard = members_heard && std::all_of(wished.begin(), wished.end(), heard);
  if (!all_heard && patience_ < patience_max()) return;
  phase_ = Phase::kTrain;
  // Only who was silent for failover_after may be left out.
  if (!members_heard) return silent_.clear();
  std::vector<v1::GetJobResponse> answers;
  for (const auto& [server, answer] : seen_) answers.push_back(answer);
  const model::Found found = model::FindFilled(now, answers);
  if (!found.enough()) return silent_.clear();
  if (!model::SameTable(Plan(now, found, seen_), now)) return Again();
  if (all_heard) considered_ = asked_;
  silent_.clear();
}

}  // namespace ballast::sim_members
