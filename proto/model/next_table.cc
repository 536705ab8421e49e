#include "ballast/proto/model/next_table.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace ballast::model {
namespace {

// Servers' loads while copies get their places. Shards without chunks are spread apart from the others, by number:
// chunks that are registered later lie on them.
class Loads {
 public:
  explicit Loads(const Wanted& wanted) : wanted_(wanted), places_(wanted.shard_elements.size()) {
    for (Kind& kind : kinds_) kind.of_server.assign(wanted.servers.size(), 0);
    for (const v1::Member& server : wanted.servers) weights_ += server.weight();
  }

  const std::vector<uint32_t>& places(size_t shard) const { return places_[shard]; }
  std::vector<std::vector<uint32_t>> Take() {
    for (auto& places : places_) std::sort(places.begin(), places.end());
    return std::move(places_);
  }
  void Add(size_t shard, uint32_t server) {
    Kind& kind = kinds_[KindOf(shard)];
    for (const uint32_t other : places_[shard]) ++kind.together[std::minmax(server, other)];
    places_[shard].push_back(server);
    kind.of_server[server] += WeightOf(shard);
    kind.total += WeightOf(shard);
  }
  // The server without the shard that would be the least loaded if it took the shard; nullopt: all have it. Among
  // equals the one that shares the fewest shards with those that have this one: so when a server is lost, all others
  // have a part of what it had.
  std::optional<uint32_t> LeastWithout(size_t shard) const {
    std::optional<uint32_t> least;
    std::pair<double, uint32_t> best;
    for (uint32_t i = 0; i < wanted_.servers.size(); ++i) {
      if (std::find(places_[shard].begin(), places_[shard].end(), i) != places_[shard].end()) continue;
      const std::pair load(Load(shard, i, WeightOf(shard)), Together(shard, i));
      if (least.has_value() && load >= best) continue;
      least = i;
      best = load;
    }
    return least;
  }
  // Gives the copy of the shard's most loaded server to the least loaded one, if that brings a server closer to its
  // share, and both loads closer to each other.
  bool Level(size_t shard) {
    const Kind& kind = kinds_[KindOf(shard)];
    const uint32_t from = MostLoaded(shard);
    const std::optional<uint32_t> to = LeastWithout(shard);
    if (!to.has_value() || Load(shard, *to, WeightOf(shard)) >= Load(shard, from, 0)) return false;
    const double share = static_cast<double>(kind.total) / weights_;
    const double more = static_cast<double>(WeightOf(shard)) / wanted_.servers[from].weight();
    if (Load(shard, *to, WeightOf(shard)) > share && Load(shard, from, 0) <= share + more) return false;
    Remove(shard, from);
    Add(shard, *to);
    return true;
  }
  void Remove(size_t shard, uint32_t server) {
    Kind& kind = kinds_[KindOf(shard)];
    std::erase(places_[shard], server);
    for (const uint32_t other : places_[shard]) --kind.together[std::minmax(server, other)];
    kind.of_server[server] -= WeightOf(shard);
    kind.total -= WeightOf(shard);
  }
  // Of the servers that have the shard.
  uint32_t MostLoaded(size_t shard) const {
    return *std::max_element(places_[shard].begin(), places_[shard].end(),
                             [&](uint32_t a, uint32_t b) { return Load(shard, a, 0) < Load(shard, b, 0); });
  }

 private:
  struct Kind {
    std::vector<uint64_t> of_server;
    uint64_t total = 0;
    absl::flat_hash_map<std::pair<uint32_t, uint32_t>, uint32_t> together;  // shards that two servers share
  };

  size_t KindOf(size_t shard) const { return wanted_.shard_elements[shard] == 0; }
  uint64_t WeightOf(size_t shard) const { return std::max<uint64_t>(1, wanted_.shard_elements[shard]); }
  // The server's load by shards of this one's kind, with `more`, by the server's weight.
  double Load(size_t shard, uint32_t server, uint64_t more) const {
    return static_cast<double>(kinds_[KindOf(shard)].of_server[server] + more) / wanted_.servers[server].weight();
  }
  uint32_t Together(size_t shard, uint32_t server) const {
    const Kind& kind = kinds_[KindOf(shard)];
    uint32_t shards = 0;
    for (const uint32_t other : places_[shard]) {
      const auto found = kind.together.find(std::minmax(server, other));
      if (found != kind.together.end()) shards += found->second;
    }
    return shards;
  }

