// What people read when a group has changed its job's servers.
#include "ballast/client/group/change_lines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/table.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kShards = 12;

std::vector<v1::Member> Servers(const std::vector<std::string>& ids) {
  std::vector<v1::Member> servers;
  for (const std::string& id : ids) {
    v1::Member& server = servers.emplace_back();
    server.set_server_id(id);
    server.set_disk(static_cast<uint64_t>(id[0]));
    server.set_weight(1);
    server.set_address(id + ":7070");
  }
  return servers;
}

v1::Epoch At(uint64_t counter) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  return epoch;
}

// What a fence finds: these members answer, with all that they hold, and with `fills` what they fill.
model::Found FoundBy(const v1::Table& table, const std::vector<uint32_t>& counted, bool fills = false) {
  model::Found found;
  found.counted = counted;
  for (const v1::Shard& shard : table.shards()) {
    auto& filled = found.filled.emplace_back();
    for (const uint32_t m : counted) {
      const auto has = [m](const auto& places) { return std::find(places.begin(), places.end(), m) != places.end(); };
      if (has(shard.holders()) || (fills && has(shard.fillers()))) filled.push_back(m);
    }
  }
  return found;
}

class ChangeLines : public testing::Test {
 protected:
  v1::Table First(const std::vector<std::string>& ids) const {
    return model::FirstTable({.servers = Servers(ids), .replicas = 2, .shard_elements = elements_}, v1::Epoch());
  }
  v1::Table Next(const v1::Table& now, const model::Found& found, const std::vector<v1::Member>& servers,
                 uint64_t epoch) const {
    const model::Wanted wanted{.servers = servers, .replicas = 2, .shard_elements = elements_, .level = true};
    return model::NextTable(now, found, wanted, At(epoch));
  }
  static std::vector<std::string> Lines(const v1::Table& was, const v1::Table& next, const model::Found& found) {
    return ShowChange("x", was, next, found, absl::Seconds(5));
  }

  const std::vector<uint64_t> elements_ = std::vector<uint64_t>(kShards, 1 << 20);
};

TEST_F(ChangeLines, NothingIsSaidWhereNothingChanges) {
  const v1::Table table = First({"a", "b", "c"});
  EXPECT_THAT(Lines(table, table, FoundBy(table, {0, 1, 2})), IsEmpty());
}

TEST_F(ChangeLines, AnAddedServerJoinsCopiesAndHolds) {
  const v1::Table first = First({"a", "b", "c"});
  const auto four = Servers({"a", "b", "c", "d"});
  const model::Found all = FoundBy(first, {0, 1, 2});
  const v1::Table filling = Next(first, all, four, 5);
  EXPECT_THAT(Lines(first, filling, all),
              ElementsAre("job 'x': server 'd' joins and copies 6 of 12 shards; its copies count once all are made"));
  const model::Found some = FoundBy(filling, {0, 1, 2, 3});
  EXPECT_THAT(Lines(filling, Next(filling, some, four, 6), some), IsEmpty()) << "it copies still";
  const model::Found filled = FoundBy(filling, {0, 1, 2, 3}, true);
  EXPECT_THAT(Lines(filling, Next(filling, filled, four, 7), filled),
              ElementsAre("job 'x': server 'd' has copied 6 of 12 shards and holds them now"));
}

TEST_F(ChangeLines, ADrainedServerLeavesLast) {
  const v1::Table first = First({"a", "b", "c"});
  const auto two = Servers({"a", "b"});
  const model::Found all = FoundBy(first, {0, 1, 2});
  const v1::Table draining = Next(first, all, two, 5);
  EXPECT_THAT(Lines(first, draining, all),
              ElementsAre("job 'x': server 'a' copies 4 of 12 shards; its copies count once all are made",
                          "job 'x': server 'b' copies 4 of 12 shards; its copies count once all are made",
                          "job 'x': server 'c' leaves once others have copied 8 of 12 shards"));
  const model::Found filled = FoundBy(draining, {0, 1, 2}, true);
  EXPECT_THAT(Lines(draining, Next(draining, filled, two, 6), filled),
              ElementsAre("job 'x': server 'c' has left; others have all that it had",
                          "job 'x': server 'a' has copied 4 of 12 shards and holds them now",
                          "job 'x': server 'b' has copied 4 of 12 shards and holds them now"));
}

TEST_F(ChangeLines, AWipedServerIsForgottenAndJoins) {
  const v1::Table first = First({"a", "b", "c"});
  std::vector<v1::Member> servers = Servers({"a", "b", "c"});
  servers[1].set_disk(7);
  const model::Found found = FoundBy(first, {0, 2});
  EXPECT_THAT(Lines(first, Next(first, found, servers, 5), found),
              ElementsAre("job 'x' goes on without 'b' (last seen at b:7070), which did not answer for 5s "
                          "(failover_after), or lost what it had: the job has forgotten them; 8 of 12 shards now have "
                          "fewer than 2 copies",
                          "job 'x': server 'b' joins and copies 8 of 12 shards; its copies count once all are made"));
}

}  // namespace
}  // namespace ballast::client
