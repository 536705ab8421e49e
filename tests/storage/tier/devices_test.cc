// The NVMe tier over several devices: striping, identities, shares, files that are as long as a file may be.
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/device_header.h"
#include "ballast/storage/tier/nvme_devices.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kBlockBytes = 4096;

class DevicesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const std::string& directory : {home_, a_, b_}) std::filesystem::create_directories(directory);
    options_.directory = home_;
    options_.devices = {{home_, 0, 0}, {a_, 64 * kBlockBytes, 0}, {b_, 64 * kBlockBytes, 0}};
    options_.disk = &disk_;
    options_.known.owner = "server-1";
    options_.known.remember = [this](NvmeFileId id, const std::string& path) {
      known_[id] = path;
      return absl::OkStatus();
    };
  }
  absl::StatusOr<std::unique_ptr<Tiers>> TryOpen() {
    options_.known.paths = known_;
    options_.budget = {};
    for (const NvmeDevice& device : options_.devices) options_.budget.nvme += device.budget;
    return Tiers::Open(options_);
  }
  std::unique_ptr<Tiers> Open() {
    auto tiers = TryOpen();
    EXPECT_TRUE(tiers.ok()) << tiers.status();
    return *std::move(tiers);
  }
  static ExtentPlace PlaceOf(const NvmeExtent& extent) { return {extent.offset(), extent.bytes(), extent.file_id()}; }
  std::string DirectoryOf(const NvmeExtent& extent) const {
    return std::filesystem::path(extent.file().path()).parent_path();
  }
  NvmeFileId IdIn(const std::string& directory) const {
    for (const auto& [id, path] : known_) {
      if (path == directory + "/nvme.tier") return id;
    }
    return 0;
  }
  void Swap(const std::string& one, const std::string& other) {
    const auto first = disk_.DurableContent(one), second = disk_.DurableContent(other);
    disk_.SetContent(one, second);
    disk_.SetContent(other, first);
  }

  ScratchDirectory directory_;
  const std::string home_ = directory_ / "home", a_ = directory_ / "a", b_ = directory_ / "b";
  const std::string tier_a_ = a_ + "/nvme.tier", tier_b_ = b_ + "/nvme.tier";
  SimDisk disk_{7};
  std::map<NvmeFileId, std::string> known_;
  TiersOptions options_;
};

TEST_F(DevicesTest, ExtentsAreStripedBySpeedAndWithinShares) {
  options_.devices[1].bytes_per_s = 3'000'000'000;
  options_.devices[2].bytes_per_s = 1'000'000'000;
  options_.devices[0].bytes_per_s = 1'000'000'000;
  auto tiers = Open();
  NvmeTier& nvme = *tiers->nvme();
  std::map<std::string, int> count;
  std::vector<NvmeExtent> extents;
  for (int i = 0; i < 40; ++i) ++count[DirectoryOf(extents.emplace_back(*nvme.Allocate(kBlockBytes, "state")))];
  EXPECT_EQ(count[a_], 30);
  EXPECT_EQ(count[b_], 10);
  // A device that is full leaves the rest to the others; then the error names all.
  while (true) {
    auto extent = nvme.Allocate(kBlockBytes, "state");
    if (!extent.ok()) {
      EXPECT_EQ(model::ReasonOf(extent.status()), model::kBudget);
      EXPECT_THAT(extent.status().message(), AllOf(HasSubstr("0 in " + a_), HasSubstr("0 in " + b_)));
      break;
    }
    extents.push_back(*std::move(extent));
  }
  EXPECT_EQ(extents.size(), 128);
  EXPECT_EQ(tiers->usage().nvme[1].used, 64 * kBlockBytes);
  // The log is in the data directory, which has no share here.
  const absl::Status log = tiers->Take(TierKind::kNvme, kBlockBytes, "the gradient log", TierPart::kLog);
  EXPECT_EQ(log.code(), absl::StatusCode::kResourceExhausted);
  extents.clear();
  EXPECT_THAT(tiers->Take(TierKind::kNvme, kBlockBytes, "the gradient log", TierPart::kLog).message(),
              HasSubstr("nvme in " + home_ + " is short of 4096 bytes"));
  // A lowered budget is lowered on each.
  ASSERT_EQ(tiers->SetBudget({.nvme = 64 * kBlockBytes}), absl::OkStatus());
  EXPECT_EQ(tiers->usage().nvme[1].budget, 32 * kBlockBytes);
}

