// Slices read back from a log give the same bits as slices in memory. A slice with wrong bytes is refused, and changes
// nothing.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/block_parity.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/log_reads.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGradientBytes = 2 * 65536;
constexpr uint64_t kValueBytes = 4 * 65536;

struct ReadShape {
  const char* name;
  std::vector<TierKind> tiers;
  uint64_t reads;  // gradients that there is memory for
};

class ReadBackTest : public ::testing::TestWithParam<ReadShape> {
 protected:
  ReadBackTest()
      : memory_(*Arena::Map(kValueBytes + GetParam().reads * kGradientBytes)),
        log_(*s_.tiers->disk()->Open(s_.directory / "log", Disk::Mode::kEmptied)) {}
  void SetUp() override { ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf(GetParam().tiers)).ok()); }

  PayloadPlace Write(absl::Span<const std::byte> payload) {
    BlockParity parity;
    if (parity_) parity.Add(payload);
    const PayloadPlace place{end_, payload.size(), kernels::Crc32c(payload), parity_ ? parity.sum() : 0};
    Arena block = *Arena::Map(AlignUp(payload.size()) + kLogBlock);
    std::memcpy(block.bytes().data(), payload.data(), payload.size());
    if (parity_) std::memcpy(block.bytes().data() + AlignUp(payload.size()), parity.block().data(), kLogBlock);
    EXPECT_EQ(log_->Write(end_, block.bytes()), absl::OkStatus());
    end_ += block.bytes().size();
    return place;
  }

  // The same updates with their slices in the log; gradients from the first element that a segment touches on.
  std::vector<ChunkUpdate> Logged(absl::Span<const ChunkUpdate> updates) {
    std::vector<ChunkUpdate> logged;
    for (const ChunkUpdate& update : updates) {
      ChunkUpdate& copy = logged.emplace_back(update);
      copy.values.clear();
      copy.gradient = {};
      for (const ChunkUpdate::Values& values : update.values) {
        const auto* bytes = reinterpret_cast<const std::byte*>(values.values.data());
        const uint64_t end = values.begin + values.values.size();
        copy.logged_values.push_back({.place = Write({bytes, values.values.size() * sizeof(float)}),
                                      .begin = values.begin,
                                      .parts = {{values.begin, values.begin + 5}, {values.begin + 5, end}}});
      }
      if (update.segments.empty()) continue;
      copy.gradient_begin = update.segments[0].begin;
      copy.logged_gradient = Write(update.gradient.subspan(2 * copy.gradient_begin));
    }
    return logged;
  }

  absl::Status Run(const StepUpdates& step, absl::FunctionRef<void(size_t)> done) {
    return s_.store->Run(Logged(step.updates()), done, {.log = log_.get(), .memory = memory_.bytes()});
  }

  static void Fill(StepUpdates* step, uint64_t t) {
    for (size_t i = 0; i < Sizes().size(); ++i) {
      if (t == 0) step->AddValues(i, Sizes()[i]);
      if (t > 0) step->AddSegments(i, Sizes()[i], t);
    }
  }

  void FlipByte(uint64_t offset) {
    const int fd = open((s_.directory / "log").c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    char byte;
    ASSERT_EQ(pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= 0x10;
    ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ASSERT_EQ(fsync(fd), 0);
    close(fd);
  }

  StoreOnTiers s_{{.hbm = kHbmScratchBytes + 16 * kMiB, .dram = 16 * kMiB, .nvme = 16 * kMiB}, 3};
  Arena memory_;
  std::unique_ptr<BlockFile> log_;
  uint64_t end_ = 0;
  bool parity_ = false;  // of what is written from now on
};

TEST_P(ReadBackTest, BitsOfSlicesInMemory) {
  for (uint64_t t = 0; t <= 3; ++t) {
    StepUpdates step(100 + t);
    Fill(&step, t);
    const uint64_t read = s_.tiers->traffic().read.nvme;
    const uint64_t logged_from = end_;
    size_t next = 0;
    ASSERT_EQ(Run(step, [&](size_t i) { EXPECT_EQ(i, next++); }), absl::OkStatus()) << t;
    step.ApplyTo(s_.reference);
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << t << ", " << i;
    EXPECT_EQ(next, Sizes().size());
    EXPECT_GE(s_.tiers->traffic().read.nvme - read, (end_ - logged_from) / 2) << "traffic is not counted";
  }
}

TEST_P(ReadBackTest, ValuesAndGradientOfOneUpdate) {
  StepUpdates values(5), segments(6);
  values.AddValues(3, Sizes()[3]);
  segments.AddSegments(3, Sizes()[3], 2);
  ChunkUpdate both = segments.updates()[0];
  both.values = values.updates()[0].values;
  const std::vector<ChunkUpdate> logged = Logged({&both, 1});
  ASSERT_EQ(s_.store->Run(logged, [](size_t) {}, {.log = log_.get(), .memory = memory_.bytes()}), absl::OkStatus());
  s_.reference[3].Apply(both);
  EXPECT_TRUE(Holds(*s_.store, 3, s_.reference[3]));
}

// A slice that begins within its chunk, as after padding.
TEST_P(ReadBackTest, GradientOfTheEndOfAChunk) {
  StepUpdates segments(6);
  segments.AddSegments(3, Sizes()[3], 2);
  ChunkUpdate end = segments.updates()[0];
  end.segments.erase(end.segments.begin());
  ASSERT_GT(end.segments[0].begin, 0u);
  const std::vector<ChunkUpdate> logged = Logged({&end, 1});
  ASSERT_EQ(logged[0].logged_gradient->bytes, end.gradient.size() - 2 * end.segments[0].begin);
  ASSERT_EQ(s_.store->Run(logged, [](size_t) {}, {.log = log_.get(), .memory = memory_.bytes()}), absl::OkStatus());
  s_.reference[3].Apply(end);
  EXPECT_TRUE(Holds(*s_.store, 3, s_.reference[3]));
  // A slice that lacks elements of a segment is refused.
  std::vector<ChunkUpdate> lacking = logged;
  lacking[0].gradient_begin += 256;
  lacking[0].logged_gradient->bytes -= 512;
  const absl::Status status = s_.store->Run(lacking, [](size_t) {}, {.log = log_.get(), .memory = memory_.bytes()});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_P(ReadBackTest, RottenGradientChangesNothing) {
  StepUpdates step(2);
  Fill(&step, 1);
  const std::vector<ChunkUpdate> logged = Logged(step.updates());
  FlipByte(logged[4].logged_gradient->offset + 4097);
  size_t done = 0;
  const absl::Status status =
      s_.store->Run(logged, [&](size_t) { ++done; }, {.log = log_.get(), .memory = memory_.bytes()});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("bytes at offset ", logged[4].logged_gradient->offset)));
  EXPECT_EQ(done, 4u);
  for (size_t i = 0; i < 4; ++i) s_.reference[i].Apply(step.updates()[i]);
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  EXPECT_EQ(s_.store->Run({}, [](size_t) {}).code(), absl::StatusCode::kDataLoss) << "the store takes no more steps";
}

