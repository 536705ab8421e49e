// Seeded lives of a chunk store that keeps remainders, on a simulated disk.
#pragma once

#include <cstdint>
#include <string>

namespace ballast::storage {

struct RemainderTally {
  uint64_t runs = 0, pins = 0, moves = 0, errors = 0, rotten_bits = 0, refused = 0;
};

// A life updates, pins, moves and reads chunks, most of them with a working copy. Disk operations fail and bits rot.
// Every chunk, and every pinned version, must have the bits that a store with fp32 masters has. Returns an empty
// string, or what was broken.
std::string RunRemainderLife(uint64_t seed, const std::string& directory, RemainderTally* tally);

}  // namespace ballast::storage
