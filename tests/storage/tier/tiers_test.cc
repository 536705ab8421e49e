#include "ballast/storage/tier/tiers.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <fstream>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/processor_check.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = 4096;

class TiersTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tiers> Open(TierBytes budget) {
    auto tiers = Tiers::Open({.budget = budget, .directory = directory_.path()});
    EXPECT_TRUE(tiers.ok()) << tiers.status();
    return *std::move(tiers);
  }
  ScratchDirectory directory_;
};

TEST_F(TiersTest, StagingIsAPartOfTheBudgetUnlessItIsTold) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  EXPECT_EQ(DefaultStagingBytes(0), 52 * kMiB);
  EXPECT_EQ(DefaultStagingBytes(256 * kMiB), 64 * kMiB);
  EXPECT_EQ(DefaultStagingBytes(~uint64_t{0}), 100 * kMiB);
  TiersOptions options{.budget = {.dram = 256 * kMiB}, .directory = directory_.path()};
  EXPECT_EQ((*Tiers::Open(options))->staging_bytes(), 64 * kMiB);
  options.staging_bytes = kMiB;
  EXPECT_EQ((*Tiers::Open(options))->staging_bytes(), kMiB);
}

TEST_F(TiersTest, TakeAndReturnKeepTheBudget) {
  auto tiers = Open({.dram = 1000});
  EXPECT_TRUE(tiers->Take(TierKind::kDram, 600, "slices", TierPart::kSlices).ok());
  const absl::Status status = tiers->Take(TierKind::kDram, 500, "slices", TierPart::kSlices);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(status.ToString(), HasSubstr("dram is short of 100 bytes: slices needs 500, 400 of 1000 are free"));
  tiers->Return(TierKind::kDram, 600, TierPart::kSlices);
  EXPECT_TRUE(tiers->Take(TierKind::kDram, 1000, "slices", TierPart::kSlices).ok());
  EXPECT_EQ(tiers->used().dram, 1000);
}

TEST_F(TiersTest, BlocksReturnTheirBudget) {
  auto tiers = Open({.dram = 4 * kPage});
  {
    DramBlock block = *tiers->dram()->Allocate(3 * kPage - 1, "test");
    EXPECT_EQ(block.bytes().size(), 3 * kPage);
    EXPECT_EQ(tiers->used().dram, 3 * kPage);
    EXPECT_FALSE(tiers->dram()->Allocate(2 * kPage, "test").ok());
  }
  EXPECT_EQ(tiers->used().dram, 0);
}

// "VmLck" or "RssAnon" of this process, in bytes.
int64_t MemoryOf(absl::string_view kind) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (absl::StartsWith(line, absl::StrCat(kind, ":"))) return std::stoll(line.substr(kind.size() + 1)) << 10;
  }
  ADD_FAILURE() << "/proc/self/status has no " << kind;
  return 0;
}

TEST_F(TiersTest, LockedBlocksGiveMemoryBack) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  const int64_t locked = MemoryOf("VmLck");
  std::vector<std::byte> other(kBytes);
  const bool can_lock = mlock(other.data(), other.size()) == 0 && MemoryOf("VmLck") >= locked + kBytes;
  munlock(other.data(), other.size());
  if (!can_lock) GTEST_SKIP() << "the limit of locked memory (ulimit -l) forbids 64 MiB, or a sanitizer locks nothing";
  auto tiers = Open({.dram = kBytes});
  DramBlock block = *tiers->dram()->Allocate(kBytes, "test");
  EXPECT_EQ(MemoryOf("VmLck"), locked + kBytes);
  const int64_t resident = MemoryOf("RssAnon");
  block.GiveBack(block.bytes().first(kBytes / 2));
  EXPECT_EQ(tiers->used().dram, kBytes / 2);
  EXPECT_LT(MemoryOf("RssAnon"), resident - kBytes / 4);
  block = DramBlock();
  EXPECT_EQ(MemoryOf("VmLck"), locked);
}

