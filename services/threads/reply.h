// How a call answers, and where an answer's bytes go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/threads/answer_room.h"

namespace ballast::services {

// Called exactly once, on any thread; must not block.
template <typename Response>
using Reply = std::function<void(absl::StatusOr<Response>)>;

// Whether a call's bytes are checked by a CRC32C: the header of a push has it, and so has the answer to a pull. kNone
// is for callers in this process, whose bytes nothing can damage on their way. Bytes from a wire, or from memory that
// another process writes, are always checked, whatever their header says.
enum class Checksum { kCrc32c, kNone };

// Returns exactly `bytes` bytes of memory for a pull's answer, borrowed until the pull's reply. `room` counts the
// answer's bytes: keep the lease until the answer is sent.
using Allocate = std::function<absl::Span<std::byte>(uint64_t bytes, AnswerRoom::Lease room)>;

}  // namespace ballast::services
