// Searches the gradient log with seeded lives on a simulated disk, each of which ends with a crash.
//
//   log_crash_test [--seeds N] [--seed S]
//
// Runs seeds S, S + 1, ... A failure prints its seed; `--seed S --seeds 1` runs it again.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/log/crash_run.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

uint64_t seeds = 2000;
uint64_t first_seed = 1;

constexpr char kPath[] = "log";

TEST(LogCrash, WhatWasDurableIsThere) {
  CrashTally sum;
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    ASSERT_EQ(RunLives(seed, &sum), "") << "replay with --seeds 1 --seed " << seed;
  }
  const auto print = [](const char* what, uint64_t count) {
    std::printf("%s %llu, ", what, static_cast<unsigned long long>(count));
  };
  print("seeds", seeds);
  print("records", sum.records);
  print("lost", sum.lost);
  print("recovered beyond durable", sum.recovered_beyond_durable);
  print("rolls", sum.rolls);
  print("cuts", sum.cuts);
  print("extends", sum.extends);
  print("no room", sum.no_room);
  print("crashes in an operation", sum.crashes_by_operation);
  print("in a recovery", sum.crashes_in_recovery);
  print("processes killed", sum.kills);
  print("lives with an error", sum.errors);
  print("rotten bits", sum.rotten_bits);
  print("of them refused", sum.refused);
  print("torn batches", sum.torn_batches);
  print("live segments", sum.live_segments);
  std::printf("\n");
}

class LogFaultTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto log = GradientLog::Create(&disk_, options_);
    ASSERT_TRUE(log.ok()) << log.status();
    caller_.Use(*std::move(log));
    ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
    ASSERT_TRUE(caller_.SyncAll().ok());
    durable_lsn_ = caller_.last_lsn();
  }
  void ExpectFailedForGood() {
    for (int i = 0; i < 2; ++i) {
      const absl::Status status = caller_.SyncAll();
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      EXPECT_EQ(caller_.log().durable_lsn(), durable_lsn_);
      EXPECT_EQ(caller_.payloads_borrowed(), 0) << "someone waits for his memory";
      ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
    }
    disk_.Crash();
    caller_.Drop();
    ScannedLog scanned;
    auto log = GradientLog::Recover(&disk_, kPath, &scanned);
    ASSERT_TRUE(log.ok()) << log.status();
    const absl::Status status = caller_.Check(scanned, (*log)->file(), durable_lsn_);
    EXPECT_TRUE(status.ok()) << status;
  }

  const GradientLog::Options options_{.path = kPath, .job = "job", .segment_bytes = 32 * kLogBlock, .segment_count = 3};
  SimDisk disk_{5};
  LogCaller caller_{5};
  uint64_t durable_lsn_ = 0;
};

TEST_F(LogFaultTest, AFailedWriteOfABatch) {
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEio);
  ExpectFailedForGood();
}

TEST_F(LogFaultTest, AFailedWriteOfASegmentsHead) {
  ASSERT_TRUE(caller_.Roll());
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEio);
  ExpectFailedForGood();
}

TEST_F(LogFaultTest, AFailedSync) {
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  ExpectFailedForGood();
  EXPECT_EQ(disk_.suffered(SimFault::kEio), 1);
}

// The failed sync may have dropped batches, and the next sync would report OK.
TEST_F(LogFaultTest, AFailedSyncOfAnExtension) {
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  EXPECT_EQ(caller_.log().Extend(1).code(), absl::StatusCode::kInternal);
  ExpectFailedForGood();
}