  const Wanted& wanted_;
  std::array<Kind, 2> kinds_;
  double weights_ = 0;
  std::vector<std::vector<uint32_t>> places_;
};

// For each member of `now`: its index among the wanted servers.
std::vector<std::optional<uint32_t>> Kept(const v1::Table& now, absl::Span<const v1::Member> servers) {
  std::vector<std::optional<uint32_t>> kept(static_cast<size_t>(now.members_size()));
  for (int m = 0; m < now.members_size(); ++m) {
    for (uint32_t i = 0; i < servers.size(); ++i) {
      if (servers[i].server_id() == now.members(m).server_id() && servers[i].disk() == now.members(m).disk()) {
        kept[m] = i;
      }
    }
  }
  return kept;
}

void Keep(const v1::Table& now, uint32_t replicas, const std::vector<std::optional<uint32_t>>& kept, Loads* loads) {
  for (int s = 0; s < now.shards_size(); ++s) {
    for (const uint32_t member : now.shards(s).holders()) {
      if (kept[member].has_value()) loads->Add(s, *kept[member]);
    }
    for (const uint32_t member : now.shards(s).fillers()) {
      if (kept[member].has_value() && loads->places(s).size() < replicas) loads->Add(s, *kept[member]);
    }
  }
  for (int s = 0; s < now.shards_size(); ++s) {
    while (loads->places(s).size() > replicas) loads->Remove(s, loads->MostLoaded(s));
  }
}

// Where the members and wanted servers of a next table lie: members of the table before, then servers that are new.
struct Places {
  Places(const v1::Table& now, absl::Span<const v1::Member> servers) {
    members.assign(now.members().begin(), now.members().end());
    std::vector<std::optional<uint32_t>> kept = Kept(now, servers);
    of_server.assign(servers.size(), std::nullopt);
    for (uint32_t m = 0; m < kept.size(); ++m) {
      if (kept[m].has_value()) of_server[*kept[m]] = m;
    }
    for (size_t i = 0; i < servers.size(); ++i) {
      if (of_server[i].has_value()) {
        members[*of_server[i]].set_weight(servers[i].weight());
        members[*of_server[i]].set_address(servers[i].address());
        continue;
      }
      of_server[i] = static_cast<uint32_t>(members.size());
      members.push_back(servers[i]);
      members.back().clear_since();
    }
  }
  std::vector<v1::Member> members;
  std::vector<std::optional<uint32_t>> of_server;  // index into `members`
};

bool Contains(absl::Span<const uint32_t> places, uint32_t place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

// The copies that are there: as holders those that stay planned, as fillers those to fall back on.
v1::Table ThereNow(const v1::Table& now, absl::Span<const std::vector<uint32_t>> filled) {
  v1::Table there;
  *there.mutable_members() = now.members();
  for (int s = 0; s < now.shards_size(); ++s) {
    const v1::Shard& was = now.shards(s);
    v1::Shard* const shard = there.add_shards();
    for (const uint32_t member : was.holders()) {
      if (!Contains(was.leaving(), member)) shard->add_holders(member);
    }
    for (const uint32_t member : was.fillers()) shard->add_holders(member);
    for (const uint32_t member : filled[s]) {
      if (!Contains(shard->holders(), member)) shard->add_fillers(member);
    }
  }
  return there;
}

// Rule 23 for one shard. `have`, `want`: ascending.
v1::Shard NextShard(const std::vector<uint32_t>& have, const std::vector<uint32_t>& want) {
  v1::Shard shard;
  const bool all_have = std::includes(have.begin(), have.end(), want.begin(), want.end());
  const std::vector<uint32_t>& holders = all_have && !want.empty() ? want : have;
  shard.mutable_holders()->Assign(holders.begin(), holders.end());
  if (all_have) return shard;
  std::set_difference(want.begin(), want.end(), have.begin(), have.end(),
                      google::protobuf::RepeatedFieldBackInserter(shard.mutable_fillers()));
  std::set_difference(have.begin(), have.end(), want.begin(), want.end(),
                      google::protobuf::RepeatedFieldBackInserter(shard.mutable_leaving()));
  return shard;
}

// Whether somebody fills a shard in `next` who did not in `now`.
bool BeginsToFill(const v1::Table& now, const v1::Table& next) {
  const std::vector<std::optional<uint32_t>> before =
      Kept(next, std::vector<v1::Member>(now.members().begin(), now.members().end()));
  for (int s = 0; s < next.shards_size(); ++s) {
    for (const uint32_t filler : next.shards(s).fillers()) {
      const std::optional<uint32_t> was = before[filler];
      if (!was.has_value() || !Contains(now.shards(s).fillers(), *was)) return true;
    }
  }
  return false;
}

// Leaves out who has no place.
void DropIdle(v1::Table* table) {
  std::vector<std::optional<uint32_t>> index(static_cast<size_t>(table->members_size()));
  for (const v1::Shard& shard : table->shards()) {
    for (const auto* places : {&shard.holders(), &shard.fillers()}) {
      for (const uint32_t member : *places) index[member] = 0;
    }
  }
  google::protobuf::RepeatedPtrField<v1::Member> members;
  for (size_t m = 0; m < index.size(); ++m) {
    if (!index[m].has_value()) continue;
    index[m] = static_cast<uint32_t>(members.size());
    *members.Add() = table->members(static_cast<int>(m));
  }
  *table->mutable_members() = std::move(members);
  for (v1::Shard& shard : *table->mutable_shards()) {
    for (auto* places : {shard.mutable_holders(), shard.mutable_fillers(), shard.mutable_leaving()}) {
      for (uint32_t& member : *places) member = *index[member];
    }
  }
}

}  // namespace

std::vector<uint64_t> ShardElements(const Layout& layout, int shards) {
  std::vector<uint64_t> elements(static_cast<size_t>(shards), 0);
  for (const Chunk& chunk : layout.chunks())
    elements[chunk.index % static_cast<uint64_t>(shards)] += chunk.range.size();
  return elements;
}

std::vector<std::vector<uint32_t>> PlanWanted(const v1::Table& now, const Wanted& wanted) {
  const auto replicas = static_cast<uint32_t>(std::min<size_t>(wanted.replicas, wanted.servers.size()));
  Loads loads(wanted);
  Keep(now, replicas, Kept(now, wanted.servers), &loads);
  for (size_t s = 0; s < wanted.shard_elements.size(); ++s) {
    while (loads.places(s).size() < replicas) loads.Add(s, *loads.LeastWithout(s));
  }
  // Each pass moves less than the one before; a handful ends it.
  bool moves = wanted.level;
  for (int passes = 0; moves && passes < 16; ++passes) {
    moves = false;
    for (size_t s = 0; s < wanted.shard_elements.size(); ++s) moves = loads.Level(s) || moves;
  }
  return loads.Take();
}

v1::Table FirstTable(const Wanted& wanted, const v1::Epoch& since) {
  v1::Table table;
  table.set_replicas(wanted.replicas);
  table.set_wanted_servers(static_cast<uint32_t>(wanted.servers.size()));
  for (const v1::Member& server : wanted.servers) {
    v1::Member* const member = table.add_members();
    *member = server;
    *member->mutable_since() = since;
  }
  for (const std::vector<uint32_t>& places : PlanWanted(v1::Table(), wanted)) {
    table.add_shards()->mutable_holders()->Assign(places.begin(), places.end());
  }
  return table;
}

v1::Table NextTable(const v1::Table& now, absl::Span<const std::vector<uint32_t>> filled, const Wanted& wanted,
                    const v1::Epoch& epoch) {
  std::vector<std::vector<uint32_t>> planned(filled.size());
  if (!wanted.servers.empty()) planned = PlanWanted(ThereNow(now, filled), wanted);
  const Places places(now, wanted.servers);
  v1::Table next;
  next.set_replicas(wanted.replicas);
  next.set_life(now.life());
  next.set_wanted_servers(now.wanted_servers());
  for (const v1::Member& member : places.members) {
    *next.add_members() = member;
    if (!member.has_since()) *next.mutable_members(next.members_size() - 1)->mutable_since() = epoch;
  }
  for (size_t s = 0; s < filled.size(); ++s) {
    std::vector<uint32_t> want;
    for (const uint32_t server : planned[s]) want.push_back(*places.of_server[server]);
    std::sort(want.begin(), want.end());
    *next.add_shards() = NextShard(filled[s], want);
  }
  DropIdle(&next);
  if (now.has_last_fill()) *next.mutable_last_fill() = now.last_fill();
  if (BeginsToFill(now, next)) *next.mutable_last_fill() = epoch;
  return next;
}

}  // namespace ballast::model
