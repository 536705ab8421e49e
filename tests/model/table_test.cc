#include "ballast/proto/model/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/next_table.h"

namespace ballast::model {
namespace {

using ::testing::HasSubstr;

std::vector<v1::Member> Servers(int count, int first = 0) {
  std::vector<v1::Member> servers;
  for (int i = first; i < first + count; ++i) {
    v1::Member& server = servers.emplace_back();
    server.set_server_id(absl::StrCat("s", i));
    server.set_weight(1);
    server.set_disk(100 + static_cast<uint64_t>(i));
  }
  return servers;
}

std::vector<uint64_t> Elements(int shards, uint64_t chunks) {
  std::vector<uint64_t> elements(static_cast<size_t>(shards), 0);
  for (uint64_t c = 0; c < chunks; ++c) elements[c % elements.size()] += 1 << 20;
  return elements;
}

// Each server's elements by its share, largest.
double Fullest(const std::vector<v1::Member>& servers, const std::vector<uint64_t>& elements,
               const std::vector<std::vector<uint32_t>>& plan) {
  std::vector<double> load(servers.size(), 0);
  double total = 0, weights = 0, fullest = 0;
  for (size_t s = 0; s < plan.size(); ++s) {
    for (const uint32_t server : plan[s]) load[server] += static_cast<double>(elements[s]);
    total += static_cast<double>(elements[s] * plan[s].size());
  }
  for (const v1::Member& server : servers) weights += server.weight();
  for (size_t i = 0; i < servers.size(); ++i)
    fullest = std::max(fullest, load[i] * weights / servers[i].weight() / total);
  return fullest;
}

v1::Table TableOf(const std::vector<v1::Member>& servers, const std::vector<std::vector<uint32_t>>& plan) {
  v1::Table table;
  table.set_replicas(2);
  for (const v1::Member& server : servers) *table.add_members() = server;
  for (const auto& places : plan) table.add_shards()->mutable_holders()->Assign(places.begin(), places.end());
  return table;
}

// Elements of copies that `after` has and `before` has not.
uint64_t Moved(const v1::Table& before, const std::vector<v1::Member>& servers, const std::vector<uint64_t>& elements,
               const std::vector<std::vector<uint32_t>>& after) {
  uint64_t moved = 0;
  for (size_t s = 0; s < after.size(); ++s) {
    std::set<std::string> had;
    for (const uint32_t m : before.shards(static_cast<int>(s)).holders()) had.insert(before.members(m).server_id());
    for (const uint32_t i : after[s]) moved += had.contains(servers[i].server_id()) ? 0 : elements[s];
  }
  return moved;
}

TEST(TableTest, ANewJobIsSpreadEvenlyWhateverItsSize) {
  for (const uint64_t chunks : {1u, 5u, 12u, 120u, 2000u}) {
    for (const int count : {1, 2, 3, 16}) {
      for (const uint32_t replicas : {1u, 2u}) {
        const auto servers = Servers(count);
        const auto elements = Elements(kShards, chunks);
        const Wanted wanted{.servers = servers, .replicas = replicas, .shard_elements = elements, .level = false};
        const auto plan = PlanWanted(v1::Table(), wanted);
        ASSERT_EQ(plan.size(), elements.size());
        std::vector<uint64_t> copies(servers.size(), 0), empty(servers.size(), 0);
        for (size_t s = 0; s < plan.size(); ++s) {
          EXPECT_EQ(plan[s].size(), std::min<size_t>(replicas, servers.size()));
          EXPECT_TRUE(std::is_sorted(plan[s].begin(), plan[s].end()));
          EXPECT_EQ(std::set<uint32_t>(plan[s].begin(), plan[s].end()).size(), plan[s].size());
          for (const uint32_t server : plan[s]) {
            copies[server] += elements[s] >> 20;
            empty[server] += elements[s] == 0;
          }
        }
        // A shard has one chunk more than another; so may a server, for each of its copies' place in the round.
        const auto [least, most] = std::minmax_element(copies.begin(), copies.end());
        EXPECT_LE(*most - *least, chunks > kShards ? 2 : 1) << chunks << " chunks, " << count << " servers";
        const auto [few, many] = std::minmax_element(empty.begin(), empty.end());
        EXPECT_LE(*many - *few, 1) << "what is registered later is spread too";
        EXPECT_EQ(CheckTable(FirstTable(wanted, v1::Epoch())), absl::OkStatus());
      }
    }
  }
}

TEST(TableTest, WeightsCount) {
  auto servers = Servers(3);
  servers[0].set_weight(2);
  const auto elements = Elements(kShards, 3000);
  const auto plan = PlanWanted(v1::Table(), {.servers = servers, .replicas = 1, .shard_elements = elements});
  EXPECT_LT(Fullest(servers, elements, plan), 1.01);
  // Half of all weight, and two copies: it has one of every chunk, and no chunk twice.
  const auto twice = PlanWanted(v1::Table(), {.servers = servers, .replicas = 2, .shard_elements = elements});
  for (const auto& places : twice) EXPECT_EQ(places[0], 0u);
}

TEST(TableTest, AServerThatComesOrGoesMovesItsShareAndNoMore) {
  for (const int count : {3, 4, 16}) {
    for (const uint32_t replicas : {1u, 2u}) {
      for (const uint64_t chunks : {120u, 2000u}) {
        const auto servers = Servers(count);
        const auto elements = Elements(kShards, chunks);
        uint64_t total = 0;
        for (const uint64_t e : elements) total += e * replicas;
        const auto plan =
            PlanWanted(v1::Table(), {.servers = servers, .replicas = replicas, .shard_elements = elements});
        const v1::Table table = TableOf(servers, plan);

        const auto more = Servers(count + 1);
        const auto added =
            PlanWanted(table, {.servers = more, .replicas = replicas, .shard_elements = elements, .level = true});
        const double share = static_cast<double>(total) / (count + 1);
        EXPECT_LE(static_cast<double>(Moved(table, more, elements, added)), 1.05 * share + (3 << 20))
            << count << " " << replicas << " " << chunks;
        EXPECT_LT(Fullest(more, elements, added), chunks == 120 && count == 16 ? 1.15 : 1.03);

        if (count <= static_cast<int>(replicas)) continue;
        const auto fewer = Servers(count - 1);  // the last one has gone
        const auto left =
            PlanWanted(table, {.servers = fewer, .replicas = replicas, .shard_elements = elements, .level = false});
        uint64_t lost = 0;
        for (size_t s = 0; s < plan.size(); ++s) {
          lost += std::count(plan[s].begin(), plan[s].end(), static_cast<uint32_t>(count - 1)) * elements[s];
        }
        EXPECT_EQ(Moved(table, fewer, elements, left), lost) << "only what the lost server had is copied";
        EXPECT_LT(Fullest(fewer, elements, left), chunks == 120 && count == 16 ? 1.15 : 1.03)
            << count << " " << replicas << " " << chunks;
      }
    }
  }
}

TEST(TableTest, AnyPlanOverAnyTableKeepsWhatItCan) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const int before = 1 + static_cast<int>(random() % 5), after = 1 + static_cast<int>(random() % 5);
    const auto old_servers = Servers(before);
    auto servers = Servers(after, static_cast<int>(random() % 3));
    for (v1::Member& server : servers) server.set_weight(1 + static_cast<double>(random() % 3));
    if (random() % 4 == 0) servers[0].set_disk(7);  // wiped: another server
    const auto replicas = static_cast<uint32_t>(1 + random() % 3);
    const auto elements = Elements(1 + static_cast<int>(random() % 20), random() % 40);
    const v1::Table table =
        TableOf(old_servers, PlanWanted(v1::Table(), {.servers = old_servers,
                                                      .replicas = static_cast<uint32_t>(1 + random() % 3),
                                                      .shard_elements = elements}));
    const Wanted wanted{
        .servers = servers, .replicas = replicas, .shard_elements = elements, .level = random() % 2 == 0};
    const auto plan = PlanWanted(table, wanted);
    EXPECT_EQ(plan, PlanWanted(table, wanted)) << "pure";
    for (const auto& places : plan) EXPECT_EQ(places.size(), std::min<size_t>(replicas, servers.size()));
    // What is planned stays planned.
    EXPECT_EQ(PlanWanted(TableOf(servers, plan), wanted), plan) << "round " << round;
  }
}

