// Which servers a job of a registry goes on with, and how often thousands of ranks ask for them.
#include "ballast/proto/registry/roster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"

namespace ballast::registry {
namespace {

using ::testing::HasSubstr;

v1::JobKey KeyOf(const std::vector<std::pair<std::string, uint64_t>>& members) {
  v1::JobKey key;
  for (const auto& [id, disk] : members) {
    v1::Member* const member = key.mutable_table()->add_members();
    member->set_server_id(id);
    member->set_disk(disk);
    member->set_address(id + ":7070");
  }
  return key;
}

v1::ServerEntry Entry(const std::string& id, uint64_t disk) {
  v1::ServerEntry entry;
  entry.set_server_id(id);
  entry.set_disk(disk);
  entry.set_address("now-" + id + ":7070");
  return entry;
}

TEST(Roster, MembersAreNamesWithTheirDirectories) {
  const v1::JobKey key = KeyOf({{"b", 2}, {"a", 1}, {"c", 3}});
  std::vector<v1::Member> missing;
  const auto members = MembersAmong(key, {Entry("a", 1), Entry("b", 2), Entry("d", 4)}, &missing);
  ASSERT_EQ(members.size(), 2u);
  EXPECT_EQ(members[0].server_id(), "b") << "in the key's order";
  EXPECT_EQ(members[1].server_id(), "a");
  EXPECT_EQ(ShowMembers(missing), "'c' (last seen at c:7070)");
  EXPECT_EQ(CheckMembers("job", key, {Entry("a", 1), Entry("d", 4)}), absl::OkStatus());
  const absl::Status wiped = CheckMembers("job", key, {Entry("a", 17)});
  EXPECT_EQ(model::ReasonOf(wiped), model::kOtherServer);
  for (const char* const text :
       {"job 'job'", "server 'a'", "0000000000000001", "now-a:7070", "0000000000000011", "--lost a"}) {
    EXPECT_THAT(std::string(wiped.message()), HasSubstr(text));
  }
  EXPECT_EQ(CheckMembers("job", key, {Entry("a", 0)}), absl::OkStatus()) << "an earlier release tells no number";
  missing.clear();
  EXPECT_TRUE(MembersAmong(key, {Entry("a", 0)}, &missing).empty()) << "nor is its server taken for the member";
}

TEST(Roster, PausesGrowAndDifferFromRankToRank) {
  std::set<absl::Duration> first;
  for (int rank = 0; rank < 100; ++rank) {
    Pauses pauses;
    const absl::Duration pause = pauses.Next();
    EXPECT_GE(pause, absl::Milliseconds(50));
    EXPECT_LE(pause, absl::Milliseconds(100));
    first.insert(pause);
    absl::Duration last = pause;
    for (int question = 1; question < 10; ++question) last = pauses.Next();
    EXPECT_GE(last, absl::Seconds(1));
    EXPECT_LE(last, absl::Seconds(2));
  }
  EXPECT_GT(first.size(), 50u) << "ranks that start together ask at different moments";
}

}  // namespace
}  // namespace ballast::registry