TEST_F(TiersTest, NoJobIsToldThatItIsDurableAfterASyncOfAnotherFailed) {
  SimDisk disk(1);
  auto tiers = Tiers::Open({.budget = {.nvme = 4 * kPage}, .directory = directory_.path(), .disk = &disk});
  ASSERT_TRUE(tiers.ok()) << tiers.status();
  NvmeTier* const nvme = (*tiers)->nvme();
  ASSERT_EQ(nvme->Sync({0}), absl::OkStatus());
  disk.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  const absl::Status first = nvme->Sync({0});
  EXPECT_EQ(first.code(), absl::StatusCode::kInternal) << first;
  const uint64_t syncs = disk.operations(SimOperation::kSync);
  EXPECT_EQ(nvme->Sync({0}), first);
  EXPECT_EQ(disk.operations(SimOperation::kSync), syncs);
}

TEST_F(TiersTest, NoBudgetNoDevice) {
  auto tiers = Open({.dram = kPage});
  EXPECT_EQ(tiers->nvme(), nullptr);
  EXPECT_EQ(tiers->hbm(), nullptr);
  EXPECT_FALSE(tiers->io_backend().empty());
}

TEST_F(TiersTest, ExtentsAreReusedAndJoined) {
  auto tiers = Open({.nvme = 4 * kPage});
  NvmeTier& nvme = *tiers->nvme();
  NvmeExtent a = *nvme.Allocate(kPage, "a");
  NvmeExtent b = *nvme.Allocate(kPage, "b");
  NvmeExtent c = *nvme.Allocate(kPage, "c");
  const uint64_t first = a.offset();
  EXPECT_NE(a.offset(), b.offset());
  b = NvmeExtent();
  a = NvmeExtent();
  EXPECT_EQ(tiers->used().nvme, kPage);
  // Both gaps together hold it.
  NvmeExtent d = *nvme.Allocate(2 * kPage, "d");
  EXPECT_EQ(d.offset(), first);
  EXPECT_FALSE(nvme.Allocate(2 * kPage, "e").ok());
}

TEST_F(TiersTest, FragmentsNeverRefuseWhatTheBudgetAllows) {
  auto tiers = Open({.nvme = 6 * kPage});
  ASSERT_TRUE(tiers->Take(TierKind::kNvme, 2 * kPage, "a log", TierPart::kSlices).ok());
  NvmeTier& nvme = *tiers->nvme();
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme.Allocate(kPage, "x"));
  extents[0] = NvmeExtent();
  extents[2] = NvmeExtent();
  absl::StatusOr<NvmeExtent> large = nvme.Allocate(2 * kPage, "large");
  ASSERT_TRUE(large.ok()) << large.status();
  struct stat info;
  ASSERT_EQ(fstat(nvme.file().fd(), &info), 0);
  EXPECT_LE(info.st_blocks * 512, 4 * kPage);
}

TEST_F(TiersTest, BlocksOfTheDiskAreReservedOnceAndAgainWhereItHasThemBack) {
  SimDisk disk(1);
  auto tiers = *Tiers::Open({.budget = {.nvme = 4 * kPage}, .directory = directory_.path(), .disk = &disk});
  NvmeTier& nvme = *tiers->nvme();
  const auto reservations = [&] { return disk.operations(SimOperation::kReserve); };
  NvmeRoom room = *nvme.Promise(4 * kPage, "room");
  EXPECT_EQ(reservations(), 1);
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme.AllocateFrom(&room, kPage, "a version"));
  EXPECT_EQ(room.bytes(), 0);
  room = extents[1].TakeRoom();
  room = NvmeRoom();
  extents[1] = *nvme.Allocate(kPage, "another");
  EXPECT_EQ(reservations(), 1);
  // Fragments that another extent does not fit into go back to the disk, and so does the file's end.
  extents[0] = NvmeExtent();
  extents[2] = NvmeExtent();
  NvmeExtent large = *nvme.Allocate(2 * kPage, "large");
  EXPECT_EQ(reservations(), 2);
  large = NvmeExtent();
  extents[0] = *nvme.Allocate(kPage, "in the first gap");
  EXPECT_EQ(reservations(), 3);
  extents[2] = *nvme.Allocate(kPage, "in the other");
  EXPECT_EQ(reservations(), 4);
  extents[3] = NvmeExtent();
  extents[3] = *nvme.Allocate(kPage, "at the end");
  EXPECT_EQ(reservations(), 5);
}

