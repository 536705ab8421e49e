// The words of a scrub (store_scrub.h): a state on the disk, and what a read of it found.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "ballast/storage/store/extent_label.h"

namespace ballast::storage {

// A state on the disk.
struct ScrubbedExtent {
  uint64_t chunk = 0;  // the store's index
  // Place and digests. Version -1 in a store that is not durable: the extent then has no label.
  DurableChunk entry;
  bool kept = false;            // the state of a kept version, which the chunk itself has left behind
  bool in_memory = false;       // the chunk's state lies in memory, where it is at least as new
  bool dirty = false;           // ... and newer
  bool moments_unread = false;  // ... but for its moments, which a restart has left on the disk
  uint64_t updated_in = 0;

  // The same content at the same place.
  bool Matches(const ScrubbedExtent& other) const {
    return chunk == other.chunk && entry.file == other.entry.file && entry.offset == other.entry.offset &&
           entry.version == other.entry.version && (entry.version >= 0 || updated_in == other.updated_in);
  }
};

// The outcome of one read.
struct ScrubPiece {
  uint64_t bytes = 0;
  std::optional<ScrubbedExtent> checked;  // an extent that was read to its end, or cannot be read
  absl::Status found;                     // of `checked`. DATA_LOSS (CHECKSUM), INTERNAL (IO)
  bool pass_over = false;
};

}  // namespace ballast::storage
