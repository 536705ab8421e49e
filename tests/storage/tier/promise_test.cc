// Promises of the NVMe tier's space while their blocks are being reserved.
#include <algorithm>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/file_space.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/tier/held_reservations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kBlock = kIoAlignment;

class PromiseTest : public ::testing::Test {
 protected:
  ~PromiseTest() override { disk_.Release(); }
  // A promise that waits for the disk, beside the test's own thread.
  std::thread Promising(uint64_t bytes, absl::StatusOr<NvmeRoom>* room) {
    std::thread thread([this, bytes, room] { *room = nvme_.Promise(bytes, "a promise that waits"); });
    disk_.AwaitWaiting(1);
    return thread;
  }
  // Runs `calls` on a thread of their own, and lets the disk go on if they hang.
  template <typename Calls>
  void ExpectNoWait(const Calls& calls) {
    absl::Notification done;
    std::thread thread([&] {
      calls();
      done.Notify();
    });
    EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20))) << "waits for another's reservation";
    if (!done.HasBeenNotified()) disk_.Release();
    thread.join();
  }

  // Three extents behind a block of the file that the disk has back: a larger extent needed it elsewhere.
  std::vector<NvmeExtent> ExtentsBehindAHole() {
    std::vector<NvmeExtent> extents;
    for (int i = 0; i < 4; ++i) extents.push_back(*nvme_.Allocate(kBlock, "an extent"));
    EXPECT_EQ(tiers_->SetBudget({.nvme = 5 * kBlock}), absl::OkStatus());
    extents.erase(extents.begin());
    { const NvmeExtent large = *nvme_.Allocate(2 * kBlock, "what does not fit into the fragment"); }
    EXPECT_EQ(tiers_->SetBudget({.nvme = 32 * kBlock}), absl::OkStatus());
    return extents;
  }

  ScratchDirectory directory_;
  SimDisk sim_{1};
  HeldReservations disk_{&sim_};
  std::unique_ptr<Tiers> tiers_ =
      *Tiers::Open({.budget = {.nvme = 32 * kBlock}, .directory = directory_.path(), .disk = &disk_});
  NvmeTier& nvme_ = *tiers_->nvme();
};

TEST_F(PromiseTest, AReservationThatHangsHoldsUpNoOtherCall) {
  NvmeRoom mine = *nvme_.Promise(4 * kBlock, "another job's room");
  std::vector<NvmeExtent> versions;
  for (int i = 0; i < 2; ++i) versions.push_back(*nvme_.AllocateFrom(&mine, kBlock, "a version"));
  disk_.Hold();
  absl::StatusOr<NvmeRoom> room;
  std::thread hung = Promising(3 * kBlock, &room);
  ExpectNoWait([&] {
    versions.push_back(*nvme_.AllocateFrom(&mine, 2 * kBlock, "a version"));
    mine = versions[0].TakeRoom();
    const uint64_t kept = versions[1].offset();
    versions[1].Leave();
    EXPECT_EQ(nvme_.TakeKept(kept)->bytes(), kBlock);
    EXPECT_TRUE(nvme_.AllocateFrom(&mine, kBlock, "a version").ok());
    versions.pop_back();
    EXPECT_EQ(nvme_.Trim(), absl::OkStatus());
    EXPECT_EQ(nvme_.Sync({0}), absl::OkStatus());
    // Blocks that nobody was promised are there for a new extent.
    EXPECT_TRUE(nvme_.Allocate(kBlock, "an extent").ok());
  });
  disk_.Release();
  hung.join();
  ASSERT_TRUE(room.ok()) << room.status();
  sim_.set_capacity_bytes(sim_.used_bytes());
  EXPECT_TRUE(nvme_.AllocateFrom(&*room, 3 * kBlock, "its extent").ok());
}

TEST_F(PromiseTest, WhatIsBeingReservedIsNobodyElses) {
  disk_.Hold();
  absl::StatusOr<NvmeRoom> rooms[3];
  std::vector<std::thread> hung;
  for (int i = 0; i < 3; ++i) {
    hung.emplace_back([&, i] { rooms[i] = nvme_.Promise(static_cast<uint64_t>(i + 1) * kBlock, "a room"); });
  }
  disk_.AwaitWaiting(3);
  EXPECT_EQ(tiers_->used().nvme, 6 * kBlock);
  disk_.Release();
  for (std::thread& thread : hung) thread.join();
  EXPECT_EQ(sim_.used_bytes(), 6 * kBlock);
  sim_.set_capacity_bytes(sim_.used_bytes());
  for (auto& room : rooms) {
    ASSERT_TRUE(room.ok()) << room.status();
    while (room->bytes() > 0) EXPECT_TRUE(nvme_.AllocateFrom(&*room, kBlock, "an extent").ok());
  }
}

