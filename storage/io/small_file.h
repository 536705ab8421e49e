// Small files that are written whole.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::storage {

// NOT_FOUND if there is no such file. Other errors: IoError's.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);
// Replaces the file by `text`, atomically: the file is the old one or the new one. Durable on OK.
// Writes `path`.new on the way. Errors: IoError's; the old file stays.
absl::Status WriteSmallFile(const std::string& path, absl::string_view text);

}  // namespace ballast::storage
