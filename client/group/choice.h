// Which servers shall hold a job by its next table: by the table in force, the operator's wish, and what is known of
// each server. What was chosen gives way where there is no room for it. Asks nobody.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/members.h"
#include "ballast/proto/model/wish.h"
#include "ballast/v1/registry.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// What is known of the servers when they are chosen. Borrows all.
struct KnownServers {
  absl::Span<const v1::Member> servers;          // that the group uses
  absl::Span<const v1::GetJobResponse> answers;  // of these
  const std::set<std::string>& away;             // ids of registered servers that did not say who they are
  const model::Found& found;
  bool without_removed = false;  // nobody needs those whom the wish removes
};

// A server is known by id and disk. Threads: one at a time.
class Choice {
 public:
  // `reached`: the spares, as model::TargetOf names them, that may join.
  explicit Choice(std::set<std::string> reached) : reached_(std::move(reached)) {}

  // The table in force. Returns the earlier one.
  v1::Table SetTable(v1::Table now) { return std::exchange(now_, std::move(now)); }
  const v1::Table& now() const { return now_; }
  void SetWish(v1::Wish wish) { wish_ = std::move(wish); }
  const v1::Wish& wish() const { return wish_; }
  // Returns whether it was heeded before.
  bool HeedWish(bool heeds) { return std::exchange(heeds_wish_, heeds); }
  // Not after there was no room for what it wants.
  bool heeds_wish() const { return heeds_wish_; }
  // Heeds a wish for other servers or copies. Who is removed at once goes all the same.
  bool HeedsForOthers() const;

  template <typename Server>  // v1::Member, or an answer
  bool IsMember(const Server& server) const {
    return FindMember(server.server_id(), server.disk()) != nullptr;
  }
  // Whether the wish ends this membership at once.
  template <typename Server>
  bool IsRemoved(const Server& server) const {
    const v1::Member* const member = FindMember(server.server_id(), server.disk());
    return member != nullptr && model::IsRemoved(wish_, *member);
  }
  // No member, and has what it had of this job when it was one.
  bool IsLeftOver(const v1::GetJobResponse& answer) const;
  // Ids of the members that count.
  std::vector<std::string> Counted(const model::Found& found) const;

  // The server shall not join this time. False: that was known.
  bool Exclude(const std::string& server_id) { return excluded_.insert(server_id).second; }
  // The server is no member, and is done without since it did not answer.
  void NoteAbsent(const v1::Member& server) { absent_.push_back(server); }
  const std::vector<v1::Member>& absent() const { return absent_; }

  std::vector<v1::Member> Servers(const KnownServers& known) const;
  // The table in force if nothing is to be changed.
  v1::Table NextTable(const KnownServers& known, const model::Layout& layout, const v1::Epoch& epoch) const;
  // The server has no room (`why`). Does without the wish, the server, or further copies, and returns a line that says
  // so; none: nothing is left to do without.
  std::optional<std::string> GiveWay(const std::string& server_id, const model::Found& found, absl::string_view why);

 private:
  const v1::Member* FindMember(const std::string& server_id, uint64_t disk) const;
  v1::Wish Heeded() const;
  // A server that the wish names is registered, and does not answer.
  bool AwaitsWished(const std::set<std::string>& away) const;

  const std::set<std::string> reached_;
  v1::Table now_;
  v1::Wish wish_;
  bool heeds_wish_ = true;
  bool copies_ = true;  // false: the copies that there are have to do
  std::set<std::string> excluded_;
  std::vector<v1::Member> absent_;
};

}  // namespace ballast::client