TEST_F(PromiseTest, APromiseThatFailsTakesNothingFromOthers) {
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme_.Allocate(kBlock, "an extent"));
  NvmeRoom mine = extents[1].TakeRoom();
  disk_.Hold();
  absl::StatusOr<NvmeRoom> room;
  std::thread hung = Promising(4 * kBlock, &room);
  // The neighbours at the file's end go meanwhile.
  extents.resize(1);
  sim_.set_capacity_bytes(sim_.used_bytes());
  disk_.Release();
  hung.join();
  EXPECT_EQ(model::ReasonOf(room.status()), model::kDiskFull) << room.status();
  EXPECT_EQ(tiers_->used().nvme, 2 * kBlock);
  EXPECT_EQ(sim_.used_bytes(), 2 * kBlock) << "the file ends behind the promise";
  EXPECT_TRUE(nvme_.AllocateFrom(&mine, kBlock, "a version").ok());
}

// Half of the promise has its blocks when the disk is full.
TEST_F(PromiseTest, AFailedReservationGivesBackTheRangesBefore) {
  const std::vector<NvmeExtent> extents = ExtentsBehindAHole();
  const uint64_t used = sim_.used_bytes();
  ASSERT_EQ(used, 3 * kBlock);
  disk_.Hold(/*passing=*/1);
  absl::StatusOr<NvmeRoom> room;
  std::thread hung = Promising(3 * kBlock, &room);
  EXPECT_EQ(sim_.used_bytes(), used + kBlock) << "the hole has its block";
  sim_.set_capacity_bytes(used + kBlock);
  disk_.Release();
  hung.join();
  EXPECT_EQ(model::ReasonOf(room.status()), model::kDiskFull) << room.status();
  EXPECT_EQ(sim_.used_bytes(), used);
  EXPECT_TRUE(nvme_.Promise(kBlock, "what there is room for").ok());
}

// Promised blocks in fragments go back to the disk for a place in one piece, and another program is quicker.
TEST_F(PromiseTest, WhatAnotherProgramTookIsReservedWithTheNextPromise) {
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme_.Allocate(kBlock, "an extent"));
  NvmeRoom room = extents[0].TakeRoom();
  room.Join(extents[2].TakeRoom());
  sim_.set_capacity_bytes(sim_.used_bytes());
  disk_.set_discarded([this] { sim_.set_capacity_bytes(sim_.used_bytes()); });
  EXPECT_EQ(model::ReasonOf(nvme_.AllocateFrom(&room, 2 * kBlock, "a version").status()), model::kDiskFull);
  EXPECT_EQ(room.bytes(), 2 * kBlock);
  disk_.set_discarded(nullptr);
  sim_.set_capacity_bytes(64 * kBlock);
  NvmeRoom next = *nvme_.Promise(kBlock, "another job's room");
  sim_.set_capacity_bytes(sim_.used_bytes());
  EXPECT_TRUE(nvme_.AllocateFrom(&room, 2 * kBlock, "a version").ok());
  EXPECT_TRUE(nvme_.AllocateFrom(&next, kBlock, "another job's version").ok());
}

// The call that makes the file shorter would wait for the reservation, and holds the tier's lock.
TEST_F(PromiseTest, TheFileIsMadeShorterAfterTheReservation) {
  std::vector<NvmeExtent> extents = ExtentsBehindAHole();
  disk_.Hold();
  absl::StatusOr<NvmeRoom> room;
  std::thread hung = Promising(kBlock, &room);
  const uint64_t cuts = sim_.operations(SimOperation::kTruncate);
  extents.pop_back();
  EXPECT_EQ(sim_.operations(SimOperation::kTruncate), cuts);
  EXPECT_EQ(sim_.used_bytes(), 3 * kBlock);
  disk_.Release();
  hung.join();
  ASSERT_TRUE(room.ok()) << room.status();
  EXPECT_EQ(sim_.operations(SimOperation::kTruncate), cuts + 1);
  EXPECT_EQ(sim_.used_bytes(), 3 * kBlock) << "the hole has its block, and the file ends earlier";
}

