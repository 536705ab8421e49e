// The 4096 bytes behind a chunk's state on disk that say whose it is: which job and chunk, at which version, with which
// digests. Who has only the disk can tell from them what lies where.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/state_layout.h"

namespace ballast::storage {

// CRC32C of each array of a state, padding included. One each, so that a read of one array need not fetch the others.
using ArrayDigests = std::array<uint32_t, kStateArraysMax>;

// A chunk's state on disk: all that finding, reading and checking it takes.
struct DurableChunk {
  uint64_t life = 0;     // of the job: tells it from others that had its name
  uint64_t id = 0;       // in its job's layout
  int64_t version = -1;  // transactions 0..version are applied
  uint64_t offset = 0;   // of the extent, in the NVMe tier's file
  uint64_t bytes = 0;
  uint64_t elements = 0;
  ArrayDigests digests = {};

  // For the catalog. False if `bytes` is no encoded entry.
  std::string Encode() const;
  bool Decode(absl::string_view bytes);
};

// Fills the label of a state of `chunk`, which lies at `label` (kLabelBytes).
void EncodeLabel(const DurableChunk& chunk, const StateLayout& layout, absl::string_view job,
                 absl::Span<std::byte> label);
// False if it is damaged or none. `job`, `layout_bits`: as written.
bool DecodeLabel(absl::Span<const std::byte> label, DurableChunk* chunk, std::string* job, uint64_t* layout_bits);
// What tells layouts apart.
uint64_t LayoutBits(const StateLayout& layout);

}  // namespace ballast::storage