TEST_F(LogFaultTest, AThreadGivesPayloadsBackAfterAnError) {
  absl::Notification failed;
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  GradientLog* const log = &caller_.log();  // the caller lets go of it before its thread ends
  const absl::Status started = log->Start([&failed, log] {
    if (!log->status().ok() && !failed.HasBeenNotified()) failed.Notify();
  });
  ASSERT_TRUE(started.ok()) << started;
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  caller_.log().Sync(caller_.last_lsn());
  failed.WaitForNotification();
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  while (caller_.payloads_borrowed() > 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(caller_.log().durable_lsn(), durable_lsn_);
  caller_.Drop();
}

TEST_F(LogFaultTest, ATransientLogIsNeverSynced) {
  GradientLog::Options options = options_;
  options.path += "-transient";
  options.transient = true;
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  auto log = GradientLog::Create(&disk_, options);
  ASSERT_TRUE(log.ok()) << log.status();
  LogCaller caller(1);
  caller.Use(*std::move(log));
  ASSERT_TRUE(caller.Append({.payload_bytes = 5000, .keep_for = 1}));
  EXPECT_TRUE(caller.SyncAll().ok());
  EXPECT_EQ(caller.log().durable_lsn(), caller.last_lsn()) << "written is all that it promises";
  EXPECT_EQ(disk_.suffered(SimFault::kEio), 0);
  caller.Drop();
}

// If the disk lies about a sync, the data of this sync is lost, but the recovery makes nothing up.
TEST(LogCrash, ALostSyncMakesNothingUp) {
  uint64_t fewer = 0, refused = 0;
  for (uint64_t seed = first_seed; seed < first_seed + seeds / 4; ++seed) {
    sim::Random random(seed);
    SimDisk disk(seed);
    LogCaller caller(seed);
    caller.Use(*GradientLog::Create(
        &disk, {.path = kPath, .job = "job", .segment_bytes = 32 * kLogBlock, .segment_count = 6}));
    for (int i = 0; i < 20; ++i) {
      if (random.Percent(20)) disk.FailNext(SimOperation::kSync, 1, SimFault::kLostSync);
      ASSERT_TRUE(caller.Append({.body_bytes = 9, .payload_bytes = random.Below(3 * kLogBlock), .keep_for = i}));
      if (random.Percent(50)) (void)caller.SyncAll();
    }
    disk.Crash();
    caller.Drop();
    ScannedLog scanned;
    auto log = GradientLog::Recover(&disk, kPath, &scanned);
    const absl::Status status = log.ok() ? caller.Check(scanned, (*log)->file(), 0) : log.status();
    ASSERT_TRUE(status.ok() || absl::IsDataLoss(status)) << status << "; replay with --seeds 4 --seed " << seed;
    status.ok() ? ++fewer : ++refused;
  }
  std::printf("%llu prefixes, %llu refused\n", static_cast<unsigned long long>(fewer),
              static_cast<unsigned long long>(refused));
}

TEST(LogCrash, WhatACrashMadeVoidStaysVoid) {
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    ASSERT_EQ(RunVoidBatches(seed), "") << "replay with --seeds 1 --seed " << seed;
  }
}

TEST(LogCrash, ACutThatACrashMadeVoidFreesNothing) { EXPECT_EQ(RunVoidCut(first_seed), ""); }

TEST(LogCrash, ACrashInCreateLeavesAnEmptyLogOrNone) {
  bool created = false;
  for (uint64_t n = 1; !created; ++n) {
    for (uint64_t seed = 1; seed <= 50; ++seed) EXPECT_EQ(CrashInCreation(seed, n, &created), "") << "seed " << seed;
  }
}

TEST(LogCrash, AFailedCreateLeavesNothing) {
  for (const SimOperation operation : {SimOperation::kWrite, SimOperation::kSync, SimOperation::kReserve}) {
    bool created = false;
    for (uint64_t n = 1; !created; ++n) EXPECT_EQ(ErrorInCreation(operation, n, &created), "");
  }
}

}  // namespace
}  // namespace ballast::storage

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    uint64_t* const value = std::strcmp(argv[i], "--seeds") == 0  ? &ballast::storage::seeds
                            : std::strcmp(argv[i], "--seed") == 0 ? &ballast::storage::first_seed
                                                                  : nullptr;
    if (value == nullptr || !absl::SimpleAtoi(argv[i + 1], value)) {
      std::fprintf(stderr, "usage: %s [--seeds N] [--seed S]\n", argv[0]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