// A tier whose budget is larger than its disk.
class FullDiskTiersTest : public ::testing::Test {
 protected:
  // Whatever is free is taken by others from now on.
  void FillDisk() { disk_.set_capacity_bytes(disk_.used_bytes()); }
  static void ExpectFull(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kDiskFull) << status;
    EXPECT_THAT(status.ToString(), HasSubstr("free space on that file system"));
  }

  ScratchDirectory directory_;
  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ =
      *Tiers::Open({.budget = {.nvme = 16 * kPage}, .directory = directory_.path(), .disk = &disk_});
  NvmeTier& nvme_ = *tiers_->nvme();
};

TEST_F(FullDiskTiersTest, APromiseIsRefusedAndLeavesNothing) {
  const NvmeRoom room = *nvme_.Promise(2 * kPage, "room");
  const uint64_t used = disk_.used_bytes();
  disk_.set_capacity_bytes(used + kPage);
  ExpectFull(nvme_.Promise(2 * kPage, "a pin").status());
  EXPECT_EQ(disk_.used_bytes(), used);
  EXPECT_EQ(tiers_->used().nvme, 2 * kPage);
  EXPECT_TRUE(nvme_.Promise(kPage, "a smaller pin").ok());
}

TEST_F(FullDiskTiersTest, NobodyGetsTheBlocksOfAPromise) {
  NvmeRoom room = *nvme_.Promise(2 * kPage, "room");
  const NvmeExtent other = *nvme_.Allocate(2 * kPage, "another's extent");
  FillDisk();
  for (int i = 0; i < 2; ++i) {
    const auto extent = nvme_.AllocateFrom(&room, kPage, "a version");
    ASSERT_TRUE(extent.ok()) << extent.status();
  }
}

TEST_F(FullDiskTiersTest, APromiseKeepsItsBlocksWhenItsNeighbourGoes) {
  NvmeRoom room = *nvme_.Promise(2 * kPage, "room");
  { const NvmeExtent neighbour = *nvme_.Allocate(kPage, "at the file's end"); }
  EXPECT_EQ(disk_.used_bytes(), 2 * kPage);
  FillDisk();
  const auto extent = nvme_.AllocateFrom(&room, 2 * kPage, "a version");
  EXPECT_TRUE(extent.ok()) << extent.status();
}

TEST_F(FullDiskTiersTest, PromisedFragmentsAreNotCountedTwice) {
  ASSERT_EQ(tiers_->SetBudget({.nvme = 6 * kPage}), absl::OkStatus());
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme_.Allocate(kPage, "a version"));
  NvmeRoom room = extents[0].TakeRoom();
  room.Join(extents[2].TakeRoom());
  // With the promised two pages the budget is spent.
  const NvmeExtent large = *nvme_.Allocate(2 * kPage, "what fits into no fragment");
  EXPECT_EQ(disk_.operations(SimOperation::kDiscard), 0);
  EXPECT_EQ(disk_.used_bytes(), 6 * kPage);
  FillDisk();
  for (int i = 0; i < 2; ++i) {
    const auto extent = nvme_.AllocateFrom(&room, kPage, "a version");
    ASSERT_TRUE(extent.ok()) << extent.status();
  }
}

TEST_F(FullDiskTiersTest, APromiseInFragmentsIsAPlaceInOnePiece) {
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 6; ++i) extents.push_back(*nvme_.Allocate(kPage, "a version"));
  NvmeRoom room = extents[0].TakeRoom();
  room.Join(extents[2].TakeRoom());
  room.Join(extents[4].TakeRoom());
  FillDisk();
  const auto large = nvme_.AllocateFrom(&room, 2 * kPage, "a larger version");
  ASSERT_TRUE(large.ok()) << large.status();
  const auto small = nvme_.AllocateFrom(&room, kPage, "a version");
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ(disk_.used_bytes(), 6 * kPage);
}

