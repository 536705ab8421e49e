// A machine's profile as a small file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/storage/placement/machine_profile.h"

namespace ballast::storage {

// Every field under its name.
struct ProfileKey {
  const char* name;
  uint64_t MachineProfile::*field;
};
const std::vector<ProfileKey>& ProfileKeys();

// YAML: a comment and a line `key: value` each.
std::string ShowProfile(const MachineProfile& profile);
// Lines `key: value`, blank ones and comments, in any order. INVALID_ARGUMENT (BAD_CONFIG) with path and line for
// unknown, doubled or missing keys and for values that are no whole numbers; says which keys there are.
absl::StatusOr<MachineProfile> ParseProfile(absl::string_view text, const std::string& path);
absl::StatusOr<MachineProfile> ReadProfile(const std::string& path);
// Replaces the file as a whole. INTERNAL (IO).
absl::Status WriteProfile(const MachineProfile& profile, const std::string& path);

}  // namespace ballast::storage
