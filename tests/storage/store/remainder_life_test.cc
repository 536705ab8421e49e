// Searches the store with seeded lives of chunks that keep remainders. A failure prints its seed.
#include <spdlog/spdlog.h>

#include <cstdio>

#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/store/remainder_run.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kSeeds = 60;

TEST(RemainderLives, HaveTheBitsOfAnFp32Master) {
  spdlog::set_level(spdlog::level::off);
  const ScratchDirectory directory;
  RemainderTally sum;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    ASSERT_EQ(RunRemainderLife(seed, directory.path(), &sum), "") << "seed " << seed;
  }
  // A search that never gets into trouble shows nothing.
  for (const uint64_t count : {sum.runs, sum.pins, sum.moves}) EXPECT_GT(count, kSeeds);
  for (const uint64_t count : {sum.errors, sum.rotten_bits, sum.refused}) EXPECT_GT(count, 0u);
  std::printf("%llu runs, %llu pins, %llu moves, %llu errors, %llu rotten bits, %llu refused\n",
              static_cast<unsigned long long>(sum.runs), static_cast<unsigned long long>(sum.pins),
              static_cast<unsigned long long>(sum.moves), static_cast<unsigned long long>(sum.errors),
              static_cast<unsigned long long>(sum.rotten_bits), static_cast<unsigned long long>(sum.refused));
}

}  // namespace
}  // namespace ballast::storage
