// A crash of the simulated disk: writes that survive, writes that may be lost, and outcomes that follow from the seed.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/blocks.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kBlock = kIoAlignment;
constexpr int kSeeds = 300;

// "kept", "lost" or "torn": what became of a write over `before`; "wrong" if a sector holds neither.
std::string Fate(const std::vector<std::byte>& content, uint8_t before, uint8_t written) {
  uint64_t kept = 0;
  uint64_t lost = 0;
  for (uint64_t at = 0; at < content.size(); at += kSimSectorBytes) {
    for (uint64_t i = 0; i < kSimSectorBytes; ++i) {
      if (content[at + i] != content[at]) return "wrong";
    }
    if (content[at] == std::byte{written}) ++kept;
    if (content[at] == std::byte{before}) ++lost;
  }
  if ((kept + lost) * kSimSectorBytes != content.size()) return "wrong";
  return kept == 0 ? "lost" : lost == 0 ? "kept" : "torn";
}

TEST(SimCrashTest, UnsyncedIsKeptLostOrTorn) {
  std::set<std::string> fates;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimDisk disk(seed);
    auto file = *disk.Open("f", Disk::Mode::kEmptied);
    ASSERT_TRUE(file->Write(0, Blocks(2, 1).span()).ok());
    ASSERT_TRUE(file->Sync().ok());
    ASSERT_TRUE(file->Write(0, Blocks(2, 2).span()).ok());
    disk.Crash();
    fates.insert(Fate(disk.DurableContent("f"), 1, 2));
  }
  EXPECT_THAT(fates, ::testing::ElementsAre("kept", "lost", "torn"));
}

TEST(SimCrashTest, SyncedStays) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimDisk disk(seed);
    auto file = *disk.Open("f", Disk::Mode::kEmptied);
    ASSERT_TRUE(file->Write(0, Blocks(2, 1).span()).ok());
    ASSERT_TRUE(file->Sync().ok());
    disk.Crash();
    disk.Crash();
    ASSERT_EQ(disk.DurableContent("f"), std::vector<std::byte>(2 * kBlock, std::byte{1})) << "seed " << seed;
  }
}

TEST(SimCrashTest, ALaterWriteMaySurviveAnEarlierOne) {
  std::set<std::string> fates;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimDisk disk(seed);
    auto file = *disk.Open("f", Disk::Mode::kEmptied);
    ASSERT_TRUE(file->Reserve(0, 2 * kBlock).ok());
    ASSERT_TRUE(file->Write(0, Blocks(1, 1).span()).ok());
    ASSERT_TRUE(file->Write(kBlock, Blocks(1, 2).span()).ok());
    disk.Crash();
    const std::vector<std::byte> content = disk.DurableContent("f");
    ASSERT_EQ(content.size(), 2 * kBlock);
    const auto middle = content.begin() + kBlock;
    fates.insert(absl::StrCat(Fate({content.begin(), middle}, 0, 1), ", ", Fate({middle, content.end()}, 0, 2)));
  }
  EXPECT_EQ(fates.size(), 9) << "each of the two: kept, lost or torn";
  EXPECT_TRUE(fates.contains("lost, kept"));
}

TEST(SimCrashTest, InFlightIsKeptLostOrTornAndEnds) {
  std::set<std::string> fates;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimDisk disk(seed);
    auto file = *disk.Open("f", Disk::Mode::kEmptied);
    auto queue = *disk.MakeQueue({});
    ASSERT_TRUE(file->Reserve(0, 2 * kBlock).ok());
    {
      Blocks written(2, 1);
      ASSERT_TRUE(queue->Submit({IoRequest::Kind::kWrite, file.get(), 0, written.span(), 5}).ok());
      disk.Crash();
    }
    fates.insert(Fate(disk.DurableContent("f"), 0, 1));
    std::vector<IoCompletion> completions;
    queue->Reap(/*wait=*/true, &completions);
    ASSERT_EQ(completions.size(), 1);
    EXPECT_EQ(completions[0].tag, 5);
    EXPECT_EQ(completions[0].status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(queue->in_flight(), 0);
  }
  EXPECT_THAT(fates, ::testing::ElementsAre("kept", "lost", "torn"));
}

