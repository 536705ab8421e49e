// Reads the states that a store has on the disk, piece by piece, and compares them with the digests in memory. So rot
// is found while another copy of the state exists, not when the extent is the last copy.
//
// A pass goes over the chunks in order: first the chunk's newest extent, then the extents of versions that are kept. A
// state that changes between two pieces is passed over: its extent is free, or holds a newer version.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/storage/store/scrubbed_extent.h"
#include "ballast/storage/store/stored_chunk.h"

namespace ballast::storage {

class StoreCore;

// Threads: the store's thread, between runs.
class StoreScrub {
 public:
  // Reads at most `buffer`, aligned to 4096, in one request.
  ScrubPiece Next(const StoreCore& core, absl::Span<std::byte> buffer);
  // Bytes of the pass under way, as its beginning found them.
  uint64_t pass_bytes() const { return pass_bytes_; }

  // As ChunkStore::Rewrite.
  static absl::Status Rewrite(StoreCore* core, const ScrubbedExtent& extent);
  static std::vector<ScrubbedExtent> ExtentsOf(const StoreCore& core, const StoredChunk& chunk);

 private:
  // Finds the next extent. False at the end of the pass.
  bool Advance(const StoreCore& core);
  absl::Status Finish(const StoreCore& core, const StoredChunk& chunk) const;

  uint64_t chunk_ = 0;  // index of the next extent's chunk
  size_t extent_ = 0;   // ... and number among the chunk's extents
  bool begun_ = false;  // a pass is under way
  uint64_t pass_bytes_ = 0;

  std::optional<ScrubbedExtent> current_;
  uint64_t at_ = 0;            // bytes of `current_` that were read
  ArrayDigests digests_ = {};  // of these
  alignas(4096) std::array<std::byte, StateLayout::kLabelBytes> label_ = {};
};

}  // namespace ballast::storage
