// A chunk's whole state as a store keeps it, or as a pin keeps it, on its way to another server's copy of the chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ballast::storage {

// Bit for bit what the chunk's StateLayout says: the master, or a frozen chunk's values, then the moments in their own
// format with their scales. Padding is included, so that the digests are those of the label and of the catalog.
struct WholeState {
  struct Array {
    std::vector<std::byte> bytes;  // StateLayout::ArrayBytes of them
    uint32_t crc32c = 0;           // of `bytes`
  };
  std::vector<Array> arrays;  // StateLayout::array_count() of them, by StateArray
};

// What a durable pin keeps of a chunk.
struct KeptState {
  int64_t version = -1;  // of the chunk: transactions 0..version are applied
  WholeState state;      // without arrays: the chunk had no state yet, and is zero
};

}  // namespace ballast::storage