// The disk gave the fragments' blocks to another program.
TEST_F(FullDiskTiersTest, ARoomThatLostItsBlocksIsUnchanged) {
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme_.Allocate(kPage, "a version"));
  NvmeRoom room = extents[0].TakeRoom();
  room.Join(extents[2].TakeRoom());
  disk_.SetFaultProbability(SimOperation::kReserve, SimFault::kEnospc, 1);
  ExpectFull(nvme_.AllocateFrom(&room, 2 * kPage, "a larger version").status());
  EXPECT_EQ(room.bytes(), 2 * kPage);
  disk_.SetFaultProbability(SimOperation::kReserve, SimFault::kEnospc, 0);
  EXPECT_TRUE(nvme_.AllocateFrom(&room, 2 * kPage, "a larger version").ok());
  EXPECT_EQ(room.bytes(), 0);
}

// Room that the next run will want stays in the file; room that nobody wants goes back to the disk.
TEST_F(FullDiskTiersTest, RoomIsLeftToTheNextRunOrGivenBack) {
  NvmeRoom room = *nvme_.Promise(2 * kPage, "room");
  room.Leave();
  EXPECT_EQ(tiers_->used().nvme, 0);
  EXPECT_EQ(disk_.used_bytes(), 2 * kPage);
  FillDisk();
  room = *nvme_.Promise(2 * kPage, "room");
  room = NvmeRoom();
  EXPECT_EQ(tiers_->used().nvme, 0);
  EXPECT_EQ(disk_.used_bytes(), 0);
}

TEST_F(FullDiskTiersTest, ARestartFindsTheBlocksOfItsRoomOnAFullDisk) {
  NvmeRoom room = *nvme_.Promise(4 * kPage, "room");
  std::vector<NvmeExtent> versions;
  for (int i = 0; i < 3; ++i) versions.push_back(*nvme_.AllocateFrom(&room, kPage, "a version"));
  const uint64_t kept = versions[1].offset();
  versions[1].Leave();
  for (const int i : {0, 2}) room.Join(versions[static_cast<size_t>(i)].TakeRoom());
  room.Leave();
  FillDisk();
  tiers_.reset();
  tiers_ = *Tiers::Open(
      {.budget = {.nvme = 16 * kPage}, .directory = directory_.path(), .disk = &disk_, .kept = {{kept, kPage}}});
  NvmeTier& nvme = *tiers_->nvme();
  auto again = nvme.Promise(3 * kPage, "room");
  ASSERT_TRUE(again.ok()) << again.status();
  // Nor does it matter that the blocks lie on both sides of the kept extent.
  EXPECT_TRUE(nvme.AllocateFrom(&*again, 3 * kPage, "a large version").ok());
}

// Promises, places and their ends at random, on a disk that others fill and empty.
TEST_F(FullDiskTiersTest, WhateverHappensAPromiseHasItsBlocks) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    SimDisk disk(seed);
    const uint64_t budget = (8 + random() % 24) * kPage;
    auto tiers = *Tiers::Open({.budget = {.nvme = budget}, .directory = directory_.path(), .disk = &disk});
    NvmeTier& nvme = *tiers->nvme();
    NvmeRoom room;
    std::vector<NvmeExtent> extents;
    for (int step = 0; step < 100; ++step) {
      const uint64_t bytes = (1 + random() % 4) * kPage;
      const uint64_t before = tiers->used().nvme;
      const auto any = extents.begin() + static_cast<std::ptrdiff_t>(extents.empty() ? 0 : random() % extents.size());
      switch (random() % 8) {
        case 0:
          disk.set_capacity_bytes(disk.used_bytes() + (random() % 8) * kPage);
          break;
        case 1:
          if (auto promised = nvme.Promise(bytes, "room"); promised.ok()) room.Join(*std::move(promised));
          break;
        case 2:
          if (auto extent = nvme.Allocate(bytes, "extent"); extent.ok()) extents.push_back(*std::move(extent));
          break;
        case 3:
          if (!extents.empty()) extents.erase(any);
          break;
        case 4:
          if (room.bytes() >= bytes) room.Split(bytes);
          break;
        case 5:
          if (extents.empty()) break;
          room.Join(any->TakeRoom());
          extents.erase(any);
          ASSERT_EQ(tiers->used().nvme, before);
          break;
        default:
          if (room.bytes() < bytes) break;
          auto extent = nvme.AllocateFrom(&room, bytes, "a version");
          ASSERT_TRUE(extent.ok()) << "step " << step << ": " << extent.status();
          extents.push_back(*std::move(extent));
          ASSERT_EQ(tiers->used().nvme, before);
      }
      uint64_t taken = room.bytes();
      for (const NvmeExtent& extent : extents) taken += extent.bytes();
      ASSERT_EQ(tiers->used().nvme, taken);
      ASSERT_GE(disk.used_bytes(), taken) << "step " << step;
      ASSERT_LE(disk.used_bytes(), budget) << "step " << step;
    }
  }
}

