#include "ballast/storage/placement/placement.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunk = uint64_t{1} << 16;
constexpr uint64_t kState = 3 * 4 * kChunk + StateLayout::kLabelBytes;
constexpr uint64_t kWorking = 2 * kChunk;

PlanRequest FourChunks(TierBytes free) {
  return {.free = free,
          .elements = {kChunk, kChunk, kChunk, kChunk},
          .provisional_bytes_per_element = 4,
          .staging_bytes = uint64_t{1} << 20};
}

std::string Tiers(const Plan& plan) {
  std::string text;
  for (const ChunkPlacement& chunk : plan.chunks) {
    absl::StrAppend(&text, text.empty() ? "" : " ", TierName(chunk.state), "/",
                    chunk.working.has_value() ? TierName(*chunk.working) : "none");
  }
  return text;
}

TEST(PlacementTest, BytesArePaddedPerArray) {
  EXPECT_EQ(StateLayout().StateBytes(kChunk), kState);
  EXPECT_EQ(StateLayout().StateBytes(256), 4 * 4096);
  EXPECT_EQ(StateLayout().StateBytes(1025), 3 * 8192 + 4096);
  EXPECT_EQ(StateLayout().WorkingBytes(256), 4096);
  EXPECT_EQ(StateLayout().WorkingBytes(2049), 8192);
}

