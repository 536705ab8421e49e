// The configuration's YAML file: values of keys, with their lines.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/daemon/config.h"

namespace ballast::services {

// INVALID_ARGUMENT (BAD_CONFIG) with file:line for bad YAML and for unknown or doubled keys; the message lists the
// known keys.
absl::StatusOr<ConfigValues> ParseConfigFile(const std::string& path);
absl::StatusOr<ConfigValues> ParseConfigText(const std::string& text, const std::string& path);

}  // namespace ballast::services
