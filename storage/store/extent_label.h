// The label: 4096 bytes behind a chunk's state on disk with job, chunk, version and digests of the state. From the
// labels alone a disk's content can be found again without the catalog.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// CRC32C of each array of a state, padding included. Each array has its own, so that a read fetches only its array.
using ArrayDigests = std::array<uint32_t, kStateArraysMax>;

// A chunk's state on disk, as needed to find, read and check the state.
struct DurableChunk {
  uint64_t life = 0;     // the job's: differs between jobs that had the same name
  uint64_t id = 0;       // in its job's layout
  int64_t version = -1;  // transactions 0..version are applied
  uint64_t offset = 0;   // the extent's, in its file
  uint64_t bytes = 0;
  uint64_t elements = 0;
  ArrayDigests digests = {};
  NvmeFileId file = 0;  // of the NVMe tier

  // The catalog's encoding. Decode returns false if `bytes` is no encoded entry. Entries without a file are those of
  // the data directory's own, as earlier versions wrote them; an earlier version refuses a job that has entries with a
  // file.
  std::string Encode() const;
  bool Decode(absl::string_view bytes);
};

// Fills `label` (kLabelBytes) for a state of `chunk`.
void EncodeLabel(const DurableChunk& chunk, const StateLayout& layout, absl::string_view job,
                 absl::Span<std::byte> label);
// False if `label` is damaged or no label. `job`, `layout_bits`: as written.
bool DecodeLabel(absl::Span<const std::byte> label, DurableChunk* chunk, std::string* job, uint64_t* layout_bits);
// Optimizer, moment format, dtypes and how the chunk is frozen, as a number that differs between layouts.
uint64_t LayoutBits(const StateLayout& layout);

}  // namespace ballast::storage