TEST(PlacementTest, AllInDramNeedsNoStaging) {
  const uint64_t exact = 4 * (kState + kWorking + 4 * kChunk);
  const absl::StatusOr<Plan> plan = MakePlan(FourChunks({.dram = exact}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Tiers(*plan), "dram/dram dram/dram dram/dram dram/dram");
  EXPECT_EQ(plan->state.dram, 4 * kState);
  EXPECT_EQ(plan->working.dram, 4 * kWorking);
}

TEST(PlacementTest, FirstChunksStayInDram) {
  const uint64_t dram = (uint64_t{1} << 20) + 4 * (kWorking + 4 * kChunk) + 2 * kState;
  const absl::StatusOr<Plan> plan = MakePlan(FourChunks({.dram = dram, .nvme = 2 * kState}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Tiers(*plan), "dram/dram dram/dram nvme/dram nvme/dram");
  EXPECT_EQ(plan->state.nvme, 2 * kState);
  EXPECT_THAT(plan->Explain(), HasSubstr(absl::StrCat("nvme holds the state of 2 chunks (", 2 * kState, " bytes)")));
}

TEST(PlacementTest, CopiesThatDoNotFitAreLeftOutEvenly) {
  PlanRequest request = FourChunks({.nvme = 4 * kState});
  request.pull = PullMemory{.slots = 1, .slot_bytes = 4096};
  const uint64_t others = (uint64_t{1} << 20) + 4 * 4 * kChunk + 4096;  // staging, slices, pulls
  for (const auto& [copies, expected] : {std::pair<uint64_t, const char*>{0, "nvme/none nvme/none nvme/none nvme/none"},
                                         {1, "nvme/none nvme/dram nvme/none nvme/none"},
                                         {2, "nvme/dram nvme/none nvme/dram nvme/none"},
                                         {3, "nvme/dram nvme/dram nvme/none nvme/dram"}}) {
    request.free.dram = others + copies * kWorking;
    const absl::StatusOr<Plan> plan = MakePlan(request);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(Tiers(*plan), expected);
    EXPECT_EQ(plan->working.dram, copies * kWorking);
    EXPECT_EQ(plan->pull.bytes(), 4096u);
    EXPECT_THAT(plan->Explain(), HasSubstr(absl::StrCat("the working copies of ", 4 - copies, " chunks")));
  }
  EXPECT_EQ(LeastDram(request), others);
  request.free.dram = others - 1;
  EXPECT_FALSE(MakePlan(request).ok());
  // With room for all copies all are there, and with more room state comes into memory.
  request.free.dram = others + 4 * kWorking;
  EXPECT_EQ(Tiers(*MakePlan(request)), "nvme/dram nvme/dram nvme/dram nvme/dram");
  EXPECT_EQ(MakePlan(request)->pull.bytes(), 0u);
  // Copies that take less than the memory for pulls without them stay, or the job is refused.
  request.pull = PullMemory{.slots = 4, .slot_bytes = kWorking};
  request.free.dram = others + 3 * kWorking;
  EXPECT_FALSE(MakePlan(request).ok());
  // A chunk that has no copy gets none.
  request.free.dram = others + 4 * kWorking + 4 * kState;
  request.present = std::vector<ChunkPlacement>(4);
  request.present[0].working = std::nullopt;
  EXPECT_EQ(Tiers(*MakePlan(request)), "dram/none dram/dram dram/dram dram/dram");
}

// A frozen chunk takes its values alone, no slices, and memory before trained chunks do; never the GPU's.
TEST(PlacementTest, FrozenChunksComeFirst) {
  constexpr uint64_t kWide = 2 * kChunk + StateLayout::kLabelBytes;
  const StateLayout q8 = StateLayout().Of(StateForm::kQ8);
  EXPECT_EQ(StateLayout().Of(StateForm::kWorking).StateBytes(kChunk), kWide);
  EXPECT_EQ(q8.StateBytes(kChunk), kChunk + 4096 + StateLayout::kLabelBytes);
  EXPECT_EQ(q8.WorkingBytes(kChunk), 0u);
  EXPECT_EQ(q8.array_count(), 1);
  PlanRequest request = FourChunks({.hbm = kState, .nvme = uint64_t{1} << 40});
  request.forms = {StateForm::kFull, StateForm::kFull, StateForm::kWorking, StateForm::kQ8};
  request.staging_bytes = kState / 2;
  request.value_buffer_bytes = 12345;
  const uint64_t fixed = kState / 2 + 2 * (kWorking + 4 * kChunk) + request.value_buffer_bytes;
  request.free.dram = fixed + kWide + q8.StateBytes(kChunk);
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Tiers(*plan), "hbm/dram nvme/dram dram/dram dram/dram");
  EXPECT_EQ(plan->slice_bytes, 2 * 4 * kChunk + 12345);
  EXPECT_EQ(plan->working.dram, 2 * kWorking);
}

TEST(PlacementTest, PassingValuesNeedRoomUnlessTheyAreReadBack) {
  PlanRequest request = FourChunks({});
  request.forms.assign(4, StateForm::kWorking);
  request.passing_bytes = 4 * 4 * kChunk;
  request.free.dram = 4 * (2 * kChunk + StateLayout::kLabelBytes) + request.passing_bytes;
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->slice_bytes, 0u);
  --request.free.dram;
  EXPECT_THAT(MakePlan(request).status().ToString(), HasSubstr("dram is short of 1 bytes"));
  EXPECT_EQ(LeastDram(request), 4 * (2 * kChunk + StateLayout::kLabelBytes));
  request.free = {.dram = (uint64_t{1} << 20) + 8192, .nvme = uint64_t{1} << 30};
  EXPECT_FALSE(MakePlan(request).ok());
  request.read_back = {.buffer_bytes_min = 8192, .buffer_bytes_max = 8192};
  const absl::StatusOr<Plan> read_back = MakePlan(request);
  ASSERT_TRUE(read_back.ok()) << read_back.status();
  EXPECT_TRUE(read_back->reads_back);
  EXPECT_EQ(read_back->slice_bytes, 8192u);
}

TEST(PlacementTest, StagingBeyondAllNumbersIsNoRoom) {
  PlanRequest request = FourChunks({.dram = 4 * (kWorking + 4 * kChunk) + 2 * kState, .nvme = 4 * kState});
  request.staging_bytes = ~uint64_t{0} - 100;
  const absl::Status status = MakePlan(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("dram is short of"));
}

