#include "ballast/services/job_state/job_entry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
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

}  // namespace
}  // namespace ballast::services
