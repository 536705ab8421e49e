// What the next table's members have to copy of kept versions, by what the servers told.
#include "ballast/client/group/kept_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();

// Server "a" has disk 'a'.
v1::Member Server(const std::string& id) {
  v1::Member server;
  server.set_server_id(id);
  server.set_disk(static_cast<uint64_t>(id[0]));
  return server;
}

// A table's shard, by indices of its members.
struct Places {
  std::vector<uint32_t> holders, fillers;
};

v1::Table TableOf(const std::vector<std::string>& ids, const std::vector<Places>& shards) {
  v1::Table table;
  for (const std::string& id : ids) *table.add_members() = Server(id);
  for (const Places& places : shards) {
    v1::Shard* const shard = table.add_shards();
    shard->mutable_holders()->Add(places.holders.begin(), places.holders.end());
    shard->mutable_fillers()->Add(places.fillers.begin(), places.fillers.end());
  }
  return table;
}

v1::GetJobResponse Tells(const std::string& id, const std::vector<uint64_t>& kept,
                         const std::vector<int64_t>& versions = {}) {
  v1::GetJobResponse answer;
  answer.set_server_id(id);
  answer.set_disk(Server(id).disk());
  answer.mutable_kept_bytes()->Add(kept.begin(), kept.end());
  answer.mutable_durable_versions()->Add(versions.begin(), versions.end());
  return answer;
}

model::Found Counted(const std::vector<uint32_t>& members) {
  model::Found found;
  found.counted = members;
  return found;
}

TEST(KeptToCopy, SumsTheShardsThatAMemberBeginsToCopy) {
  const v1::Table now = TableOf({"a", "b"}, {{{0}, {}}, {{1}, {}}, {{0, 1}, {}}, {{0}, {}}});
  const v1::Table next = TableOf({"a", "b", "c"}, {{{0}, {2}}, {{1}, {0, 2}}, {{0, 1}, {}}, {{0}, {}}});
  const std::vector<v1::GetJobResponse> answers = {Tells("c", {}), Tells("b", {0, 20, 300, 0}, {4, 9}),
                                                   Tells("a", {1000, 0, 300, 7}, {4})};
  const KeptNeed kept = KeptToCopy(now, Counted({0, 1}), next, answers);
  EXPECT_THAT(kept.bytes, ElementsAre(20, 0, 1020));
  EXPECT_THAT(kept.versions, ElementsAre(4, 9));
}

TEST(KeptToCopy, CountsTheHolderThatHasTheMost) {
  const v1::Table now = TableOf({"a", "b"}, {{{0, 1}, {}}});
  const v1::Table next = TableOf({"a", "b", "c"}, {{{0, 1}, {2}}});
  EXPECT_THAT(KeptToCopy(now, Counted({0, 1}), next, {{Tells("a", {10}), Tells("b", {30})}}).bytes,
              ElementsAre(0, 0, 30));
}

TEST(KeptToCopy, ServersThatTellNothingHaveNothing) {
  const v1::Table now = TableOf({"a"}, {{{0}, {}}, {{0}, {}}});
  const v1::Table next = TableOf({"a", "b"}, {{{0}, {1}}, {{0}, {1}}});
  EXPECT_THAT(KeptToCopy(now, Counted({0}), next, {{Tells("a", {})}}).bytes, ElementsAre(0, 0));
  EXPECT_THAT(KeptToCopy(now, Counted({0}), next, {{Tells("a", {5})}}).bytes, ElementsAre(0, 5)) << "of two shards";
  v1::GetJobResponse other = Tells("a", {5, 6});
  other.set_disk(1);  // another server under the holder's name
  EXPECT_THAT(KeptToCopy(now, Counted({0}), next, {{other}}).bytes, ElementsAre(0, 0));
}