TEST(PlacementTest, LeastDramIsJustEnough) {
  const uint64_t nvme = uint64_t{1} << 40;
  PlanRequest request = FourChunks({.nvme = nvme});
  std::vector<uint64_t> least;
  for (const bool reads_back : {false, true}) {
    for (const uint64_t staging : {uint64_t{1} << 20, uint64_t{1} << 30}) {
      request.staging_bytes = staging;
      if (reads_back) request.read_back = {.shared_bytes = 4096, .buffer_bytes_min = 8192, .buffer_bytes_max = 65536};
      least.push_back(LeastDram(request));
      request.free.dram = least.back();
      EXPECT_TRUE(MakePlan(request).ok());
      request.free.dram = least.back() - 1;
      EXPECT_FALSE(MakePlan(request).ok());
    }
  }
  // Where staging is more than all of the job, all of it is the least.
  const uint64_t all = 4 * (kState + kWorking + 4 * kChunk);
  EXPECT_THAT(least, ::testing::ElementsAre((uint64_t{1} << 20) + 4 * (kWorking + 4 * kChunk), all,
                                            (uint64_t{1} << 20) + 4 * kWorking + 4096 + 8192, all));
}

TEST(PlacementTest, HbmTakesWorkingCopiesWithItsState) {
  const absl::StatusOr<Plan> plan = MakePlan(FourChunks({.hbm = 2 * kState + kWorking, .dram = uint64_t{1} << 30}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Tiers(*plan), "hbm/hbm hbm/dram dram/dram dram/dram");
  EXPECT_EQ(plan->state.hbm, 2 * kState);
  EXPECT_EQ(plan->working.hbm, kWorking);
  EXPECT_EQ(plan->working.dram, 3 * kWorking);
}

TEST(PlacementTest, EmptyJobFitsNowhere) {
  const absl::StatusOr<Plan> plan = MakePlan({});
  ASSERT_TRUE(plan.ok());
  EXPECT_TRUE(plan->chunks.empty());
}

// The message's number is exact: with so many more bytes the chunks fit, with a byte less they do not.
struct Shortfall {
  const char* name;
  TierBytes free;
  TierKind tier;
  uint64_t missing;
};

class ShortfallTest : public ::testing::TestWithParam<Shortfall> {};

TEST_P(ShortfallTest, MissingBytesAreExact) {
  const Shortfall& p = GetParam();
  const absl::Status status = MakePlan(FourChunks(p.free)).status();
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat(TierName(p.tier), " is short of ", p.missing, " bytes")));
  EXPECT_THAT(status.ToString(),
              HasSubstr(absl::StrCat("raise the ", TierName(p.tier), " budget by at least ", p.missing, " bytes")));
  TierBytes raised = p.free;
  raised[p.tier] += p.missing;
  EXPECT_TRUE(MakePlan(FourChunks(raised)).ok()) << MakePlan(FourChunks(raised)).status();
  raised[p.tier] -= 1;
  EXPECT_FALSE(MakePlan(FourChunks(raised)).ok());
}

constexpr uint64_t kFixed = 4 * (kWorking + 4 * kChunk);
INSTANTIATE_TEST_SUITE_P(
    Tiers, ShortfallTest,
    ::testing::Values(
        Shortfall{"NoNvme", {.dram = 1000}, TierKind::kDram, kFixed + 4 * kState - 1000},
        Shortfall{"NvmeTooSmall", {.dram = kFixed + (1 << 20) + kState, .nvme = kState}, TierKind::kNvme, 2 * kState},
        Shortfall{"NoRoomForStaging", {.dram = kFixed + 5, .nvme = 4 * kState}, TierKind::kDram, (1 << 20) - 5}),
    [](const auto& info) { return info.param.name; });

