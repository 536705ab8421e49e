#include "ballast/proto/model/table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

absl::Status BadTable(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadRequest, absl::StrCat("a job's table ", message));
}

absl::Status CheckPlaces(const v1::Table& table, int shard, const google::protobuf::RepeatedField<uint32_t>& places) {
  for (int i = 0; i < places.size(); ++i) {
    if (places[i] < static_cast<uint32_t>(table.members_size()) && (i == 0 || places[i - 1] < places[i])) continue;
    return BadTable(absl::StrCat("names members by ascending indices below ", table.members_size(), "; shard ", shard,
                                 " has ", places[i], i > 0 ? absl::StrCat(" after ", places[i - 1]) : ""));
  }
  return absl::OkStatus();
}

}  // namespace

const google::protobuf::RepeatedPtrField<v1::Member>& MembersOf(const v1::OpenRequest& open) {
  return open.has_table() ? open.table().members() : open.members();
}

absl::Status CheckTable(const v1::Table& table) {
  if (table.shards_size() == 0 || table.shards_size() > kShardsMax) {
    return BadTable(absl::StrCat("has 1 to ", kShardsMax, " shards, got ", table.shards_size()));
  }
  if (table.replicas() == 0 || table.replicas() > kReplicasMax) {
    return BadTable(absl::StrCat("wants 1 to ", kReplicasMax, " copies of each chunk, got ", table.replicas()));
  }
  for (int s = 0; s < table.shards_size(); ++s) {
    const v1::Shard& shard = table.shards(s);
    if (shard.holders().empty()) return BadTable(absl::StrCat("has a holder of each shard; shard ", s, " has none"));
    BALLAST_RETURN_IF_ERROR(CheckPlaces(table, s, shard.holders()));
    BALLAST_RETURN_IF_ERROR(CheckPlaces(table, s, shard.fillers()));
    for (const uint32_t filler : shard.fillers()) {
      if (!std::binary_search(shard.holders().begin(), shard.holders().end(), filler)) continue;
      return BadTable(
          absl::StrCat("has a member once in a shard; in shard ", s, " member ", filler, " holds and fills"));
    }
    BALLAST_RETURN_IF_ERROR(CheckPlaces(table, s, shard.leaving()));
    for (const uint32_t leaving : shard.leaving()) {
      if (std::binary_search(shard.holders().begin(), shard.holders().end(), leaving)) continue;
      return BadTable(absl::StrCat("has leaving members that hold the shard; in shard ", s, " member ", leaving,
                                   " leaves and does not hold"));
    }
  }
  return absl::OkStatus();
}

std::string ShardsWithout(const v1::Table& table, const std::vector<bool>& there, Copies copies) {
  const auto is_there = [&](uint32_t member) { return there[member]; };
  const auto lacking = std::count_if(table.shards().begin(), table.shards().end(), [&](const v1::Shard& shard) {
    return std::none_of(shard.holders().begin(), shard.holders().end(), is_there) &&
           (copies == Copies::kHeld || std::none_of(shard.fillers().begin(), shard.fillers().end(), is_there));
  });
  return lacking == 0 ? "" : absl::StrCat(lacking, " of ", table.shards_size(), " shards");
}

Missing FindMissing(const v1::Table& table, const std::vector<bool>& there, const std::vector<bool>& lost) {
  size_t lacking = 0;
  std::vector<size_t> holds(there.size(), 0), has(there.size(), 0);  // of these shards
  for (const v1::Shard& shard : table.shards()) {
    std::vector<uint32_t> copies(shard.holders().begin(), shard.holders().end());
    copies.insert(copies.end(), shard.fillers().begin(), shard.fillers().end());
    if (std::any_of(copies.begin(), copies.end(), [&](uint32_t m) { return there[m]; })) continue;
    ++lacking;
    for (const uint32_t m : shard.holders()) ++holds[m];
    for (const uint32_t m : copies) ++has[m];
  }
  Missing missing;
  for (uint32_t m = 0; m < has.size(); ++m) {
    if (has[m] == 0 || lost[m]) continue;
    missing.members.push_back(m);
    if (holds[m] == lacking) missing.enough_alone.push_back(m);
  }
  return missing;
}

v1::Table LeaveOut(const v1::Table& table, const std::vector<bool>& there) {
  v1::Table left;
  left.set_replicas(table.replicas());
  left.set_life(table.life());
  left.set_wanted_servers(table.wanted_servers());
  if (table.has_last_fill()) *left.mutable_last_fill() = table.last_fill();
  std::vector<uint32_t> index(there.size());
  for (int m = 0; m < table.members_size(); ++m) {
    if (!there[m]) continue;
    index[m] = static_cast<uint32_t>(left.members_size());
    *left.add_members() = table.members(m);
  }
  const auto keep = [&](const google::protobuf::RepeatedField<uint32_t>& from,
                        google::protobuf::RepeatedField<uint32_t>* to) {
    for (const uint32_t m : from) {
      if (there[m]) to->Add(index[m]);
    }
  };
  for (const v1::Shard& shard : table.shards()) {
    v1::Shard* const stays = left.add_shards();
    keep(shard.holders(), stays->mutable_holders());
    keep(shard.fillers(), stays->mutable_fillers());
    keep(shard.leaving(), stays->mutable_leaving());
  }
  return left;
}

std::vector<bool> Replaceable(const v1::Table& table) {
  std::vector<bool> replaceable(static_cast<size_t>(table.members_size()), true);
  for (const v1::Shard& shard : table.shards()) {
    if (shard.holders_size() == 1) replaceable[shard.holders(0)] = false;
  }
  return replaceable;
}

int ShortShards(const v1::Table& table) {
  return static_cast<int>(std::count_if(table.shards().begin(), table.shards().end(), [&](const v1::Shard& shard) {
    return static_cast<uint32_t>(shard.holders_size()) < table.replicas();
  }));
}

bool SameTable(const v1::Table& a, const v1::Table& b) {
  const auto plain = [](v1::Table table) {
    for (v1::Member& member : *table.mutable_members()) member.clear_address();
    return table.SerializeAsString();
  };
  return plain(a) == plain(b);
}

bool OnlySettles(const v1::Table& now, const v1::Table& next) {
  const auto without_shards = [](v1::Table table) {
    table.clear_shards();
    return table;
  };
  if (!SameTable(without_shards(now), without_shards(next)) || now.shards_size() != next.shards_size()) return false;
  bool fills = false;
  for (int s = 0; s < now.shards_size(); ++s) {
    const auto& had = now.shards(s).fillers();
    const auto& has = next.shards(s).fillers();
    fills = fills || !has.empty();
    if (!std::includes(had.begin(), had.end(), has.begin(), has.end())) return false;
    const bool same = now.shards(s).SerializeAsString() == next.shards(s).SerializeAsString();
    if (!same && had.size() == has.size()) return false;
  }
  return fills;
}

}  // namespace ballast::model
