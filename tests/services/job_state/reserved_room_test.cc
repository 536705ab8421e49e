#include "ballast/services/job_state/reserved_room.h"

#include <gtest/gtest.h>

namespace ballast::services {
namespace {

TEST(ReservedRoom, CountsWhatItsLeasesHold) {
  ReservedRoom room;
  EXPECT_EQ(room.bytes(), 0u);
  {
    const ReservedRoom::Lease nothing;
    EXPECT_EQ(nothing.bytes(), 0u);
    const ReservedRoom::Lease first = room.Take(100);
    const ReservedRoom::Lease second = room.Take(20);
    EXPECT_EQ(second.bytes(), 20u);
    EXPECT_EQ(room.bytes(), 120u);
  }
  EXPECT_EQ(room.bytes(), 0u);
}

TEST(ReservedRoom, ALeaseThatMovesHoldsItsRoomOnce) {
  ReservedRoom room;
  ReservedRoom::Lease from = room.Take(100);
  ReservedRoom::Lease to = std::move(from);
  EXPECT_EQ(from.bytes(), 0u);
  EXPECT_EQ(to.bytes(), 100u);
  EXPECT_EQ(room.bytes(), 100u);
  to = room.Take(7);
  EXPECT_EQ(room.bytes(), 7u) << "the earlier room went back";
  to = {};
  EXPECT_EQ(room.bytes(), 0u);
}

TEST(ReservedRoom, ALeaseMayOutliveTheAccount) {
  ReservedRoom::Lease lease;
  {
    ReservedRoom room;
    lease = room.Take(100);
  }
  EXPECT_EQ(lease.bytes(), 100u);
}

}  // namespace
}  // namespace ballast::services
