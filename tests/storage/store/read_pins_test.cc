#include "ballast/storage/store/read_pins.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::Optional;

TEST(ReadPinsTest, APinReadsTheRunsBeforeIt) {
  ReadPins pins;
  EXPECT_TRUE(pins.empty());
  const uint64_t first = pins.BeginRun();
  EXPECT_GT(first, ReadPins::kRestart);
  pins.Pin(7, /*chunks=*/2);
  pins.BeginRun();
  pins.Pin(7, /*chunks=*/2);  // a repeated request
  EXPECT_FALSE(pins.empty());
  EXPECT_THAT(pins.RunsBefore(7, 1), Optional(first));
  EXPECT_EQ(pins.RunsBefore(8, 1), std::nullopt);
}

TEST(ReadPinsTest, ALaterChunkDoesNotExistUnderThePin) {
  ReadPins pins;
  pins.Pin(7, /*chunks=*/2);
  EXPECT_EQ(pins.RunsBefore(7, 2), std::nullopt);
  EXPECT_THAT(pins.Of(1, 0), ElementsAre(7));
  EXPECT_THAT(pins.Of(2, 0), ElementsAre());
}

TEST(ReadPinsTest, AnUpdatePutsTheChunkBehindThePinsBefore) {
  ReadPins pins;
  pins.Pin(9, 1);
  pins.Pin(4, 1);
  const uint64_t run = pins.BeginRun();
  EXPECT_THAT(pins.Of(0, ReadPins::kRestart), ElementsAre(4, 9));
  EXPECT_THAT(pins.Of(0, run), ElementsAre()) << "they have a copy";
  pins.Pin(12, 1);
  EXPECT_THAT(pins.Of(0, run), ElementsAre(12));
}

TEST(ReadPinsTest, ADroppedPinLeavesTheOthers) {
  ReadPins pins;
  pins.Pin(4, 1);
  const uint64_t run = pins.BeginRun();
  pins.Pin(5, 1);
  EXPECT_EQ(pins.Unpin(6), std::nullopt);
  EXPECT_THAT(pins.Unpin(4), Optional(ElementsAre(run)));
  EXPECT_EQ(pins.RunsBefore(4, 0), std::nullopt);
  EXPECT_THAT(pins.Unpin(5), Optional(ElementsAre()));
  EXPECT_TRUE(pins.empty());
}

}  // namespace
}  // namespace ballast::storage