// All slices of the four chunks take 1 MiB, more than these buffers and a chunk's state.
constexpr uint64_t kBuffersMin = 50'000, kBuffersMax = 100'000, kShared = 2 * kChunk;
constexpr uint64_t kReadBackFixed = 4 * kWorking + (1 << 20) + kShared + kBuffersMin;

PlanRequest ReadBackIfNeeded(uint64_t dram) {
  PlanRequest request = FourChunks({.dram = dram, .nvme = 8 * kState});
  request.durable = true;
  request.read_back = {.shared_bytes = kShared, .buffer_bytes_min = kBuffersMin, .buffer_bytes_max = kBuffersMax};
  return request;
}

TEST(PlacementTest, SlicesThatFitAreNotReadBack) {
  const absl::StatusOr<Plan> plan = MakePlan(ReadBackIfNeeded(kFixed + (1 << 20)));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->reads_back);
  EXPECT_EQ(plan->slice_bytes, 4 * 4 * kChunk);
  EXPECT_EQ(plan->read_back_bytes, 0u);
}

TEST(PlacementTest, SlicesThatDoNotFitAreReadBack) {
  const absl::StatusOr<Plan> plan = MakePlan(ReadBackIfNeeded(kReadBackFixed + 50'000));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->reads_back);
  EXPECT_EQ(plan->slice_bytes, kShared + kBuffersMin + 50'000) << "buffers take what is left";
  EXPECT_EQ(plan->read_back_bytes, 4 * 2 * kChunk - kShared);
  EXPECT_EQ(Tiers(*plan), "nvme/dram nvme/dram nvme/dram nvme/dram");
  EXPECT_THAT(plan->Explain(), HasSubstr(absl::StrCat(plan->read_back_bytes, " bytes are read back from it")));
}

TEST(PlacementTest, BuffersForSlicesGrowBeforeStateGetsDram) {
  const uint64_t more = kBuffersMax - kBuffersMin;
  ASSERT_LT(kReadBackFixed + more + kState, kFixed + (1 << 20));
  const absl::StatusOr<Plan> plan = MakePlan(ReadBackIfNeeded(kReadBackFixed + more + kState));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->slice_bytes, kShared + kBuffersMax);
  EXPECT_EQ(Tiers(*plan), "dram/dram nvme/dram nvme/dram nvme/dram");
  const absl::StatusOr<Plan> less = MakePlan(ReadBackIfNeeded(kReadBackFixed + more + kState - 1));
  ASSERT_TRUE(less.ok()) << less.status();
  EXPECT_EQ(Tiers(*less), "nvme/dram nvme/dram nvme/dram nvme/dram");
}

TEST(PlacementTest, WhatReadingBackLacksIsExact) {
  const absl::Status status = MakePlan(ReadBackIfNeeded(kReadBackFixed - 7)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("raise the dram budget by at least 7 bytes"));
  EXPECT_TRUE(MakePlan(ReadBackIfNeeded(kReadBackFixed)).ok());
}

TEST(PlacementTest, ASpillIsTakenIfSlicesAreReadBack) {
  PlanRequest request = ReadBackIfNeeded(kFixed + (1 << 20));
  request.durable = false;
  request.free.nvme = 4 * kState + 99;
  request.read_back->spill_bytes = 100;
  absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->spill_bytes, 0u);
  request.free.dram = kReadBackFixed;
  plan = MakePlan(request);
  EXPECT_THAT(plan.status().ToString(), HasSubstr("raise the nvme budget by at least 1 bytes"));
  EXPECT_THAT(plan.status().ToString(), HasSubstr("state and slices in flight"));
  ++request.free.nvme;
  plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->spill_bytes, 100u);
}

TEST(PlacementTest, BothShortagesAreNamed) {
  const absl::Status status = MakePlan(FourChunks({.dram = kFixed, .nvme = kState})).status();
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("dram is short of ", 1 << 20, " bytes")));
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("nvme is short of ", 3 * kState, " bytes")));
}

}  // namespace
}  // namespace ballast::storage
