// The rules for names of jobs and servers, and the names of durabilities.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// step, every-K, none; another name is INVALID_ARGUMENT (BAD_CONFIG), with a list of all.
absl::StatusOr<v1::Durability> DurabilityNamed(const std::string& name);
// The reverse; "unknown" for a value without a name.
absl::string_view NameOf(v1::Durability durability);

// The same rule for clients and servers: job names are written into file names, metrics and commands.
inline constexpr char kJobNameRule[] = "1 to 128 letters, digits, '.', '_' or '-'";
bool IsJobName(absl::string_view name);
inline constexpr size_t kServerIdBytesMax = 64;
inline constexpr char kServerIdRule[] = "1 to 64 letters, digits, '.', '_' or '-'";
bool IsServerId(absl::string_view id);
// INVALID_ARGUMENT (BAD_SPEC) unless IsJobName.
absl::Status CheckJobName(absl::string_view name);

}  // namespace ballast::model
