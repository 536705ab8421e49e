// Reads parts of files in order. While the caller looks at one part, the next parts are being read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::storage {

// The most reads that are under way or being looked at: enough to keep any disk busy while the caller looks at one.
inline constexpr size_t kReadsAheadMax = 16;

struct ReadAhead {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::byte* to = nullptr;  // null: into a slot, reused after `look` has seen the bytes
  const BlockFile* file = nullptr;
};

// Room for reads without a place of their own: `memory` in pieces of `slot_bytes`.
struct ReadSlots {
  absl::Span<std::byte> memory;
  uint64_t slot_bytes = 0;
};

// Calls `look(i, data, poll)` for each read, in order and on this thread, once its bytes are there. A `look` that takes
// long should call `poll` now and then, to keep the disk busy. Borrows all arguments; nothing is in flight on return.
// Ends with the first error of a read (as IoQueue's) or of `look`. REQUIRES: nothing else is in flight on `queue`;
// there is at least one slot, large enough for every read without a place.
absl::Status ForEachRead(IoQueue* queue, absl::Span<const ReadAhead> reads, const ReadSlots& slots,
                         absl::FunctionRef<absl::Status(size_t, std::byte*, absl::FunctionRef<void()>)> look);

}  // namespace ballast::storage