TEST(SimCrashTest, AQueuesSyncCoversOnlyWhatHadCompletedBeforeIt) {
  bool lost = false;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimDisk disk(seed);
    auto file = *disk.Open("f", Disk::Mode::kEmptied);
    auto queue = *disk.MakeQueue({});
    Blocks first(1, 1);
    Blocks second(1, 2);
    std::vector<IoCompletion> completions;
    ASSERT_TRUE(queue->Submit({IoRequest::Kind::kWrite, file.get(), 0, first.span(), 1}).ok());
    while (queue->in_flight() > 0) queue->Reap(/*wait=*/true, &completions);
    ASSERT_TRUE(queue->Submit({IoRequest::Kind::kWrite, file.get(), kBlock, second.span(), 2}).ok());
    ASSERT_TRUE(queue->Submit({IoRequest::Kind::kSync, file.get(), 0, {}, 3}).ok());
    while (queue->in_flight() > 0) queue->Reap(/*wait=*/true, &completions);
    for (const IoCompletion& completion : completions) ASSERT_TRUE(completion.status.ok());
    disk.Crash();
    const std::vector<std::byte> content = disk.DurableContent("f");
    ASSERT_GE(content.size(), kBlock) << "seed " << seed;
    EXPECT_EQ(Fate({content.begin(), content.begin() + kBlock}, 0, 1), "kept") << "seed " << seed;
    // Though the sync was performed after it: it had been submitted before.
    lost |= completions.at(1).tag == 2 && content.size() == kBlock;
  }
  EXPECT_TRUE(lost);
}

TEST(SimCrashTest, TruncationStaysAndDropsWhatItCut) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimDisk disk(seed);
    auto file = *disk.Open("f", Disk::Mode::kEmptied);
    ASSERT_TRUE(file->Write(0, Blocks(2, 1).span()).ok());
    ASSERT_TRUE(file->Sync().ok());
    ASSERT_TRUE(file->Write(0, Blocks(3, 2).span()).ok());
    ASSERT_TRUE(file->Truncate(kBlock).ok());
    disk.Crash();
    const std::vector<std::byte> content = disk.DurableContent("f");
    ASSERT_EQ(content.size(), kBlock) << "seed " << seed;
    EXPECT_NE(Fate(content, 1, 2), "wrong") << "seed " << seed;
  }
}

TEST(SimCrashTest, HandlesDieAndLocksAreFree) {
  SimDisk disk(1);
  auto file = *disk.Open("f", Disk::Mode::kEmptied);
  auto queue = *disk.MakeQueue({});
  Blocks block(1, 1);
  disk.Crash();
  for (const absl::Status& status : {file->Size().status(), file->Read(0, block.span()), file->Write(0, block.span()),
                                     file->Sync(), file->Reserve(0, kBlock), file->Truncate(0)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kIo);
  }
  ASSERT_TRUE(queue->Submit({IoRequest::Kind::kWrite, file.get(), 0, block.span(), 1}).ok());
  std::vector<IoCompletion> completions;
  queue->Reap(/*wait=*/true, &completions);
  ASSERT_EQ(completions.size(), 1);
  EXPECT_EQ(completions[0].status.code(), absl::StatusCode::kInternal);
  auto again = disk.Open("f", Disk::Mode::kKept);
  ASSERT_TRUE(again.ok()) << again.status();
  file.reset();
  EXPECT_EQ(disk.Open("f", Disk::Mode::kKept).status().code(), absl::StatusCode::kFailedPrecondition)
      << "the dead handle must not free the lock of the one that lives";
}

