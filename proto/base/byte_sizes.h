// Sizes as users write them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::model {

// "512MiB" -> 536870912. Suffixes: none, B, KiB, MiB, GiB, TiB. INVALID_ARGUMENT (BAD_CONFIG) for anything else.
absl::StatusOr<uint64_t> ParseBytes(const std::string& text);

}  // namespace ballast::model