TEST_F(PromiseTest, ThreadsPromiseTakeAndFree) {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back([this, seed] {
      std::mt19937 random(seed);
      NvmeRoom room;
      std::vector<NvmeExtent> extents;
      for (int step = 0; step < 2000; ++step) {
        const uint64_t bytes = (1 + random() % 3) * kBlock;
        switch (random() % 5) {
          case 0:
            if (auto promised = nvme_.Promise(bytes, "room"); promised.ok()) room.Join(*std::move(promised));
            break;
          case 1:
            if (auto extent = nvme_.Allocate(bytes, "extent"); extent.ok()) extents.push_back(*std::move(extent));
            break;
          case 2:
            if (!extents.empty()) extents.erase(extents.begin());
            break;
          case 3:
            if (extents.empty()) break;
            room.Join(extents.back().TakeRoom());
            extents.pop_back();
            break;
          default:
            if (room.bytes() < bytes) break;
            auto extent = nvme_.AllocateFrom(&room, bytes, "a version");
            EXPECT_TRUE(extent.ok()) << extent.status();
            if (extent.ok()) extents.push_back(*std::move(extent));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(tiers_->used().nvme, 0);
  EXPECT_EQ(sim_.used_bytes(), 0);
}

// Promises in the making, places and their ends at random, on a disk that others fill and empty.
TEST_F(PromiseTest, WhateverHappensMeanwhileAPromiseHasItsBlocks) {
  int waited = 0;  // places for promises in the making
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    SimDisk disk(seed);
    HeldReservations held(&disk);
    auto file = *held.Open("nvme.tier", Disk::Mode::kKept);
    FileSpace space(file.get());
    struct Making {
      Reservation reservation;
      std::optional<absl::Status> ran;
    };
    std::vector<Making> making;
    std::vector<ByteRange> used;
    uint64_t promised = 0, taken = 0;  // `taken` of the budget
    const uint64_t budget = (8 + random() % 24) * kBlock;
    const auto run = [&](Making& any) {
      if (!any.ran.has_value()) any.ran = any.reservation.Run(file.get());
    };
    // Another thread reserves in the middle of a call.
    bool taking = false;
    held.set_discarded([&] {
      if (std::exchange(taking, false)) std::for_each(making.begin(), making.end(), run);
    });
    const auto finish = [&](std::vector<Making>::iterator any) {
      run(*any);
      if (space.FinishPromise(any->reservation, *any->ran).ok()) {
        promised += any->reservation.bytes;
      } else {
        taken -= any->reservation.bytes;
      }
      making.erase(any);
    };
    const auto any_making = [&] { return making.begin() + static_cast<std::ptrdiff_t>(random() % making.size()); };
    for (int step = 0; step < 200; ++step) {
      const uint64_t bytes = (1 + random() % 4) * kBlock;
      switch (random() % 9) {
        case 0:
          disk.set_capacity_bytes(disk.used_bytes() + (random() % 8) * kBlock);
          break;
        case 1:
        case 2: {
          if (taken + bytes > budget) break;
          taken += bytes;
          const auto shape = random() % 2 == 0 ? FileSpace::Shape::kAnyPieces : FileSpace::Shape::kOnePiece;
          making.push_back({space.StartPromise(bytes, shape, budget - taken), std::nullopt});
          break;
        }
        case 3:
          if (!making.empty()) finish(any_making());
          break;
        case 4: {
          if (used.empty()) break;
          const ByteRange range = used[random() % used.size()];
          std::erase(used, range);
          space.Free(range);
          taken -= range.bytes();
          break;
        }
        case 5: {
          if (used.empty()) break;
          const ByteRange range = used.back();
          used.pop_back();
          space.FreeIntoPromise(range);
          promised += range.bytes();
          break;
        }
        case 6:
          if (promised < bytes) break;
          space.EndPromise(bytes, FileSpace::Blocks::kGiveBack);
          promised -= bytes;
          taken -= bytes;
          break;
        case 7:
          if (!making.empty()) run(*any_making());
          break;
        default: {
          if (promised < bytes) break;
          taking = true;
          auto offset = space.TakePromised(bytes, budget - taken);
          taking = false;
          if (!offset.ok() && !making.empty()) {
            ++waited;
            while (!making.empty()) finish(any_making());
            offset = space.TakePromised(bytes, budget - taken);
          }
          ASSERT_TRUE(offset.ok()) << "step " << step << ": " << offset.status();
          promised -= bytes;
          used.push_back({*offset, *offset + bytes});
        }
      }
      uint64_t needed = promised;
      ByteRanges apart;
      for (const ByteRange& range : used) {
        ASSERT_EQ(apart.BytesIn(range), 0) << "step " << step;
        apart.Add(range);
        needed += range.bytes();
      }
      ASSERT_GE(disk.used_bytes(), needed) << "step " << step;
      ASSERT_LE(disk.used_bytes(), budget) << "step " << step;
    }
  }
  EXPECT_GT(waited, 0);
}

}  // namespace
}  // namespace ballast::storage