TEST_F(DevicesTest, RoomIsSpreadAndAnExtentOfItGoesWhereLittleIsWritten) {
  auto tiers = Open();
  NvmeTier& nvme = *tiers->nvme();
  NvmeRoom room = *nvme.Promise(16 * kBlockBytes, "versions", 2 * kBlockBytes);
  EXPECT_EQ(room.bytes(), 16 * kBlockBytes);
  std::vector<NvmeExtent> extents;
  extents.push_back(*nvme.AllocateFrom(&room, 2 * kBlockBytes, "a version"));
  extents[0].home()->BeginWrite(8 * kBlockBytes);
  for (int i = 0; i < 3; ++i) {
    extents.push_back(*nvme.AllocateFrom(&room, 2 * kBlockBytes, "a version"));
    EXPECT_NE(extents.back().home(), extents[0].home()) << "beside a device that writes";
  }
  EXPECT_EQ(extents[0].home()->EndWrite(8 * kBlockBytes, absl::OkStatus()), absl::OkStatus());
  EXPECT_EQ(room.bytes(), 8 * kBlockBytes);
  room.Join(extents[0].TakeRoom());
  EXPECT_EQ(room.bytes(), 10 * kBlockBytes);
  // The room lies on two devices: a larger extent than either part needs the parts to be gathered.
  EXPECT_FALSE(nvme.Holds(room, 10 * kBlockBytes));
  ASSERT_EQ(nvme.Gather(&room, 10 * kBlockBytes, "a version"), absl::OkStatus());
  EXPECT_TRUE(nvme.Holds(room, 10 * kBlockBytes));
  EXPECT_EQ(room.bytes(), 10 * kBlockBytes);
  EXPECT_EQ(tiers->used().nvme, 16 * kBlockBytes);
  NvmeRoom split = room.Split(kBlockBytes);
  EXPECT_EQ(split.bytes() + room.bytes(), 10 * kBlockBytes);
  // Promises are all or nothing.
  const absl::Status refused = nvme.Promise(200 * kBlockBytes, "versions").status();
  EXPECT_THAT(refused.message(), HasSubstr("versions needs 819200"));
  EXPECT_EQ(tiers->used().nvme, 16 * kBlockBytes);
}

TEST_F(DevicesTest, ARestartFindsExtentsByTheFileAndNotByThePath) {
  ExtentPlace on_a, on_b;
  {
    auto tiers = Open();
    NvmeExtent one = *tiers->nvme()->Allocate(kBlockBytes, "state"),
               two = *tiers->nvme()->Allocate(kBlockBytes, "state");
    ASSERT_NE(one.home(), two.home());
    on_a = PlaceOf(DirectoryOf(one) == a_ ? one : two);
    on_b = PlaceOf(DirectoryOf(one) == a_ ? two : one);
    EXPECT_EQ(on_a.offset, on_b.offset);
    EXPECT_EQ(on_a.offset, kDeviceHeaderBytes);
    one.Leave();
    two.Leave();
  }
  options_.kept = {on_a, on_b};
  Swap(tier_a_, tier_b_);  // the disks were mounted the other way round
  auto tiers = Open();
  EXPECT_EQ(tiers->used().nvme, 2 * kBlockBytes);
  const NvmeExtent there = *tiers->nvme()->TakeKept(on_a.offset, on_a.file);
  EXPECT_EQ(DirectoryOf(there), b_);
  EXPECT_EQ(known_.at(on_a.file), tier_b_);
  EXPECT_FALSE(tiers->nvme()->TakeKept(on_a.offset, on_a.file).ok());
  // The same offset of the other file is another extent.
  EXPECT_EQ(DirectoryOf(*tiers->nvme()->TakeKept(on_b.offset, on_b.file)), a_);
}

