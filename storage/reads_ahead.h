// Reads parts of a file one after the other, the next ones on their way while one is looked at.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::storage {

struct ReadAhead {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::byte* to = nullptr;  // null: into one of the slots, which is reused once it was looked at
};

// Where reads go that have no place of their own: `memory` in pieces of `slot_bytes`.
struct ReadSlots {
  absl::Span<std::byte> memory;
  uint64_t slot_bytes = 0;
};

// Calls `look(i, data, poll)` for each read, in order and on this thread, once its bytes are there. What takes long in
// it calls `poll` now and then, which keeps the disk busy. Borrows all; nothing is in flight when it returns.
// Ends with the first error, of a read (as IoQueue's) or of `look`. REQUIRES: nothing else is in flight on `queue`;
// reads without a place fit into a slot, of which there is at least one.
absl::Status ForEachRead(IoQueue* queue, const BlockFile& file, absl::Span<const ReadAhead> reads,
                         const ReadSlots& slots,
                         absl::FunctionRef<absl::Status(size_t, std::byte*, absl::FunctionRef<void()>)> look);

}  // namespace ballast::storage
