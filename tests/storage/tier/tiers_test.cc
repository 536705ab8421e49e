#include "ballast/storage/tier/tiers.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
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
  EXPECT_TRUE(tiers->Take(TierKind::kDram, 600, "slices").ok());
  const absl::Status status = tiers->Take(TierKind::kDram, 500, "slices");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(status.ToString(), HasSubstr("dram is short of 100 bytes: slices needs 500, 400 of 1000 are free"));
  tiers->Return(TierKind::kDram, 600);
  EXPECT_TRUE(tiers->Take(TierKind::kDram, 1000, "slices").ok());
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
  ASSERT_EQ(nvme->Sync(), absl::OkStatus());
  disk.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  const absl::Status first = nvme->Sync();
  EXPECT_EQ(first.code(), absl::StatusCode::kInternal) << first;
  const uint64_t syncs = disk.operations(SimOperation::kSync);
  EXPECT_EQ(nvme->Sync(), first);
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
  ASSERT_TRUE(tiers->Take(TierKind::kNvme, 2 * kPage, "a log").ok());
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
  BudgetLease lease = nvme.Allocate(4 * kPage, "room")->TakeLease();
  EXPECT_EQ(reservations(), 1);
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 4; ++i) extents.push_back(*nvme.AllocateFrom(&lease, kPage, "a version"));
  EXPECT_EQ(lease.bytes(), 0);
  extents[1].TakeLease();
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

TEST_F(TiersTest, AFullDiskLeavesTheCallerHisShareOfTheBudget) {
  SimDisk disk(1);
  auto tiers = *Tiers::Open({.budget = {.nvme = 4 * kPage}, .directory = directory_.path(), .disk = &disk});
  NvmeTier& nvme = *tiers->nvme();
  BudgetLease room = nvme.Allocate(2 * kPage, "room")->TakeLease();
  const NvmeExtent there = *nvme.Allocate(2 * kPage, "what lies in its place");
  disk.FailNext(SimOperation::kReserve, 1, SimFault::kEnospc);
  const absl::Status status = nvme.AllocateFrom(&room, kPage, "a version").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(room.bytes(), 2 * kPage);
  EXPECT_TRUE(nvme.AllocateFrom(&room, 2 * kPage, "a version").ok());
  EXPECT_EQ(room.bytes(), 0);
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
  BudgetLease room = nvme.TakeKept(0)->TakeLease();
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
