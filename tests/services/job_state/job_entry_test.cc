#include "ballast/services/job_state/job_entry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kPrefixBytes = sizeof("job/job/") - 1;

v1::PinnedVersion PinOf(int64_t version, bool automatic, bool requested) {
  v1::PinnedVersion pin;
  pin.set_version(version);
  pin.set_automatic(automatic);
  pin.set_automatic_since(automatic ? version : 0);
  pin.set_requested(requested);
  pin.set_registration_count(3);
  return pin;
}

void Add(const CatalogPair& pair, JobEntry* entry) {
  AddToEntry(absl::string_view(pair.first).substr(kPrefixBytes), pair.second, entry);
}

TEST(JobEntry, TheNewestWantsOfAPinCount) {
  JobEntry entry;
  Add(PinPair("job", PinOf(2, /*automatic=*/true, /*requested=*/false)), &entry);
  Add(PinPair("job", PinOf(4, true, false)), &entry);
  Add(WantedPair("job", PinOf(2, false, true)), &entry);
  ASSERT_EQ(entry.pins.size(), 2u);
  EXPECT_FALSE(entry.pins[0].automatic());
  EXPECT_TRUE(entry.pins[0].requested());
  EXPECT_EQ(entry.pins[0].automatic_since(), 0);
  EXPECT_EQ(entry.pins[0].registration_count(), 3u) << "all else is the pin's";
  EXPECT_TRUE(entry.pins[1].automatic());
  EXPECT_THAT(entry.unreadable, IsEmpty());
}

TEST(JobEntry, WantsWithoutTheirPinCountForNothing) {
  JobEntry entry;
  Add(WantedPair("job", PinOf(2, false, true)), &entry);
  EXPECT_THAT(entry.pins, IsEmpty());
  EXPECT_THAT(entry.unreadable, IsEmpty());
}

TEST(JobEntry, WantsThatCannotBeReadAreNamed) {
  JobEntry entry;
  Add(PinPair("job", PinOf(2, true, false)), &entry);
  AddToEntry(CatalogWanted(2), "\xff", &entry);
  AddToEntry(CatalogWanted(3), WantedPair("job", PinOf(2, false, true)).second, &entry);
  EXPECT_THAT(entry.unreadable, ElementsAre(CatalogWanted(2), CatalogWanted(3)));
}

// Keys are read in order, and whatever earlier versions read begins otherwise.
TEST(JobEntry, TheKeyOfWantsComesBehindThePins) {
  EXPECT_GT(CatalogWanted(0), CatalogPin(std::numeric_limits<int64_t>::max()));
  EXPECT_NE(CatalogWanted(0).rfind(kCatalogPin, 0), 0u);
  EXPECT_THAT(PinPrefixes("job", 2), ElementsAre("job/job/" + CatalogPin(2), "job/job/" + CatalogWanted(2)));
}

// A name that was dropped and made again has another life.
TEST(JobEntry, AllOfAnEntryIsOfOneLife) {
  constexpr uint64_t kLife = 7, kOther = 8;
  JobEntry entry;
  EXPECT_EQ(CheckLife("job", entry, kLife, "the log"), absl::OkStatus()) << "nothing has a life";
  entry.life = kLife;
  entry.chunks.push_back({.life = kLife, .id = 3});
  v1::PinnedVersion pin = PinOf(2, true, false);
  pin.set_life(kLife);
  pin.add_chunks(storage::DurableChunk{.life = kLife, .id = 3}.Encode());
  entry.pins = {PinOf(1, true, false), pin};
  EXPECT_EQ(CheckLife("job", entry, kLife, "the log"), absl::OkStatus()) << "an earlier version's pin has none";

  const auto refused = [](const JobEntry& mixed) {
    const absl::Status status = CheckLife("job", mixed, kLife, "the log");
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    return std::string(status.message());
  };
  EXPECT_THAT(refused({.life = kOther}),
              HasSubstr("the log is of life 0000000000000007 of job 'job', and the catalog's "
                        "entry of life 0000000000000008"));
  JobEntry mixed = entry;
  mixed.chunks.push_back({.life = kOther, .id = 4});
  EXPECT_THAT(refused(mixed), HasSubstr("the catalog's chunk 4 of life"));
  mixed = entry;
  mixed.pins[1].set_life(kOther);
  EXPECT_THAT(refused(mixed), HasSubstr("the catalog's pin of version 2 of life"));
  mixed = entry;
  mixed.pins[1].add_chunks(storage::DurableChunk{.life = kOther, .id = 4}.Encode());
  EXPECT_THAT(refused(mixed), HasSubstr("the catalog's pin of version 2 of life"));
}

}  // namespace
}  // namespace ballast::services
