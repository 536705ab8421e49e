// Searches the gradient log with seeded lives on a simulated disk, each of which ends with a crash.
//
//   log_crash_test [--seeds N] [--seed S]
//
// Runs seeds S, S + 1, ... A failure prints its seed; `--seed S --seeds 1` runs it again.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

uint64_t seeds = 2000;
uint64_t first_seed = 1;

constexpr char kPath[] = "log";
constexpr int kLivesPerSeed = 6;

struct Tally {
  uint64_t records = 0, durable = 0, lost = 0, recovered_beyond_durable = 0;
  uint64_t rolls = 0, cuts = 0, extends = 0, no_room = 0;
  uint64_t crashes_by_operation = 0, crashes_in_recovery = 0, torn_batches = 0, live_segments = 0;
};

class CrashRun {
 public:
  CrashRun(uint64_t seed, Tally* tally) : random_(seed), disk_(seed), caller_(seed), tally_(*tally) {}

  // Empty, or what was broken.
  std::string Run() {
    segment_bytes_ = (16 + random_.Below(48)) * kLogBlock;
    auto log = GradientLog::Create(
        &disk_, {.path = kPath, .job = "job", .segment_bytes = segment_bytes_, .segment_count = 3 + random_.Below(4)});
    if (!log.ok()) return log.status().ToString();
    caller_.Use(*std::move(log));
    for (int life = 0; life < kLivesPerSeed; ++life) {
      Live();
      Crash();
      if (const std::string violation = Recover(); !violation.empty())
        return absl::StrCat("life ", life, ": ", violation);
    }
    return "";
  }

 private:
  RecordShape RandomShape() {
    RecordShape shape;
    shape.body_bytes = 1 + (random_.Percent(90) ? random_.Below(300) : random_.Below(3 * kLogBlock));
    if (random_.Percent(60)) {
      shape.payload_bytes = 1 + random_.Below(5 * kLogBlock);
      if (random_.Percent(30)) shape.payload_bytes = AlignUp(shape.payload_bytes);
      shape.keep_for = step_;
    }
    shape.aligned = random_.Percent(70);
    return shape;
  }

  void Append() {
    if (caller_.Append(RandomShape())) {
      ++tally_.records;
      return;
    }
    ++tally_.no_room;
    if (random_.Percent(5) || stuck_) {
      stuck_ = !caller_.log().Extend(1).ok();
      ++tally_.extends;
    }
  }

  void NoteDurable() { durable_lsn_ = std::max(durable_lsn_, caller_.log().durable_lsn()); }

  void Live() {
    if (random_.Percent(60)) disk_.CrashAfter(1 + random_.Below(150));
    for (uint64_t i = 10 + random_.Below(200); i > 0 && !disk_.off(); --i) {
      const uint64_t choice = random_.Below(100);
      if (choice < 50) {
        Append();
      } else if (choice < 60) {
        ++step_;
      } else if (choice < 70) {
        caller_.log().Sync(caller_.last_lsn());
      } else if (choice < 78) {
        ++tally_.cuts;
        caller_.Cut(step_ - 1 - static_cast<int64_t>(random_.Below(4)));
      } else if (choice < 96) {
        caller_.log().Pump(random_.Percent(50));
      } else if (choice < 98) {
        if (caller_.Roll()) ++tally_.rolls;
      } else {
        (void)caller_.SyncAll();
      }
      NoteDurable();
    }
  }

  void Crash() {
    if (disk_.off()) ++tally_.crashes_by_operation;
    disk_.Crash();
    caller_.Drop();
  }

  std::string Recover() {
    if (random_.Percent(15)) {
      disk_.CrashAfter(1 + random_.Below(12));
      ScannedLog ignored;
      (void)GradientLog::Recover(&disk_, kPath, &ignored);
      if (disk_.off()) ++tally_.crashes_in_recovery;
      disk_.Crash();
    }
    ScannedLog scanned;
    auto log = GradientLog::Recover(&disk_, kPath, &scanned);
    if (!log.ok()) return log.status().ToString();
    if (const absl::Status status = caller_.Check(scanned, (*log)->file(), durable_lsn_); !status.ok()) {
      return std::string(status.message());
    }
    tally_.torn_batches += scanned.torn_batches;
    tally_.live_segments += scanned.live.size();
    tally_.durable += durable_lsn_;
    const uint64_t before = caller_.last_lsn();
    caller_.Resume(scanned, *std::move(log));
    tally_.lost += before - caller_.last_lsn();
    tally_.recovered_beyond_durable += caller_.last_lsn() - durable_lsn_;
    durable_lsn_ = caller_.last_lsn();  // Recover synced it
    if (caller_.log().durable_lsn() != durable_lsn_) return "durable_lsn after the recovery is not the last record's";
    stuck_ = caller_.log().free_bytes() == 0;
    return "";
  }

  sim::Random random_;
  SimDisk disk_;
  LogCaller caller_;
  Tally& tally_;
  uint64_t segment_bytes_ = 0;
  uint64_t durable_lsn_ = 0;
  int64_t step_ = 1;
  bool stuck_ = false;
};

TEST(LogCrash, WhatWasDurableIsThere) {
  Tally sum;
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    ASSERT_EQ(CrashRun(seed, &sum).Run(), "") << "replay with --seeds 1 --seed " << seed;
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

TEST_F(LogFaultTest, AThreadGivesPayloadsBackAfterAnError) {
  absl::Notification failed;
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  caller_.log().Start([&] {
    if (!caller_.log().status().ok() && !failed.HasBeenNotified()) failed.Notify();
  });
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  caller_.log().Sync(caller_.last_lsn());
  failed.WaitForNotification();
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5000, .keep_for = 1}));
  while (caller_.payloads_borrowed() > 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(caller_.log().durable_lsn(), durable_lsn_);
  caller_.Drop();
}

// A disk that lies about a sync loses what it lied about, but nothing is made up.
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

TEST(LogCrash, ACrashInCreateLeavesAnEmptyLogOrNone) {
  bool created = false;
  for (uint64_t operation = 1; !created; ++operation) {
    for (uint64_t seed = 1; seed <= 50; ++seed) {
      SimDisk disk(seed);
      disk.CrashAfter(operation);
      created =
          GradientLog::Create(&disk, {.path = kPath, .job = "job", .segment_bytes = 32 * kLogBlock, .segment_count = 3})
              .ok();
      disk.Crash();
      ScannedLog scanned;
      const absl::Status status = GradientLog::Recover(&disk, kPath, &scanned).status();
      if (status.ok()) {
        EXPECT_TRUE(scanned.records.empty());
      } else {
        EXPECT_TRUE(!created && absl::IsNotFound(status))
            << "operation " << operation << ", seed " << seed << ": " << status;
      }
    }
  }
}

TEST(LogCrash, AFailedCreateLeavesNothing) {
  for (const SimOperation operation : {SimOperation::kWrite, SimOperation::kSync, SimOperation::kReserve}) {
    for (uint64_t k = 1;; ++k) {
      SimDisk disk(k);
      disk.FailNext(operation, k, SimFault::kEnospc);
      const absl::Status status =
          GradientLog::Create(&disk, {.path = kPath, .job = "job", .segment_bytes = 32 * kLogBlock, .segment_count = 3})
              .status();
      if (status.ok()) break;
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_TRUE(disk.List().empty());
    }
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
