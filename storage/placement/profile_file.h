// A machine's profile as a small YAML file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/storage/placement/machine_profile.h"

namespace ballast::storage {

// A field of the profile and its key in the file.
struct ProfileKey {
  const char* name;
  uint64_t& (*field)(MachineProfile& profile);
  bool optional = false;  // profiles of earlier versions lack the key
  uint64_t Of(MachineProfile profile) const { return field(profile); }
};
const std::vector<ProfileKey>& ProfileKeys();

// YAML: a comment, then a line `key: value` for each field.
std::string ShowProfile(const MachineProfile& profile);
// Reads lines `key: value`, blank lines and comments, in any order. INVALID_ARGUMENT (BAD_CONFIG) with path and line
// for unknown keys (with a list of the known keys), doubled keys and values that are not whole numbers; with the path
// for missing keys.
absl::StatusOr<MachineProfile> ParseProfile(absl::string_view text, const std::string& path);
absl::StatusOr<MachineProfile> ReadProfile(const std::string& path);
// As WriteSmallFile.
absl::Status WriteProfile(const MachineProfile& profile, const std::string& path);

}  // namespace ballast::storage