TEST(TableTest, WithoutAMemberTheOthersHoldWhatTheyHeld) {
  const auto servers = Servers(3);
  const auto elements = Elements(12, 12);
  const v1::Table table = FirstTable({.servers = servers, .replicas = 2, .shard_elements = elements}, v1::Epoch());
  EXPECT_EQ(ShortShards(table), 0);
  EXPECT_EQ(ShardsWithout(table, {true, false, true}), "");
  EXPECT_EQ(ShardsWithout(table, {false, false, true}), "4 of 12 shards");
  EXPECT_EQ(table.wanted_servers(), 3u);
  v1::Table fills = table;
  for (v1::Shard& shard : *fills.mutable_shards()) {
    if (shard.holders(0) == 0 && shard.holders(1) == 1) shard.add_fillers(2);
  }
  EXPECT_EQ(ShardsWithout(fills, {false, false, true}), "4 of 12 shards") << "who fills a shard may lack it";
  EXPECT_EQ(ShardsWithout(fills, {false, false, true}, Copies::kAny), "");
  const std::vector<bool> none(3, false);
  const Missing missing = FindMissing(table, {false, false, true}, none);
  EXPECT_EQ(missing.members, std::vector<uint32_t>({0, 1}));
  EXPECT_EQ(missing.enough_alone, missing.members) << "each has what only these two hold";
  EXPECT_EQ(FindMissing(table, none, none).members, std::vector<uint32_t>({0, 1, 2}));
  EXPECT_EQ(FindMissing(table, none, none).enough_alone, std::vector<uint32_t>()) << "each shard is on two of three";
  EXPECT_EQ(FindMissing(table, {false, false, true}, {true, false, false}).members, std::vector<uint32_t>({1}));
  const v1::Table left = LeaveOut(table, {true, false, true});
  EXPECT_EQ(CheckTable(left), absl::OkStatus());
  ASSERT_EQ(left.members_size(), 2);
  EXPECT_EQ(left.members(1).server_id(), "s2");
  EXPECT_EQ(left.replicas(), 2u);
  EXPECT_EQ(left.wanted_servers(), 3u) << "the job wants another one";
  EXPECT_EQ(ShortShards(left), 8);
  EXPECT_EQ(Replaceable(table), std::vector<bool>({true, true, true}));
  EXPECT_EQ(Replaceable(left), std::vector<bool>({false, false}));
  EXPECT_EQ(Replaceable(v1::Table()), std::vector<bool>());
  for (int s = 0; s < table.shards_size(); ++s) {
    std::set<std::string> before, after;
    for (const uint32_t m : table.shards(s).holders()) before.insert(table.members(static_cast<int>(m)).server_id());
    for (const uint32_t m : left.shards(s).holders()) after.insert(left.members(static_cast<int>(m)).server_id());
    before.erase("s1");
    EXPECT_EQ(after, before) << "shard " << s;
  }
}