// Appends records of one block, each synced, some through a queue and some directly. Returns how many are
// acknowledged: up to the first error.
uint64_t Append(SimDisk& disk, uint64_t records) {
  auto file = disk.Open("log", Disk::Mode::kKept);
  if (!file.ok()) return 0;
  auto queue = *disk.MakeQueue({});
  for (uint64_t i = 0; i < records; ++i) {
    Blocks record(1, static_cast<uint8_t>(i + 1));
    if (i % 2 == 0) {
      if (!(*file)->Write(i * kBlock, record.span()).ok() || !(*file)->Sync().ok()) return i;
      continue;
    }
    for (const auto kind : {IoRequest::Kind::kWrite, IoRequest::Kind::kSync}) {
      const bool write = kind == IoRequest::Kind::kWrite;
      const auto buffer = write ? record.span() : absl::Span<std::byte>();
      EXPECT_TRUE(queue->Submit({kind, file->get(), write ? i * kBlock : 0, buffer, i}).ok());
      std::vector<IoCompletion> completions;
      queue->Reap(/*wait=*/true, &completions);
      if (!completions.at(0).status.ok()) return i;
    }
  }
  return records;
}

TEST(SimCrashTest, CrashAtEveryPointKeepsWhatWasAcknowledged) {
  constexpr uint64_t kRecords = 6;
  SimDisk whole(0);
  ASSERT_EQ(Append(whole, kRecords), kRecords);
  const uint64_t operations = whole.operations();
  ASSERT_EQ(operations, 1 + 2 * kRecords);
  bool more_than_acknowledged = false;
  for (uint64_t point = 1; point <= operations; ++point) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      SimDisk disk(seed);
      disk.CrashAfter(point);
      const uint64_t acknowledged = Append(disk, kRecords);
      EXPECT_EQ(acknowledged, point < 2 ? 0 : (point - 2) / 2);
      EXPECT_TRUE(disk.off());
      EXPECT_EQ(disk.operations(), point);
      EXPECT_EQ(disk.Open("log", Disk::Mode::kKept).status().code(), absl::StatusCode::kInternal);
      disk.Crash();
      EXPECT_FALSE(disk.off());
      const std::vector<std::byte> content = disk.DurableContent("log");
      ASSERT_GE(content.size(), acknowledged * kBlock) << "point " << point << ", seed " << seed;
      for (uint64_t at = 0; at < acknowledged * kBlock; ++at) {
        ASSERT_EQ(content[at], static_cast<std::byte>(at / kBlock + 1)) << "point " << point << ", seed " << seed;
      }
      more_than_acknowledged |= content.size() > acknowledged * kBlock;
      EXPECT_EQ(Append(disk, kRecords), kRecords);
    }
  }
  EXPECT_TRUE(more_than_acknowledged);
}

TEST(SimCrashTest, CrashAfterZeroAndCrashCallItOff) {
  SimDisk disk(1);
  disk.CrashAfter(1);
  disk.CrashAfter(0);
  EXPECT_TRUE(disk.Open("f", Disk::Mode::kEmptied).ok());
  disk.CrashAfter(1);
  disk.Crash();
  EXPECT_TRUE(disk.Open("f", Disk::Mode::kEmptied).ok());
}

// Random work with faults and crashes on 8 blocks. Every sector must hold a value that the rules allow: the last one a
// sync covered, or one written since.
class Workload {
 public:
  Workload(uint64_t seed, bool faults) : disk_(seed), random_(seed + 1000), allowed_(kSectors, {0}), seed_(seed) {
    if (faults) {
      disk_.SetFaultProbability(SimOperation::kRead, SimFault::kEio, 0.1);
      disk_.SetFaultProbability(SimOperation::kWrite, SimFault::kShort, 0.1);
    }
    Restart();
    EXPECT_TRUE(file_->Reserve(0, kFileBlocks * kBlock).ok());
  }

  // Returns the history in words.
  std::string Run(int steps) {
    for (int i = 0; i < steps; ++i) Step();
    return history_;
  }