TEST_P(ReadBackTest, RottenValuesChangeNothing) {
  StepUpdates step(2);
  Fill(&step, 0);
  const std::vector<ChunkUpdate> logged = Logged(step.updates());
  FlipByte(logged[2].logged_values[1].place.offset);
  size_t done = 0;
  const absl::Status status =
      s_.store->Run(logged, [&](size_t) { ++done; }, {.log = log_.get(), .memory = memory_.bytes()});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(done, 2u);
  EXPECT_TRUE(Holds(*s_.store, 2, s_.reference[2]));
}

TEST_P(ReadBackTest, ARottenBlockIsRebuiltFromItsParity) {
  parity_ = true;
  for (uint64_t t = 0; t <= 1; ++t) {
    StepUpdates step(100 + t);
    Fill(&step, t);
    const std::vector<ChunkUpdate> logged = Logged(step.updates());
    t == 0 ? FlipByte(logged[2].logged_values[1].place.offset) : FlipByte(logged[4].logged_gradient->offset + 4097);
    ASSERT_EQ(s_.store->Run(logged, [](size_t) {}, {.log = log_.get(), .memory = memory_.bytes()}), absl::OkStatus());
    step.ApplyTo(s_.reference);
  }
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
}

TEST_P(ReadBackTest, LogThatEndsIsRefused) {
  StepUpdates step(3);
  Fill(&step, 1);
  const std::vector<ChunkUpdate> logged = Logged(step.updates());
  ASSERT_EQ(log_->Truncate(logged[6].logged_gradient->offset), absl::OkStatus());
  size_t done = 0;
  const absl::Status status =
      s_.store->Run(logged, [&](size_t) { ++done; }, {.log = log_.get(), .memory = memory_.bytes()});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("/log"));
  EXPECT_EQ(done, 6u);
}

TEST_P(ReadBackTest, TooLittleMemoryIsRefusedBeforeAnythingChanges) {
  StepUpdates step(4);
  Fill(&step, 1);
  const std::vector<ChunkUpdate> logged = Logged(step.updates());
  const ReadBack little{.log = log_.get(), .memory = memory_.bytes().subspan(0, kGradientBytes - 4096)};
  const absl::Status status = s_.store->Run(
      logged, [](size_t) { ADD_FAILURE(); }, little);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("expected ", kGradientBytes)));
  ASSERT_EQ(Run(step, [](size_t) {}), absl::OkStatus()) << "and with enough it runs";
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReadBackTest,
                         ::testing::Values(ReadShape{"DramOneRead", {TierKind::kDram}, 1},
                                           ReadShape{"NvmeOneRead", {TierKind::kNvme}, 1},
                                           ReadShape{"MixedReads", {TierKind::kDram, TierKind::kNvme}, 5},
                                           ReadShape{"NvmeMoreThanNeeded", {TierKind::kNvme}, 20},
                                           ReadShape{"HbmReads", {TierKind::kHbm, TierKind::kNvme}, 5}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::storage
