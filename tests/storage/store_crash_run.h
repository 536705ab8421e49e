// Seeded lives of a durable chunk store on a simulated disk and a catalog, each of which ends with a crash.
#pragma once

#include <cstdint>
#include <string>

namespace ballast::storage {

struct StoreCrashTally {
  uint64_t runs = 0, restored = 0, power_cuts = 0, kills = 0, errors = 0, rotten_bits = 0, refused = 0;
};

// Lives of updates and flushes, with failing operations, records that fail or that a power cut ends, and bits that rot
// while the store runs or rests; after each, every chunk must be what it was at the version that is recorded, which is
// not older than the last that the store said a crash would leave. Empty, or what was broken.
std::string RunStoreLives(uint64_t seed, const std::string& directory, StoreCrashTally* tally);

}  // namespace ballast::storage
