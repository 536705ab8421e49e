#include "ballast/client/group/change_lines.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/table.h"

namespace ballast::client {
namespace {

using Places = google::protobuf::RepeatedField<uint32_t>;

bool IsAmong(const Places& places, uint32_t member) {
  return std::find(places.begin(), places.end(), member) != places.end();
}

// The same server in another table.
std::optional<uint32_t> In(const v1::Table& table, const v1::Member& server) {
  for (int m = 0; m < table.members_size(); ++m) {
    if (table.members(m).server_id() == server.server_id() && table.members(m).disk() == server.disk()) {
      return static_cast<uint32_t>(m);
    }
  }
  return std::nullopt;
}

bool Holds(const v1::Table& table, uint32_t member) {
  return std::any_of(table.shards().begin(), table.shards().end(),
                     [&](const v1::Shard& shard) { return IsAmong(shard.holders(), member); });
}

// What one member of the next table does.
struct ShardCounts {
  int copies = 0;   // shards that it begins to copy
  int settled = 0;  // ... that it has copied and holds from now on
  int leaving = 0;  // ... that it holds until others have them
  int stays = 0;    // ... that it holds or copies for good
};

ShardCounts ShareOf(const v1::Table& was, const v1::Table& next, uint32_t member) {
  const std::optional<uint32_t> before = In(was, next.members(static_cast<int>(member)));
  ShardCounts part;
  for (int s = 0; s < next.shards_size(); ++s) {
    const v1::Shard& shard = next.shards(s);
    const bool filled = before.has_value() && IsAmong(was.shards(s).fillers(), *before);
    const bool fills = IsAmong(shard.fillers(), member), holds = IsAmong(shard.holders(), member);
    const bool leaves = IsAmong(shard.leaving(), member);
    part.copies += fills && !filled;
    part.settled += holds && filled;
    part.leaving += leaves;
    part.stays += fills || (holds && !leaves);
  }
  return part;
}

void ShowGone(const std::string& job, const v1::Table& was, const v1::Table& next, const model::Found& found,
              absl::Duration patience, const std::vector<bool>& removed, std::vector<std::string>* lines) {
  std::vector<v1::Member> missing, wished_away;
  for (uint32_t m = 0; m < static_cast<uint32_t>(was.members_size()); ++m) {
    const v1::Member& member = was.members(static_cast<int>(m));
    const bool counts = std::find(found.counted.begin(), found.counted.end(), m) != found.counted.end();
    if (!counts && (Holds(was, m) || !In(next, member).has_value())) {
      (m < removed.size() && removed[m] ? wished_away : missing).push_back(member);
    } else if (counts && !In(next, member).has_value()) {
      lines->push_back(
          absl::StrCat("job '", job, "': server '", member.server_id(), "' has left; others have all that it had"));
    }
  }
  const std::string shorter = absl::StrCat(model::ShortShards(next), " of ", next.shards_size(),
                                           " shards now have fewer than ", next.replicas(), " copies");
  if (!wished_away.empty()) {
    lines->push_back(absl::StrCat("job '", job, "' goes on without ", ShowServers(wished_away),
                                  ", removed by an operator (`ballastctl remove --now`); ", shorter));
  }
  if (missing.empty()) return;
  lines->push_back(absl::StrCat("job '", job, "' goes on without ", ShowServers(missing), ", which did not answer for ",
                                absl::FormatDuration(patience),
                                " (failover_after), or lost what it had: the job has forgotten them; ", shorter));
}

}  // namespace

std::string ShowServers(const std::vector<v1::Member>& servers) {
  return absl::StrJoin(servers, ", ", [](std::string* out, const v1::Member& member) {
    absl::StrAppend(out, "'", member.server_id(), "'");
    if (!member.address().empty()) absl::StrAppend(out, " (last seen at ", member.address(), ")");
  });
}

std::vector<std::string> ShowChange(const std::string& job, const v1::Table& was, const v1::Table& next,
                                    const model::Found& found, absl::Duration patience,
                                    const std::vector<bool>& removed) {
  std::vector<std::string> lines;
  ShowGone(job, was, next, found, patience, removed, &lines);
  for (uint32_t m = 0; m < static_cast<uint32_t>(next.members_size()); ++m) {
    const v1::Member& member = next.members(static_cast<int>(m));
    const ShardCounts part = ShareOf(was, next, m);
    const std::string who = absl::StrCat("job '", job, "': server '", member.server_id(), "' ");
    const std::string of = absl::StrCat(" of ", next.shards_size(), " shards");
    if (part.copies > 0) {
      const bool joins = !In(was, member).has_value() ||
                         member.since().SerializeAsString() !=
                             was.members(static_cast<int>(*In(was, member))).since().SerializeAsString();
      lines.push_back(absl::StrCat(who, joins ? "joins and " : "", "copies ", part.copies, of,
                                   "; its copies count once all are made"));
    }
    if (part.settled > 0) lines.push_back(absl::StrCat(who, "has copied ", part.settled, of, " and holds them now"));
    if (part.leaving > 0 && part.stays == 0) {
      lines.push_back(absl::StrCat(who, "leaves once others have copied ", part.leaving, of));
    }
  }
  return lines;
}

}  // namespace ballast::client