TEST_F(DevicesTest, PartsThatDoNotFitSwappedDisksNameTheSwap) {
  options_.devices = {{.directory = home_, .budget = 0},
                      {.directory = a_, .budget = 4 * kBlockBytes},
                      {.directory = b_, .budget = kBlockBytes}};
  {
    auto tiers = Open();
    for (int i = 0; i < 5; ++i) {
      NvmeExtent extent = *tiers->nvme()->Allocate(kBlockBytes, "state");
      options_.kept.push_back(PlaceOf(extent));
      extent.Leave();
    }
  }
  Swap(tier_a_, tier_b_);
  for (int start = 0; start < 2; ++start) {  // the second is told no less
    const absl::Status status = TryOpen().status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(tier_b_, " was at ", tier_a_)));
  }
}

TEST_F(DevicesTest, AMissingDeviceIsNamedAndNothingTakesItsPlace) {
  ExtentPlace on_a, on_b;
  {
    auto tiers = Open();
    NvmeExtent one = *tiers->nvme()->Allocate(kBlockBytes, "state"),
               two = *tiers->nvme()->Allocate(kBlockBytes, "state");
    on_a = PlaceOf(DirectoryOf(one) == a_ ? one : two);
    on_b = PlaceOf(DirectoryOf(one) == a_ ? two : one);
    one.Leave();
    two.Leave();
  }
  options_.kept = {on_a, on_b};
  const auto disk_b = disk_.DurableContent(tier_b_);
  for (const bool directory_is_there : {true, false}) {
    SCOPED_TRACE(directory_is_there);
    // Not mounted: an empty directory, or none at all.
    ASSERT_EQ(disk_.Remove(tier_b_), absl::OkStatus());
    if (!directory_is_there) std::filesystem::remove(b_);
    auto tiers = Open();
    EXPECT_EQ(tiers->budget().nvme, 64 * kBlockBytes);  // a's alone
    const absl::Status missing = tiers->nvme()->TakeKept(on_b.offset, on_b.file).status();
    EXPECT_EQ(missing.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(missing.message(), AllOf(HasSubstr(tier_b_), HasSubstr(ShowFileId(on_b.file)), HasSubstr("drop")));
    EXPECT_EQ(tiers->nvme()->CheckThere(on_a.file), absl::OkStatus());
    NvmeExtent there = *tiers->nvme()->TakeKept(on_a.offset, on_a.file);
    // What is new goes to the other device, and the missing one stays as it is.
    EXPECT_EQ(DirectoryOf(*tiers->nvme()->Allocate(kBlockBytes, "state")), a_);
    EXPECT_FALSE(disk_.Exists(tier_b_));
    there.Leave();
    tiers.reset();
    std::filesystem::create_directories(b_);
  }
  disk_.SetContent(tier_b_, disk_b);
  {
    auto tiers = Open();
    NvmeExtent there = *tiers->nvme()->TakeKept(on_b.offset, on_b.file);
    there.Leave();
  }
  // Once nothing names it, its place is free for a new disk.
  options_.kept = {on_a};
  disk_.SetContent(tier_b_, {});
  auto tiers = Open();
  EXPECT_EQ(tiers->budget().nvme, 128 * kBlockBytes);
  const NvmeExtent one = *tiers->nvme()->Allocate(kBlockBytes, "state");
  const NvmeExtent two = *tiers->nvme()->Allocate(kBlockBytes, "state");
  EXPECT_NE((DirectoryOf(one) == b_ ? one : two).file_id(), on_b.file);
}

TEST_F(DevicesTest, AFileOfALaterFormatIsRefusedUntouched) {
  ExtentPlace place;
  {
    auto tiers = Open();
    NvmeExtent extent = *tiers->nvme()->Allocate(kBlockBytes, "state");
    place = PlaceOf(extent);
    extent.Leave();
  }
  const std::string path = known_.at(place.file);
  auto content = disk_.DurableContent(path);
  for (const size_t at : {size_t{0}, size_t{kBlockBytes}}) {
    const absl::Span<std::byte> block(reinterpret_cast<std::byte*>(content.data()) + at, kBlockBytes);
    block[12] = std::byte{2};
    std::fill_n(block.begin() + 8, 4, std::byte{0});
    const uint32_t digest = kernels::Crc32c(block);
    std::memcpy(block.data() + 8, &digest, sizeof(digest));
  }
  disk_.SetContent(path, content);
  const absl::Status status = TryOpen().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kLaterVersion);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path), HasSubstr("has format 2; this version reads 1")));
  // Where entries name the file, their jobs are refused, and others go on.
  options_.kept = {place};
  auto tiers = Open();
  EXPECT_THAT(std::string(tiers->nvme()->TakeKept(place.offset, place.file).status().message()),
              HasSubstr("has format 2"));
  EXPECT_TRUE(disk_.DurableContent(path) == content);
}