// Which copies are full: of each shard, holders and some fillers.
std::vector<std::vector<uint32_t>> HoldersOf(const v1::Table& table, bool fillers) {
  std::vector<std::vector<uint32_t>> filled;
  for (const v1::Shard& shard : table.shards()) {
    auto& places = filled.emplace_back(shard.holders().begin(), shard.holders().end());
    if (fillers) places.insert(places.end(), shard.fillers().begin(), shard.fillers().end());
    std::sort(places.begin(), places.end());
  }
  return filled;
}

v1::Epoch At(uint64_t counter) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  return epoch;
}

// The names of the members that have a copy of the shard.
std::set<std::string> Names(const v1::Table& table, int shard, bool fillers) {
  std::set<std::string> names;
  for (const uint32_t m : table.shards(shard).holders()) names.insert(table.members(m).server_id());
  if (fillers) {
    for (const uint32_t m : table.shards(shard).fillers()) names.insert(table.members(m).server_id());
  }
  return names;
}

TEST(NextTableTest, AServerIsAddedInTwoTables) {
  const auto servers = Servers(2), more = Servers(3);
  const auto elements = Elements(30, 60);
  const v1::Table first = FirstTable({.servers = servers, .replicas = 2, .shard_elements = elements}, v1::Epoch());
  const Wanted wanted{.servers = more, .replicas = 2, .shard_elements = elements, .level = true};
  const v1::Table filling = NextTable(first, HoldersOf(first, false), wanted, At(5));
  ASSERT_EQ(filling.members_size(), 3);
  EXPECT_EQ(filling.members(2).since().counter(), 5u);
  EXPECT_EQ(filling.members(0).since().counter(), 0u);
  int filled = 0;
  for (const v1::Shard& shard : filling.shards()) {
    EXPECT_EQ(shard.holders_size(), 2) << "both keep it while the third fills";
    EXPECT_EQ(shard.leaving_size(), shard.fillers_size());
    filled += shard.fillers_size();
  }
  EXPECT_EQ(filled, 20);
  EXPECT_EQ(filling.last_fill().counter(), 5u);
  EXPECT_TRUE(SameTable(NextTable(filling, HoldersOf(filling, false), wanted, At(6)), filling));
  const v1::Table after = NextTable(filling, HoldersOf(filling, true), wanted, At(7));
  for (int s = 0; s < after.shards_size(); ++s) {
    EXPECT_EQ(after.shards(s).holders_size(), 2);
    EXPECT_TRUE(after.shards(s).fillers().empty());
  }
  EXPECT_TRUE(SameTable(NextTable(after, HoldersOf(after, true), wanted, At(8)), after));
  EXPECT_EQ(after.last_fill().counter(), 5u) << "nobody began to fill since";
  EXPECT_EQ(after.wanted_servers(), 2u) << "whoever changes that says so";
}