// What a server has of a shard stays there, or goes before the copies come.
TEST(KeptToCopy, WhatIsThereNeedsNoRoom) {
  const v1::Table now = TableOf({"a", "b"}, {{{0}, {}}, {{0}, {1}}, {{0}, {}}});
  const v1::Table next = TableOf({"a", "b"}, {{{0}, {1}}, {{0}, {1}}, {{0}, {1}}});
  const std::vector<v1::GetJobResponse> answers = {Tells("a", {10, 50, 100}), Tells("b", {11, 30, 0})};
  EXPECT_THAT(KeptToCopy(now, Counted({0, 1}), next, answers).bytes, ElementsAre(0, 20 + 100));
}

TEST(KeptToCopy, CopiesThatHaveBegunGoOn) {
  const v1::Table now = TableOf({"a", "b"}, {{{0}, {1}}, {{0}, {}}});
  const std::vector<v1::GetJobResponse> answers = {Tells("a", {10, 100}), Tells("b", {})};
  EXPECT_THAT(KeptToCopy(now, Counted({0, 1}), now, answers).bytes, ElementsAre(0, 0));
  EXPECT_THAT(KeptToCopy(now, Counted({0}), now, answers).bytes, ElementsAre(0, 10)) << "b begins anew";
  const v1::Table more = TableOf({"a", "b"}, {{{0}, {1}}, {{0}, {1}}});
  EXPECT_THAT(KeptToCopy(now, Counted({0, 1}), more, answers).bytes, ElementsAre(0, 110))
      << "further copies need room beside those under way";
}

TEST(KeptToCopy, DoesNotOverflow) {
  const v1::Table now = TableOf({"a"}, {{{0}, {}}, {{0}, {}}});
  const v1::Table next = TableOf({"a", "b"}, {{{0}, {1}}, {{0}, {1}}});
  EXPECT_THAT(KeptToCopy(now, Counted({0}), next, {{Tells("a", {kMost, kMost, kMost})}}).bytes, ElementsAre(0, kMost));
}

v1::OpenResponse Answer(uint64_t needed, uint64_t free) {
  v1::OpenResponse answer;
  v1::PlannedTier* const dram = answer.add_tiers();
  dram->set_tier("dram");
  dram->set_state_bytes(kMost);
  dram->set_free_bytes(0);
  v1::PlannedTier* const nvme = answer.add_tiers();
  nvme->set_tier("nvme");
  nvme->set_state_bytes(needed - 3);
  nvme->set_working_bytes(1);
  nvme->set_other_bytes(2);
  nvme->set_free_bytes(free);
  return answer;
}

TEST(CheckKeptRoom, NamesWhatIsShort) {
  EXPECT_EQ(CheckKeptRoom("d", 40, {}, Answer(60, 100)), absl::OkStatus());
  const absl::Status refused = CheckKeptRoom("d", 41, {1, 3}, Answer(60, 100));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("server 'd' has no room for copies of the kept versions (1, 3): nvme is short of 1 bytes, 41 "
                        "are needed for them and 60 for its chunks, 100 are free; raise the nvme budget or quota "
                        "there by at least 1 bytes, or give a version up (`ballastctl unpin`)"));
}

TEST(CheckKeptRoom, WhatIsNotToldIsNotRefused) {
  v1::OpenResponse older = Answer(60, 0);
  for (v1::PlannedTier& tier : *older.mutable_tiers()) tier.clear_free_bytes();
  EXPECT_EQ(CheckKeptRoom("d", 41, {1}, older), absl::OkStatus());
  EXPECT_EQ(CheckKeptRoom("d", 41, {1}, v1::OpenResponse()), absl::OkStatus());
  EXPECT_EQ(CheckKeptRoom("d", 0, {}, Answer(60, 0)), absl::OkStatus()) << "no kept versions: the server has judged";
}

TEST(CheckKeptRoom, DoesNotOverflow) {
  EXPECT_TRUE(absl::IsResourceExhausted(CheckKeptRoom("d", kMost, {1}, Answer(60, 100))));
  EXPECT_TRUE(absl::IsResourceExhausted(CheckKeptRoom("d", 1, {1}, Answer(kMost, kMost - 1))));
}

}  // namespace
}  // namespace ballast::client