TEST_F(DevicesTest, AForeignDiskIsRefusedOrLeftAlone) {
  ExtentPlace on_b;
  {
    auto tiers = Open();
    NvmeExtent one = *tiers->nvme()->Allocate(kBlockBytes, "state"),
               two = *tiers->nvme()->Allocate(kBlockBytes, "state");
    NvmeExtent& of_b = DirectoryOf(one) == b_ ? one : two;
    on_b = PlaceOf(of_b);
    of_b.Leave();
  }
  const NvmeFileId a = IdIn(a_);
  known_.erase(a);
  const absl::Status refused = TryOpen().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  // The file is not in the catalog: this server's is older than the file, or the file is another server's.
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr(tier_a_), HasSubstr("state of this server's data directory"), HasSubstr("move")));
  options_.known.owner = "server-2";
  EXPECT_THAT(TryOpen().status().message(), AllOf(HasSubstr(tier_a_), HasSubstr("server 'server-1'")));
  options_.known.owner = "server-1";
  EXPECT_EQ(known_.count(a), 0);
  known_[a] = tier_a_;
  // A foreign disk where a device with state was: the device is missing, the foreign file stays as it is.
  options_.kept = {on_b};
  std::vector<std::byte> foreign(4 * kBlockBytes, std::byte{7});
  disk_.SetContent(tier_b_, foreign);
  {
    auto tiers = Open();
    EXPECT_THAT(tiers->nvme()->CheckThere(on_b.file).message(), HasSubstr("does not begin with the block"));
    (void)tiers->nvme()->Allocate(kBlockBytes, "state");
  }
  EXPECT_EQ(disk_.DurableContent(tier_b_), foreign);
  // One of two copies tells enough.
  options_.kept = {};
  disk_.SetContent(tier_b_, {});
  Open();
  disk_.Corrupt(tier_b_, 0, kBlockBytes);
  EXPECT_EQ(Open()->budget().nvme, 128 * kBlockBytes);
  disk_.Corrupt(tier_b_, kBlockBytes, kBlockBytes);
  EXPECT_EQ(TryOpen().status().code(), absl::StatusCode::kDataLoss);
  disk_.SetContent(tier_b_, {});
  // A directory that was never there is no device.
  options_.kept = {};
  options_.devices[2].directory = directory_ / "nowhere";
  EXPECT_THAT(TryOpen().status().message(), HasSubstr("there is no directory " + (directory_ / "nowhere")));
}

