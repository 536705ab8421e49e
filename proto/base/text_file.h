// Small files that users write: certificates, tokens, rights.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast::model {

// The whole of a file of 1 byte to 1 MiB. INVALID_ARGUMENT (BAD_CONFIG) otherwise.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// Differs whenever a file of `paths` was written or exchanged, or a file in a directory among them. Empty paths count
// for nothing.
std::string StampOf(const std::vector<std::string>& paths);

}  // namespace ballast::model
