#include "ballast/storage/log/block_parity.h"

#include <algorithm>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/tests/sim/random.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

std::vector<std::byte> RandomBytes(uint64_t bytes, sim::Random* random) {
  std::vector<std::byte> out(bytes);
  for (std::byte& byte : out) byte = static_cast<std::byte>(random->Below(256));
  return out;
}

struct Whole {
  explicit Whole(const std::vector<std::byte>& bytes) : crc32c(kernels::Crc32c(bytes)) { parity.Add(bytes); }
  std::optional<uint64_t> Rebuild(std::vector<std::byte>* bytes) const {
    return RebuildBlock(parity.block(), parity.sum(), crc32c, absl::MakeSpan(*bytes));
  }
  BlockParity parity;
  const uint32_t crc32c;
};

TEST(BlockParity, RebuildsAnyOneBlock) {
  sim::Random random(1);
  for (const uint64_t bytes : {uint64_t{2}, uint64_t{4095}, kIoAlignment, kIoAlignment + 6, 9 * kIoAlignment - 2}) {
    const std::vector<std::byte> written = RandomBytes(bytes, &random);
    const Whole whole(written);
    for (uint64_t at = 0; at < bytes; at += kIoAlignment) {
      for (const bool all : {false, true}) {
        std::vector<std::byte> read = written;
        const uint64_t end = all ? std::min(at + kIoAlignment, bytes) : at + 1;
        for (uint64_t i = at; i < end; ++i) read[i] ^= static_cast<std::byte>(1 + random.Below(255));
        EXPECT_EQ(whole.Rebuild(&read), at / kIoAlignment) << bytes << " bytes, at " << at;
        EXPECT_EQ(read, written);
      }
    }
  }
}

TEST(BlockParity, LeavesWhatItCannotRebuild) {
  sim::Random random(2);
  const std::vector<std::byte> written = RandomBytes(5 * kIoAlignment, &random);
  const Whole whole(written);
  for (int i = 0; i < 200; ++i) {
    std::vector<std::byte> read = written;
    const uint64_t one = random.Below(5), other = (one + 1 + random.Below(4)) % 5;
    read[one * kIoAlignment + random.Below(kIoAlignment)] ^= std::byte{1};
    read[other * kIoAlignment + random.Below(kIoAlignment)] ^= std::byte{2};
    const std::vector<std::byte> damaged = read;
    EXPECT_EQ(whole.Rebuild(&read), std::nullopt);
    EXPECT_EQ(read, damaged);
  }
}

// The same change of two blocks leaves their XOR as it was: no block seems to be damaged.
TEST(BlockParity, ChangesThatCancelOutAreNotRebuilt) {
  sim::Random random(3);
  const std::vector<std::byte> written = RandomBytes(4 * kIoAlignment, &random);
  std::vector<std::byte> read = written;
  read[7] ^= std::byte{1};
  read[kIoAlignment + 7] ^= std::byte{1};
  EXPECT_EQ(Whole(written).Rebuild(&read), std::nullopt);
}

TEST(BlockParity, PiecesAddUp) {
  sim::Random random(4);
  const std::vector<std::byte> bytes = RandomBytes(3 * kIoAlignment + 1000, &random);
  const Whole whole(bytes);
  for (const size_t piece : {size_t{8}, size_t{1000}, size_t{4104}, size_t{65536}}) {
    BlockParity parity;
    const auto all = absl::MakeConstSpan(bytes);
    for (size_t at = 0; at < bytes.size(); at += piece) parity.Add(all.subspan(at, piece));
    EXPECT_EQ(parity.sum(), whole.parity.sum());
    EXPECT_TRUE(std::ranges::equal(parity.block(), whole.parity.block()));
  }
}

// By CRC32C and XOR alone, the block that fits might be a wrong one.
TEST(BlockParity, TheSumIsCompared) {
  sim::Random random(5);
  const std::vector<std::byte> written = RandomBytes(3 * kIoAlignment, &random);
  const Whole whole(written);
  std::vector<std::byte> read = written;
  read[0] ^= std::byte{1};
  EXPECT_EQ(RebuildBlock(whole.parity.block(), whole.parity.sum() + 2, whole.crc32c, absl::MakeSpan(read)),
            std::nullopt);
}

}  // namespace
}  // namespace ballast::storage