TEST_F(DevicesTest, AFileThatIsAsLongAsItMayBeIsFollowedByAnother) {
  options_.nvme_file_bytes_max = 16 * kBlockBytes;
  options_.devices[0].budget = 32 * kBlockBytes;
  std::vector<ExtentPlace> places;
  {
    auto tiers = Open();
    std::vector<NvmeExtent> extents;
    for (int i = 0; i < 40; ++i) extents.push_back(*tiers->nvme()->Allocate(4 * kBlockBytes, "state"));
    for (NvmeExtent& extent : extents) {
      places.push_back(PlaceOf(extent));
      extent.Leave();
    }
  }
  for (const char* name : {"/nvme.tier.1", "/nvme.tier.5"}) EXPECT_TRUE(disk_.Exists(a_ + name)) << name;
  EXPECT_TRUE(disk_.Exists(home_ + "/nvme.tier.1"));
  options_.kept = places;
  {
    auto tiers = Open();
    EXPECT_EQ(tiers->used().nvme, 160 * kBlockBytes);
    for (const ExtentPlace& place : places) EXPECT_TRUE(tiers->nvme()->TakeKept(place.offset, place.file).ok());
    // Now they are free, and are used again before the device gets further files.
    const uint64_t files = tiers->nvme()->file_count();
    for (int round = 0; round < 2; ++round) {
      NvmeRoom room = *tiers->nvme()->Promise(120 * kBlockBytes, "versions", 4 * kBlockBytes);
      EXPECT_EQ(tiers->nvme()->file_count(), files);
    }
  }
  // A file of the middle is missing: its extents alone are gone, and no file takes its name.
  const std::string middle = a_ + "/nvme.tier.1";
  disk_.SetContent(middle, {});
  auto tiers = Open();
  int missing = 0;
  for (const ExtentPlace& place : places) missing += tiers->nvme()->CheckThere(place.file).ok() ? 0 : 1;
  EXPECT_GT(missing, 0);
  EXPECT_LT(missing, 20);
  EXPECT_TRUE(disk_.DurableContent(middle).empty());
}

// EFBIG of a file system whose files end earlier than ours is no full disk.
TEST_F(DevicesTest, AFileSystemThatEndsFilesEarlyGetsMoreOfThem) {
  options_.disk = nullptr;
  auto tiers = Open();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit low = {16 * kBlockBytes, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  std::vector<NvmeExtent> extents;
  absl::Status refused;
  for (int i = 0; i < 30 && refused.ok(); ++i) {
    auto extent = tiers->nvme()->Allocate(4 * kBlockBytes, "state");
    refused = extent.status();
    if (extent.ok()) extents.push_back(*std::move(extent));
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(refused, absl::OkStatus());
  EXPECT_TRUE(std::filesystem::exists(a_ + "/nvme.tier.3"));
}

TEST_F(DevicesTest, ADiskFullOnOneDeviceLeavesTheOthers) {
  auto tiers = Open();
  disk_.FailNext(SimOperation::kReserve, 1, SimFault::kEnospc);
  NvmeRoom room = *tiers->nvme()->Promise(32 * kBlockBytes, "versions", 4 * kBlockBytes);
  EXPECT_EQ(room.bytes(), 32 * kBlockBytes);
}

TEST_F(DevicesTest, AFailingDeviceGetsNothingMoreAndIsNoOneElsesConcern) {
  auto tiers = Open();
  NvmeTier& nvme = *tiers->nvme();
  NvmeRoom room = *nvme.Promise(16 * kBlockBytes, "versions", 2 * kBlockBytes);
  NvmeExtent one = *nvme.AllocateFrom(&room, 2 * kBlockBytes, "a version");
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  const absl::Status failed = nvme.Sync({one.file_id()});
  EXPECT_THAT(failed.message(), HasSubstr(one.file().path()));
  EXPECT_EQ(nvme.Sync({one.file_id()}), failed);
  for (int i = 0; i < 4; ++i) {
    const NvmeExtent other = *nvme.Allocate(kBlockBytes, "state");
    EXPECT_NE(other.home(), one.home());
    EXPECT_EQ(nvme.Sync({other.file_id()}), absl::OkStatus());
  }
  // The room that lies on it moves when it is needed.
  std::vector<NvmeExtent> versions;
  while (room.bytes() > 0) {
    if (!nvme.Holds(room, 2 * kBlockBytes)) {
      ASSERT_EQ(nvme.Gather(&room, 2 * kBlockBytes, "a version"), absl::OkStatus());
    }
    versions.push_back(*nvme.AllocateFrom(&room, 2 * kBlockBytes, "a version"));
    EXPECT_NE(versions.back().home(), one.home());
  }
  EXPECT_EQ(versions.size(), 7);
}

}  // namespace
}  // namespace ballast::storage