 private:
  static constexpr uint64_t kFileBlocks = 8;
  static constexpr uint64_t kSectors = kFileBlocks * kBlock / kSimSectorBytes;

  void Restart() {
    file_ = *disk_.Open("f", Disk::Mode::kKept);
    queue_ = *disk_.MakeQueue({});
  }

  void Step() {
    const uint64_t what = random_.Below(20);
    if (what < 12) {
      Write();
    } else if (what < 15) {
      Sync();
    } else if (what < 18) {
      Blocks block(1);
      const absl::Status status = file_->Read(random_.Below(kFileBlocks) * kBlock, block.span());
      absl::StrAppend(&history_, "read ", status.ok(), " ", block.at(0), "; ");
    } else {
      Crash();
    }
  }

  void Write() {
    if (queue_->in_flight() == kIoRequestsMax) return;
    stamp_ = static_cast<uint8_t>(stamp_ == 255 ? 1 : stamp_ + 1);
    const uint64_t first = random_.Below(kFileBlocks);
    const uint64_t count = 1 + random_.Below(kFileBlocks - first);
    for (uint64_t i = first * 8; i < (first + count) * 8; ++i) allowed_[i].push_back(stamp_);
    buffers_.push_back(std::make_unique<Blocks>(count, stamp_));
    EXPECT_TRUE(
        queue_->Submit({IoRequest::Kind::kWrite, file_.get(), first * kBlock, buffers_.back()->span(), stamp_}).ok());
    Reap(/*wait=*/false);
  }

  // In-flight writes are awaited first, so what each sector holds is known afterwards.
  void Sync() {
    while (queue_->in_flight() > 0) Reap(/*wait=*/true);
    EXPECT_TRUE(file_->Sync().ok());
    const std::vector<std::byte> content = disk_.DurableContent("f");
    Check(content);
    for (uint64_t i = 0; i < kSectors; ++i) allowed_[i] = {static_cast<uint8_t>(content[i * kSimSectorBytes])};
    buffers_.clear();
  }

  void Crash() {
    disk_.Crash();
    buffers_.clear();
    const std::vector<std::byte> content = disk_.DurableContent("f");
    Check(content);
    for (uint64_t i = 0; i < kSectors; ++i) {
      allowed_[i] = {static_cast<uint8_t>(content[i * kSimSectorBytes])};
      absl::StrAppend(&history_, content[i * kSimSectorBytes], " ");
    }
    Restart();
  }

  void Reap(bool wait) {
    std::vector<IoCompletion> completions;
    queue_->Reap(wait, &completions);
    for (const IoCompletion& completion : completions) absl::StrAppend(&history_, "wrote ", completion.tag, "; ");
  }

  void Check(const std::vector<std::byte>& content) {
    ASSERT_EQ(content.size(), kFileBlocks * kBlock);
    for (uint64_t i = 0; i < content.size(); ++i) {
      const std::vector<uint8_t>& allowed = allowed_[i / kSimSectorBytes];
      const bool found = std::find(allowed.begin(), allowed.end(), static_cast<uint8_t>(content[i])) != allowed.end();
      ASSERT_TRUE(found) << "byte " << i << ", seed " << seed_;
    }
  }

  SimDisk disk_;
  sim::Random random_;
  std::unique_ptr<BlockFile> file_;
  std::vector<std::unique_ptr<Blocks>> buffers_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<std::vector<uint8_t>> allowed_;  // of each sector
  uint8_t stamp_ = 0;
  uint64_t seed_;
  std::string history_;
};

TEST(SimCrashTest, RandomWorkKeepsTheRules) {
  for (uint64_t seed = 0; seed < 30 && !::testing::Test::HasFailure(); ++seed) Workload(seed, false).Run(200);
}

TEST(SimCrashTest, SameSeedSameResult) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const std::string history = Workload(seed, true).Run(100);
    EXPECT_EQ(history, Workload(seed, true).Run(100)) << "seed " << seed;
    EXPECT_NE(history, Workload(seed + 1, true).Run(100)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::storage