TEST(NextTableTest, CopiesThatAreCompleteWaitForTheOthers) {
  const auto servers = Servers(2), more = Servers(3);
  const auto elements = Elements(30, 60);
  const v1::Table first = FirstTable({.servers = servers, .replicas = 2, .shard_elements = elements}, v1::Epoch());
  const Wanted wanted{.servers = more, .replicas = 2, .shard_elements = elements, .level = true};
  const v1::Table filling = NextTable(first, HoldersOf(first, false), wanted, At(5));
  EXPECT_FALSE(OnlySettles(first, filling)) << "a server joins";
  auto some = HoldersOf(filling, false);
  const auto all = HoldersOf(filling, true);
  const auto filled =
      std::find_if(all.begin(), all.end(), [](const std::vector<uint32_t>& places) { return places.size() == 3; });
  ASSERT_NE(filled, all.end());
  some[static_cast<size_t>(filled - all.begin())] = *filled;
  const v1::Table settled = NextTable(filling, some, wanted, At(6));
  EXPECT_FALSE(SameTable(settled, filling));
  EXPECT_TRUE(OnlySettles(filling, settled)) << "one shard of 20";
  EXPECT_FALSE(OnlySettles(filling, NextTable(filling, all, wanted, At(6)))) << "nothing is left to copy";
  // Another wish, whose copies are other ones.
  const Wanted back{.servers = servers, .replicas = 2, .shard_elements = elements, .level = true};
  EXPECT_FALSE(OnlySettles(filling, NextTable(filling, some, back, At(6))));
  const auto others = Servers(2, 2);
  const std::vector<v1::Member> moved = {servers[0], others[0], others[1]};
  const Wanted moves{.servers = moved, .replicas = 2, .shard_elements = elements, .level = true};
  EXPECT_FALSE(OnlySettles(filling, NextTable(filling, some, moves, At(6))));
}

TEST(NextTableTest, NobodyGivesAChunkAwayBeforeOthersHaveIt) {
  const auto servers = Servers(3);
  const auto elements = Elements(6, 6);
  const v1::Table first = FirstTable({.servers = servers, .replicas = 1, .shard_elements = elements}, v1::Epoch());
  // Server 0 is to go, and server 2 does not answer: nobody has what server 2 holds but server 2.
  const std::vector<v1::Member> left = {servers[1]};
  auto filled = HoldersOf(first, false);
  const v1::Table next = NextTable(first, filled, {.servers = left, .replicas = 1, .shard_elements = elements}, At(2));
  EXPECT_EQ(next.members_size(), 3);
  for (int s = 0; s < 6; ++s) EXPECT_EQ(Names(next, s, false), Names(first, s, false));
  EXPECT_EQ(Names(next, 0, true).count("s1"), 1u);
  // Nobody is wanted: those who have it stay.
  EXPECT_TRUE(
      SameTable(NextTable(first, filled, {.servers = {}, .replicas = 1, .shard_elements = elements}, At(2)), first));
}