// fallocate waits for all transfers of the file that are in flight, so an extent that a restart kept is not reserved
// again when a later version takes the extent's place.
TEST_F(TiersTest, TheBlocksOfAKeptExtentAreNotReservedAgain) {
  SimDisk disk(1);
  TiersOptions options{.budget = {.nvme = 4 * kPage}, .directory = directory_.path(), .disk = &disk};
  {
    auto tiers = *Tiers::Open(options);
    NvmeExtent there = *tiers->nvme()->Allocate(2 * kPage, "state");
    there.Leave();
  }
  options.kept = {{0, 2 * kPage}};
  auto tiers = *Tiers::Open(options);
  NvmeTier& nvme = *tiers->nvme();
  NvmeExtent behind = *nvme.Allocate(kPage, "another chunk's state");
  NvmeRoom room = nvme.TakeKept(0)->TakeRoom();
  disk.FailNext(SimOperation::kReserve, 1, SimFault::kEnospc);
  const auto again = nvme.AllocateFrom(&room, 2 * kPage, "a version");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->offset(), 0);
}

TEST_F(TiersTest, AllReturnedEmptiesTheFile) {
  auto tiers = Open({.nvme = 4 * kPage});
  { NvmeExtent a = *tiers->nvme()->Allocate(4 * kPage, "a"); }
  struct stat info;
  ASSERT_EQ(fstat(tiers->nvme()->file().fd(), &info), 0);
  EXPECT_EQ(info.st_size, 0);
}

// Blocks not named as kept may belong to a job: they are neither allocated nor given back to the disk.
TEST_F(TiersTest, WhatNobodyNamedStaysWhereThatIsSaid) {
  std::string content;
  for (const char page : {'a', 'b', 'c', 'd'}) content.append(kPage, page);
  std::ofstream(directory_ / "nvme.tier") << content << "torn";
  const auto file = [&] {
    std::ifstream in(directory_ / "nvme.tier", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const TiersOptions options{
      .budget = {.nvme = 2 * kPage}, .directory = directory_.path(), .kept = {{kPage, kPage}}, .unnamed_stays = true};
  {
    auto tiers = *Tiers::Open(options);
    NvmeTier& nvme = *tiers->nvme();
    EXPECT_EQ(tiers->used().nvme, kPage);
    NvmeExtent fresh = *nvme.Allocate(kPage, "a version");
    EXPECT_EQ(fresh.offset(), 5 * kPage);  // behind the block that the file ends in
    fresh = NvmeExtent();
    EXPECT_EQ(file().substr(0, content.size()), content);
    // A kept extent that is taken and released is free like any other.
    *nvme.TakeKept(kPage);
    fresh = *nvme.Allocate(kPage, "in its place");
    EXPECT_EQ(fresh.offset(), kPage);
    EXPECT_EQ((*nvme.Allocate(kPage, "another")).offset(), 5 * kPage);
    fresh.Leave();
    EXPECT_EQ(nvme.Trim(), absl::OkStatus());
  }
  EXPECT_EQ(file().substr(2 * kPage, 2 * kPage), content.substr(2 * kPage));
  // All is known again: the rest is free.
  TiersOptions known = options;
  known.unnamed_stays = false;
  auto tiers = *Tiers::Open(known);
  EXPECT_EQ((*tiers->nvme()->Allocate(kPage, "a version")).offset(), 0);
}

// A catalog entry that names another's bytes, or bytes behind the end: what it means lies where nothing names it.
TEST_F(TiersTest, AWrongPlaceLeavesUnnamedSpaceAlone) {
  const std::string content(6 * kPage, 'x');
  for (const ExtentPlace wrong : {ExtentPlace{kPage, kPage}, {9 * kPage, kPage}, {3 * kPage + 1, kPage}}) {
    std::ofstream(directory_ / "nvme.tier") << content;
    auto tiers =
        *Tiers::Open({.budget = {.nvme = 8 * kPage}, .directory = directory_.path(), .kept = {{kPage, kPage}, wrong}});
    EXPECT_EQ((*tiers->nvme()->Allocate(kPage, "a version")).offset(), 6 * kPage) << wrong.offset;
    std::ifstream in(directory_ / "nvme.tier", std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}).substr(0, content.size()), content) << wrong.offset;
  }
}

