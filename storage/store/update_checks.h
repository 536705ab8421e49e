// Which updates a chunk can take: checked before a run changes anything.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/stored_chunk.h"

namespace ballast::storage {

inline absl::Status Bad(const char* reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

inline absl::Status CheckRange(uint64_t chunk, uint64_t elements, uint64_t begin, uint64_t count) {
  if (begin <= elements && count <= elements - begin) return absl::OkStatus();
  return Bad(model::kBadRange, absl::StrCat("elements [", begin, ", ", begin, " + ", count, ") leave chunk ", chunk,
                                            " of ", elements, " elements"));
}

// Can the chunk's state leave its server, or come from another? UNIMPLEMENTED (UNSUPPORTED) where a part of it is the
// working copy or the trainer's memory.
absl::Status CheckWhole(const StoredChunk& chunk);

// Has the chunk a state? INVALID_ARGUMENT (BAD_REQUEST).
absl::Status CheckNotVoid(const StoredChunk& chunk);

// FAILED_PRECONDITION (VERSION_GONE): no durable pin of the version keeps the chunk.
absl::Status NotKept(int64_t version, const StoredChunk& chunk);

// Is another server's state one of the chunk's, and did it arrive whole? As CheckUpdate of an imported state.
absl::Status CheckWholeState(const StoredChunk& chunk, const WholeState& imported);

// INVALID_ARGUMENT: (BAD_RANGE) elements outside the chunk, or a segment or coded values that begin within a block;
// (BAD_LENGTH) a gradient that does not cover its segments; (BAD_REQUEST) an update of another kind than the chunk
// takes. Of an imported state: UNIMPLEMENTED as CheckWhole; INVALID_ARGUMENT (BAD_LENGTH) other arrays than the chunk's
// layout has; DATA_LOSS (CHECKSUM).
absl::Status CheckUpdate(const StoredChunk& chunk, const ChunkUpdate& update);

}  // namespace ballast::storage
