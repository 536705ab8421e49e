#include "ballast/storage/store/extent_label.h"

#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

const DurableChunk kEntry = {.life = 3,
                             .id = 7,
                             .version = 41,
                             .offset = 8192,
                             .bytes = 12288,
                             .elements = 1000,
                             .digests = {1, 2, 3, 4},
                             .file = 0xabcd};

void ExpectSame(const DurableChunk& a, const DurableChunk& b) {
  EXPECT_EQ(a.life, b.life);
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.version, b.version);
  EXPECT_EQ(a.offset, b.offset);
  EXPECT_EQ(a.bytes, b.bytes);
  EXPECT_EQ(a.elements, b.elements);
  EXPECT_EQ(a.digests, b.digests);
  EXPECT_EQ(a.file, b.file);
}

TEST(ExtentLabelTest, ALabelTellsItsChunkAndJob) {
  std::vector<std::byte> label(StateLayout::kLabelBytes);
  EncodeLabel(kEntry, StateLayout(), "job-1", absl::MakeSpan(label));
  DurableChunk chunk;
  std::string job;
  uint64_t layout_bits = 0;
  ASSERT_TRUE(DecodeLabel(label, &chunk, &job, &layout_bits));
  ExpectSame(chunk, kEntry);
  EXPECT_EQ(job, "job-1");
  EXPECT_EQ(layout_bits, LayoutBits(StateLayout()));
}

TEST(ExtentLabelTest, EveryDamagedByteIsNoticed) {
  std::vector<std::byte> label(StateLayout::kLabelBytes);
  EncodeLabel(kEntry, StateLayout(), "job-1", absl::MakeSpan(label));
  DurableChunk chunk;
  std::string job;
  uint64_t layout_bits = 0;
  for (std::byte& byte : label) {
    byte ^= std::byte{1};
    EXPECT_FALSE(DecodeLabel(label, &chunk, &job, &layout_bits)) << &byte - label.data();
    byte ^= std::byte{1};
  }
  EXPECT_TRUE(DecodeLabel(label, &chunk, &job, &layout_bits));
}

TEST(ExtentLabelTest, ACatalogsEntryIsWholeOrNone) {
  DurableChunk chunk;
  ASSERT_TRUE(chunk.Decode(kEntry.Encode()));
  ExpectSame(chunk, kEntry);
  DurableChunk own = kEntry;  // in the data directory's own file
  own.file = 0;
  ASSERT_TRUE(chunk.Decode(own.Encode()));
  ExpectSame(chunk, own);
  EXPECT_LT(own.Encode().size(), kEntry.Encode().size());
  EXPECT_FALSE(chunk.Decode(kEntry.Encode().substr(1)));
  EXPECT_FALSE(chunk.Decode(""));
}

TEST(ExtentLabelTest, LayoutsDiffer) {
  using kernels::OptimizerKind;
  const std::vector<StateLayout> layouts = {
      StateLayout(),
      StateLayout({.kind = OptimizerKind::kAdam}),
      StateLayout({.amsgrad = true}),
      StateLayout({.kind = OptimizerKind::kSgd}),
      StateLayout({.kind = OptimizerKind::kSgd, .momentum = true}),
      StateLayout({.moments = kernels::MomentFormat::kI8}),
      StateLayout({.gradient = kernels::Dtype::kF32}),
      StateLayout({.working = kernels::Dtype::kF32}),
      StateLayout({.master = kernels::MasterFormat::kRemainder}),
      StateLayout().Of(StateForm::kWorking),
      StateLayout().Of(StateForm::kQ8),
  };
  std::set<uint64_t> bits;
  for (const StateLayout& layout : layouts) bits.insert(LayoutBits(layout));
  EXPECT_EQ(bits.size(), layouts.size());
}

}  // namespace
}  // namespace ballast::storage
