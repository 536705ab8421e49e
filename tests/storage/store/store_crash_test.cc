// Searches the durable chunk store with seeded lives on a simulated disk. A failure prints its seed.
#include <spdlog/spdlog.h>

#include <cstdio>

#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/store/store_crash_run.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kSeeds = 200;

TEST(StoreCrash, WhatWasRecordedIsThere) {
  spdlog::set_level(spdlog::level::off);
  const ScratchDirectory directory;
  StoreCrashTally sum;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    ASSERT_EQ(RunStoreLives(seed, directory.path(), &sum), "") << "seed " << seed;
  }
  // A search that never gets into trouble shows nothing.
  for (const uint64_t count :
       {sum.restored, sum.power_cuts, sum.kills, sum.errors, sum.rotten_bits, sum.refused, sum.unplugged}) {
    EXPECT_GT(count, kSeeds / 50);
  }
  std::printf(
      "%llu runs, %llu chunks restored, %llu power cuts, %llu kills, %llu lives with errors, %llu rotten bits, "
      "%llu refused, %llu disks not there, %llu passes of the scrub, %llu mended\n",
      static_cast<unsigned long long>(sum.runs), static_cast<unsigned long long>(sum.restored),
      static_cast<unsigned long long>(sum.power_cuts), static_cast<unsigned long long>(sum.kills),
      static_cast<unsigned long long>(sum.errors), static_cast<unsigned long long>(sum.rotten_bits),
      static_cast<unsigned long long>(sum.refused), static_cast<unsigned long long>(sum.unplugged),
      static_cast<unsigned long long>(sum.passes), static_cast<unsigned long long>(sum.mended));
}

}  // namespace
}  // namespace ballast::storage
