// How a call answers, and where an answer's bytes go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::services {

// Called exactly once, on any thread; must not block.
template <typename Response>
using Reply = std::function<void(absl::StatusOr<Response>)>;

// Returns memory for the bytes of a pull's answer, borrowed until the pull's reply. A span of another size than asked
// for says that there is no memory now.
using Allocate = std::function<absl::Span<std::byte>(uint64_t bytes)>;

}  // namespace ballast::services
