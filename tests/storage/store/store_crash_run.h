// Seeded lives of a durable chunk store on a simulated disk and a catalog. Each life ends with a crash.
#pragma once

#include <cstdint>
#include <string>

namespace ballast::storage {

struct StoreCrashTally {
  uint64_t runs = 0, restored = 0, power_cuts = 0, kills = 0, errors = 0, rotten_bits = 0, refused = 0, unplugged = 0,
           passes = 0, mended = 0;
};

// Each life updates and flushes chunks. Disk operations fail, records in the catalog fail or meet a power cut, and bits
// rot while the store runs or rests. Some stores have devices beside the data directory, which change their paths, or
// are not there. After each life, every chunk must have the bits of its recorded version, and the recorded version must
// not be older than the last one promised by the store to survive a crash. Some seeds scrub: a pass must find rot that
// was there when the pass began, nothing else, and what it mends must be whole after every crash. Returns an empty
// string, or the broken promise.
std::string RunStoreLives(uint64_t seed, const std::string& directory, StoreCrashTally* tally);

}  // namespace ballast::storage