TEST_F(TiersTest, DiskSmallerThanTheBudget) {
  auto tiers = Open({.nvme = uint64_t{1} << 50});
  const absl::Status status = tiers->nvme()->Allocate(uint64_t{1} << 49, "state").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(tiers->used().nvme, 0);
  EXPECT_TRUE(tiers->nvme()->Allocate(kPage, "state").ok());
}

TEST_F(TiersTest, FileOfAnotherServerIsRefused) {
  auto tiers = Open({.nvme = kPage});
  const absl::Status status = Tiers::Open({.budget = {.nvme = kPage}, .directory = directory_.path()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.ToString(), HasSubstr("nvme.tier is in use"));
}

TEST_F(TiersTest, UnwritableDirectoryIsNamed) {
  std::ofstream(directory_ / "file") << "x";
  const absl::Status status = Tiers::Open({.budget = {.nvme = kPage}, .directory = directory_ / "file/below"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_THAT(status.ToString(), HasSubstr("file/below failed: Not a directory"));
}

TEST_F(TiersTest, HbmBudgetWithoutThatDeviceIsRefused) {
  const absl::Status status =
      Tiers::Open({.budget = {.hbm = 1 << 30}, .directory = directory_.path(), .hbm_device = 99}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_THAT(status.ToString(), HasSubstr("an hbm budget of 1073741824 bytes was given"));
}

TEST_F(TiersTest, TrafficAddsUp) {
  auto tiers = Open({.dram = kPage});
  tiers->CountTraffic(TierKind::kNvme, 1, 2);
  tiers->CountTraffic(TierKind::kNvme, 10, 20);
  EXPECT_EQ(tiers->traffic().read.nvme, 11);
  EXPECT_EQ(tiers->traffic().written.nvme, 22);
  EXPECT_EQ(tiers->traffic().read.dram, 0);
}

// A processor that computes other bits is refused, with the function's name.
TEST(CheckProcessor, RefusesOtherBits) {
  EXPECT_EQ(CheckProcessor(kernels::CpuProcessor(), "the CPU"), absl::OkStatus());
  kernels::Processor broken = kernels::CpuProcessor();
  broken.squared_norm = [](kernels::Dtype dtype, const std::byte* x, uint64_t n) {
    kernels::NormResult result = kernels::SquaredNorm(dtype, x, n);
    result.squared_norm += result.squared_norm * 0x1p-52;
    return result;
  };
  const absl::Status status = CheckProcessor(broken, "GPU 3");
  EXPECT_EQ(model::ReasonOf(status), model::kWrongBits);
  EXPECT_THAT(status.ToString(), HasSubstr("self-test: GPU 3 does not compute this release's bits"));
  EXPECT_THAT(status.ToString(), HasSubstr("norm/bf16: "));
}

}  // namespace
}  // namespace ballast::storage