// Any changes of servers, losses and fills, one after the other.
TEST(NextTableTest, AnyRunOfTablesLosesNothingAndEnds) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 400; ++round) {
    const auto elements = Elements(1 + static_cast<int>(random() % 24), random() % 50);
    const auto all = Servers(6);
    const auto founders = Servers(2 + static_cast<int>(random() % 3));
    v1::Table table = FirstTable(
        {.servers = founders, .replicas = static_cast<uint32_t>(1 + random() % 3), .shard_elements = elements},
        v1::Epoch());
    std::vector<std::vector<uint32_t>> filled = HoldersOf(table, false);
    for (uint64_t epoch = 1; epoch < 6; ++epoch) {
      std::vector<v1::Member> servers;
      for (const v1::Member& server : all) {
        if (random() % 3 != 0) servers.push_back(server);
      }
      const Wanted wanted{.servers = servers,
                          .replicas = static_cast<uint32_t>(1 + random() % 3),
                          .shard_elements = elements,
                          .level = random() % 2 == 0};
      // Some copies are lost, never the last one.
      for (auto& places : filled) {
        while (places.size() > 1 && random() % 4 == 0)
          places.erase(places.begin() + static_cast<int>(random() % places.size()));
      }
      const v1::Table next = NextTable(table, filled, wanted, At(epoch));
      ASSERT_EQ(CheckTable(next), absl::OkStatus());
      for (size_t s = 0; s < filled.size(); ++s) {
        std::set<std::string> had;
        for (const uint32_t m : filled[s]) had.insert(table.members(m).server_id());
        const auto holders = Names(next, static_cast<int>(s), false);
        for (const std::string& holder : holders) EXPECT_TRUE(had.contains(holder)) << "a holder has it";
        if (!next.shards(static_cast<int>(s)).fillers().empty()) {
          EXPECT_EQ(holders, had) << "nobody gives it up before the others have it";
        }
      }
      for (const v1::Member& member : next.members()) {
        const bool was = std::any_of(table.members().begin(), table.members().end(),
                                     [&](const v1::Member& m) { return m.server_id() == member.server_id(); });
        EXPECT_TRUE(was || member.since().counter() == epoch);
      }
      // When nothing fails, one more table ends it.
      const v1::Table settled = NextTable(next, HoldersOf(next, true), wanted, At(epoch + 10));
      for (const v1::Shard& shard : settled.shards()) {
        EXPECT_TRUE(shard.fillers().empty());
        if (!servers.empty()) {
          EXPECT_EQ(shard.holders_size(), static_cast<int>(std::min<size_t>(wanted.replicas, servers.size())));
        }
      }
      EXPECT_TRUE(SameTable(NextTable(settled, HoldersOf(settled, true), wanted, At(epoch + 20)), settled));
      table = next;
      filled = HoldersOf(table, random() % 2 == 0);
    }
  }
}

TEST(NextTableTest, MovesNoMoreThanItMust) {
  for (const int count : {3, 4, 16}) {
    const auto servers = Servers(count), more = Servers(count + 1);
    const auto elements = Elements(kShards, 2000);
    const v1::Table first = FirstTable({.servers = servers, .replicas = 2, .shard_elements = elements}, v1::Epoch());
    const v1::Table next =
        NextTable(first, HoldersOf(first, false),
                  {.servers = more, .replicas = 2, .shard_elements = elements, .level = true}, At(1));
    uint64_t total = 0, moved = 0;
    for (int s = 0; s < kShards; ++s) {
      total += 2 * elements[s];
      moved += static_cast<uint64_t>(next.shards(s).fillers_size()) * elements[s];
    }
    EXPECT_LE(static_cast<double>(moved), 1.05 * static_cast<double>(total) / (count + 1));
    // Fewer copies: nothing moves, and nobody keeps all of it.
    const v1::Table fewer = NextTable(first, HoldersOf(first, false),
                                      {.servers = servers, .replicas = 1, .shard_elements = elements}, At(1));
    std::vector<int> of_server(servers.size(), 0);
    for (const v1::Shard& shard : fewer.shards()) {
      EXPECT_TRUE(shard.fillers().empty());
      ++of_server[shard.holders(0)];
    }
    EXPECT_LE(*std::max_element(of_server.begin(), of_server.end()), 1.1 * kShards / count);
  }
}

TEST(TableTest, ABadTableIsRefusedByName) {
  const auto servers = Servers(2);
  const auto elements = Elements(2, 4);
  const v1::Table good = FirstTable({.servers = servers, .replicas = 1, .shard_elements = elements}, v1::Epoch());
  EXPECT_EQ(CheckTable(good), absl::OkStatus());
  const auto refused = [&](auto change, const char* text) {
    v1::Table table = good;
    change(&table);
    const absl::Status status = CheckTable(table);
    EXPECT_EQ(ReasonOf(status), kBadRequest);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  refused([](v1::Table* t) { t->clear_shards(); }, "got 0");
  refused([](v1::Table* t) { t->set_replicas(5); }, "1 to 4 copies of each chunk, got 5");
  refused([](v1::Table* t) { t->set_replicas(0); }, "got 0");
  refused([](v1::Table* t) { t->mutable_shards(1)->clear_holders(); }, "shard 1 has none");
  refused([](v1::Table* t) { t->mutable_shards(1)->add_fillers(2); }, "shard 1 has 2");
  refused([](v1::Table* t) { t->mutable_shards(0)->add_holders(0); }, "shard 0 has 0 after 0");
  refused([](v1::Table* t) { t->mutable_shards(0)->add_fillers(0); }, "member 0 holds and fills");
  refused([](v1::Table* t) { t->mutable_shards(0)->add_leaving(1); }, "member 1 leaves and does not hold");
}

}  // namespace
}  // namespace ballast::model
