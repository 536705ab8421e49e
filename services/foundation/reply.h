// How a call answers, and where an answer's bytes go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/foundation/answer_room.h"

namespace ballast::services {

// Called exactly once, on any thread; must not block.
template <typename Response>
using Reply = std::function<void(absl::StatusOr<Response>)>;

// Whether the answer to a pull carries the CRC32C of its bytes. Within a process nobody would look at it.
enum class PullChecksum { kCrc32c, kNone };

// Returns exactly `bytes` bytes of memory for a pull's answer, borrowed until the pull's reply. `room` counts the bytes
// of the answer: whoever holds the answer until it is sent keeps the lease for as long.
using Allocate = std::function<absl::Span<std::byte>(uint64_t bytes, AnswerRoom::Lease room)>;

}  // namespace ballast::services
