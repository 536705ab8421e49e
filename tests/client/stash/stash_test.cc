#include "ballast/client/python/native/stash/stash.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/small_disk.h"
#include "ballast/tests/storage/in_child.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::stash {
namespace {

using storage::SimDisk;
using storage::SimFault;
using storage::SimOperation;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::vector<std::byte> Bytes(uint64_t count, uint64_t seed) {
  std::vector<uint64_t> words(count / 8 + 1);
  std::ranges::generate(words, std::mt19937_64(seed));
  std::vector<std::byte> bytes(count);
  std::memcpy(bytes.data(), words.data(), count);
  return bytes;
}

std::vector<std::byte> Taken(StashedPart& part) {
  std::vector<std::byte> bytes(part.bytes());
  const absl::Status status = part.Take(absl::MakeSpan(bytes));
  EXPECT_TRUE(status.ok()) << status;
  return bytes;
}

// Polls: transfers are the disk's thread's.
bool Becomes(const std::function<bool()>& so) {
  for (int i = 0; i < 30'000 && !so(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return so();
}
bool BecomesReady(const StashedPart& part) {
  return Becomes([&] { return part.ready(); });
}

class StashTest : public ::testing::Test {
 protected:
  std::shared_ptr<Stash> Open(storage::TierBytes budget, storage::Disk* disk = nullptr) {
    auto stash =
        Stash::Open({.budget = budget, .path = directory_ / "stash", .staging_bytes = 2 * kPartBytesMax, .disk = disk});
    EXPECT_TRUE(stash.ok()) << stash.status();
    return *std::move(stash);
  }
  std::vector<StashedPart> PutAll(Stash& stash, uint64_t count, uint64_t bytes) {
    std::vector<StashedPart> parts;
    for (uint64_t i = 0; i < count; ++i) {
      auto part = stash.Put(Bytes(bytes, i));
      EXPECT_TRUE(part.ok()) << part.status();
      parts.push_back(*std::move(part));
    }
    return parts;
  }
  // Each is in the file before the next is put: the oldest leave staging first.
  std::vector<StashedPart> PutOneByOne(Stash& stash, uint64_t count) {
    std::vector<StashedPart> parts;
    for (uint64_t i = 0; i < count; ++i) {
      auto part = stash.Put(Bytes(kMiB, i));
      EXPECT_TRUE(part.ok()) << part.status();
      parts.push_back(*std::move(part));
      EXPECT_TRUE(Becomes([&] { return stash.counters().written == (i + 1) * kMiB; }));
    }
    return parts;
  }
  ScratchDirectory directory_;
};

TEST_F(StashTest, PartsGoToDramThenToAFileWithoutAName) {
  const auto stash = Open({.dram = 4 * kMiB, .nvme = 64 * kMiB});
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  std::vector<StashedPart> parts = PutAll(*stash, 20, kMiB);
  EXPECT_EQ(stash->counters().dram, 4 * kMiB);
  EXPECT_EQ(stash->counters().nvme, 16 * kMiB);
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  for (uint64_t i = parts.size(); i-- > 0;) EXPECT_EQ(Taken(parts[i]), Bytes(kMiB, i)) << i;
  parts.clear();
  EXPECT_EQ(stash->counters().dram, 0);
  EXPECT_TRUE(Becomes([&] { return stash->counters().nvme == 0; })) << "once no write is under way";
}

TEST_F(StashTest, AnySizeComesBackInAnyOrderMoreThanOnce) {
  const auto stash = Open({.nvme = 256 * kMiB});
  std::mt19937_64 random(7);
  std::vector<StashedPart> parts;
  std::vector<std::vector<std::byte>> put;
  for (uint64_t i = 0; i < 60; ++i) {
    put.push_back(Bytes(1 + random() % kPartBytesMax, i));
    parts.push_back(*stash->Put(put.back()));
  }
  std::vector<size_t> order;
  for (int twice = 0; twice < 2; ++twice) {
    for (size_t i = 0; i < parts.size(); ++i) order.push_back(i);
  }
  std::shuffle(order.begin(), order.end(), random);
  for (const size_t i : order) ASSERT_EQ(Taken(parts[i]), put[i]) << i;
}

TEST_F(StashTest, BackwardReadsAhead) {
  const auto stash = Open({.nvme = 64 * kMiB});
  std::vector<StashedPart> parts = PutOneByOne(*stash, 32);
  // Staging has 8 MiB: the last parts are there still, the first are in the file alone.
  EXPECT_TRUE(parts[31].ready());
  EXPECT_FALSE(parts[0].ready());
  for (uint64_t i = 32; i-- > 0;) {
    EXPECT_EQ(Taken(parts[i]), Bytes(kMiB, i));
    if (i > 0) {
      EXPECT_TRUE(BecomesReady(parts[i - 1])) << i;
    }
  }
  EXPECT_EQ(stash->counters().read, 24 * kMiB);  // each part once, but for those that were in staging
}

TEST_F(StashTest, ASecondBackwardReadsAheadToo) {
  const auto stash = Open({.nvme = 64 * kMiB});
  std::vector<StashedPart> parts = PutOneByOne(*stash, 16);
  for (int backward = 0; backward < 2; ++backward) {
    for (uint64_t i = parts.size(); i-- > 0;) {
      EXPECT_EQ(Taken(parts[i]), Bytes(kMiB, i));
      if (i > 0) {
        EXPECT_TRUE(BecomesReady(parts[i - 1])) << backward << " " << i;
      }
    }
  }
  EXPECT_EQ(stash->counters().read, 8 * kMiB + 16 * kMiB);
}

TEST_F(StashTest, ASpentBudgetIsNamedWithItsNumbersAndFreeAgainWhenPartsGo) {
  const auto stash = Open({.dram = 2 * kMiB, .nvme = 3 * kMiB});
  std::vector<StashedPart> parts = PutAll(*stash, 5, kMiB);
  for (int twice = 0; twice < 2; ++twice) {
    const absl::Status status = stash->Put(Bytes(kMiB, 9)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(model::ReasonOf(status), model::kBudget);
    EXPECT_THAT(status.ToString(), HasSubstr("2097152 of 2097152 bytes of dram and 3145728 of 3145728 bytes of nvme"));
    EXPECT_THAT(status.ToString(), HasSubstr("nvme is short of 1048576 bytes"));
  }
  for (const size_t gone : {4, 0}) {
    parts.erase(parts.begin() + static_cast<int64_t>(gone));
    auto part = stash->Put(Bytes(kMiB, 9));
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_EQ(Taken(*part), Bytes(kMiB, 9));
    parts.insert(parts.begin(), *std::move(part));
  }
}

TEST_F(StashTest, ASpentBudgetOfDramAloneSaysSo) {
  const auto stash = Open({.dram = 2 * kMiB});
  const std::vector<StashedPart> parts = PutAll(*stash, 2, kMiB);
  const absl::Status status = stash->Put(Bytes(4096, 9)).status();
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(status.ToString(), HasSubstr("dram is short of 4096 bytes"));
}

TEST_F(StashTest, ADiskIsUsedToItsEndAndThenNamed) {
  const SmallDisk disk(6 * kMiB + 64 * 1024);
  if (!disk.mounted()) GTEST_SKIP() << "no file system to fill: " << disk.why_not();
  auto opened = Stash::Open({.budget = {.nvme = 64 * kMiB}, .path = disk.path() + "/stash"});
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::vector<StashedPart> parts = PutAll(**opened, 6, kMiB);
  const absl::Status status = (*opened)->Put(Bytes(kMiB, 9)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kDiskFull);
  for (uint64_t i = parts.size(); i-- > 0;) EXPECT_EQ(Taken(parts[i]), Bytes(kMiB, i));
}

// Whatever the disk does to its blocks, a part comes back as it was put, or not at all.
TEST_F(StashTest, OtherBytesThanWrittenAreRefused) {
  const std::pair<SimOperation, SimFault> faults[] = {{SimOperation::kRead, SimFault::kBitFlip},
                                                      {SimOperation::kRead, SimFault::kStale},
                                                      {SimOperation::kWrite, SimFault::kLostWrite},
                                                      {SimOperation::kWrite, SimFault::kMisdirected}};
  for (const auto& [operation, fault] : faults) {
    SimDisk disk(static_cast<uint64_t>(fault));
    disk.SetFaultProbability(operation, fault, 0.3);
    const auto stash = Open({.nvme = 64 * kMiB}, &disk);
    std::vector<StashedPart> parts = PutAll(*stash, 40, kMiB);
    int refused = 0;
    for (uint64_t i = parts.size(); i-- > 0;) {
      std::vector<std::byte> to(kMiB);
      const absl::Status status = parts[i].Take(absl::MakeSpan(to));
      const auto held = parts[i].Hold();
      if (status.ok()) {
        EXPECT_EQ(to, Bytes(kMiB, i));
      } else {
        EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
        EXPECT_EQ(model::ReasonOf(status), model::kChecksum) << status;
        ++refused;
      }
      if (held.ok()) {
        EXPECT_TRUE(std::ranges::equal(*held, Bytes(kMiB, i)));
        parts[i].Release();
      }
    }
    EXPECT_GT(disk.suffered(fault), 0);
    EXPECT_GT(refused, 0) << static_cast<int>(fault);
  }
}

TEST_F(StashTest, APartThatCannotBeReadIsDataLossAndOthersComeBack) {
  SimDisk disk(3);
  const auto stash = Open({.nvme = 64 * kMiB}, &disk);
  std::vector<StashedPart> parts = PutAll(*stash, 40, kMiB);
  disk.SetFaultProbability(SimOperation::kRead, SimFault::kEio, 0.3);
  int lost = 0;
  for (uint64_t i = parts.size(); i-- > 0;) {
    std::vector<std::byte> to(kMiB);
    const absl::Status status = parts[i].Take(absl::MakeSpan(to));
    if (status.ok()) {
      EXPECT_EQ(to, Bytes(kMiB, i));
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kIo) << status;
    EXPECT_EQ(parts[i].Take(absl::MakeSpan(to)), status);
    ++lost;
  }
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, 40);
}

TEST_F(StashTest, AfterAFailedWriteNothingElseGoesToTheFile) {
  SimDisk disk(4);
  const auto stash = Open({.nvme = 64 * kMiB}, &disk);
  std::vector<StashedPart> parts = PutAll(*stash, 1, kMiB);
  ASSERT_TRUE(Becomes([&] { return stash->counters().written > 0; }));
  disk.SetFaultProbability(SimOperation::kWrite, SimFault::kEio, 1);
  std::vector<std::byte> to(kMiB);
  absl::Status status;
  for (uint64_t i = 1; i < 100 && status.ok(); ++i) {
    auto part = stash->Put(Bytes(kMiB, i));
    status = part.status();
    if (part.ok()) parts.push_back(*std::move(part));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kIo) << status;
  EXPECT_EQ(Taken(parts[0]), Bytes(kMiB, 0));
  // Until its write fails, the part is still in staging.
  EXPECT_TRUE(Becomes([&] { return model::ReasonOf(parts.back().Take(absl::MakeSpan(to))) == model::kIo; }));
}

TEST_F(StashTest, APartThatItsCallerFills) {
  const auto stash = Open({.dram = kMiB, .nvme = 64 * kMiB});
  for (uint64_t i = 0; i < 20; ++i) {  // the first in DRAM
    auto part = stash->Begin(kMiB);
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_EQ(model::ReasonOf(part->Hold().status()), model::kBadRequest);
    const std::vector<std::byte> bytes = Bytes(kMiB, i);
    std::ranges::copy(bytes, part->memory().begin());
    part->Finish();
    const auto held = part->Hold();
    ASSERT_TRUE(held.ok()) << held.status();
    EXPECT_TRUE(std::ranges::equal(*held, bytes));
    part->Release();
    EXPECT_EQ(Taken(*part), bytes);
  }
}

TEST_F(StashTest, SizesThatAreNoPartsAreRefused) {
  const auto stash = Open({.nvme = 64 * kMiB});
  EXPECT_EQ(model::ReasonOf(stash->Put({}).status()), model::kBadLength);
  EXPECT_EQ(model::ReasonOf(stash->Begin(kPartBytesMax + 1).status()), model::kBadLength);
  auto part = stash->Put(Bytes(100, 1));
  std::vector<std::byte> to(99);
  EXPECT_EQ(model::ReasonOf(part->Take(absl::MakeSpan(to))), model::kBadLength);
  EXPECT_EQ(
      model::ReasonOf(Stash::Open({.budget = {.nvme = 1}, .path = directory_ / "other", .staging_bytes = 1}).status()),
      model::kBadConfig);
}

TEST_F(StashTest, PartsKeepTheStash) {
  auto stash = Open({.nvme = 64 * kMiB});
  std::vector<StashedPart> parts = PutAll(*stash, 20, kMiB);
  stash.reset();
  for (uint64_t i = 0; i < parts.size(); ++i) EXPECT_EQ(Taken(parts[i]), Bytes(kMiB, i));
}

TEST_F(StashTest, ThreadsPutTakeAndDropAtTheSameTime) {
  const auto stash = Open({.dram = 8 * kMiB, .nvme = 96 * kMiB});
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      std::vector<std::pair<uint64_t, StashedPart>> mine;
      for (uint64_t i = 0; i < 150; ++i) {
        const uint64_t content = seed * 1000 + i;
        auto part = stash->Put(Bytes(1 + random() % kMiB, content));
        ASSERT_TRUE(part.ok()) << part.status();
        mine.emplace_back(content, *std::move(part));
        while (mine.size() > 20 || (i == 149 && !mine.empty())) {
          auto& [its, last] = mine.back();
          ASSERT_EQ(Taken(last), Bytes(last.bytes(), its));
          mine.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Becomes([&] { return stash->counters().dram + stash->counters().nvme == 0; }))
      << "once no write is under way";
}

TEST_F(StashTest, AForkedChildIsRefusedAndMayDropWhatItInherited) {
  auto stash = Open({.dram = kMiB, .nvme = 64 * kMiB});
  std::vector<StashedPart> parts = PutAll(*stash, 20, kMiB);
  EXPECT_EQ(storage::InChild([&] {
              std::vector<std::byte> to(kMiB);
              const bool refused = model::ReasonOf(stash->Put(to).status()) == model::kUnsupported &&
                                   model::ReasonOf(parts[0].Take(absl::MakeSpan(to))) == model::kUnsupported;
              parts.clear();
              return refused ? 0 : 1;
            }),
            0);
  for (uint64_t i = 0; i < parts.size(); ++i) EXPECT_EQ(Taken(parts[i]), Bytes(kMiB, i));
}

}  // namespace
}  // namespace ballast::stash
