#include "ballast/storage/placement/profile_file.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/small_file.h"

namespace ballast::storage {
namespace {

absl::Status Bad(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

std::string KnownKeys() {
  return absl::StrJoin(ProfileKeys(), ", ", [](std::string* out, const ProfileKey& key) { *out += key.name; });
}

}  // namespace

const std::vector<ProfileKey>& ProfileKeys() {
#define BALLAST_FIELD(name, field)                                           \
  {                                                                          \
    name, [](MachineProfile& profile) -> uint64_t& { return profile.field; } \
  }
#define BALLAST_KEY(name) BALLAST_FIELD(#name, name)
#define BALLAST_OPTIONAL(name)                                                                   \
  {                                                                                              \
#name, [](MachineProfile & profile) -> uint64_t& { return profile.name; }, /*optional=*/true \
  }
  static const auto* const kKeys = new std::vector<ProfileKey>{
      BALLAST_KEY(threads),
      BALLAST_FIELD("dram_read_1_thread_bytes_per_s", dram_read_bytes_per_s.one_thread),
      BALLAST_FIELD("dram_read_all_threads_bytes_per_s", dram_read_bytes_per_s.all_threads),
      BALLAST_FIELD("dram_copy_1_thread_bytes_per_s", dram_copy_bytes_per_s.one_thread),
      BALLAST_FIELD("dram_copy_all_threads_bytes_per_s", dram_copy_bytes_per_s.all_threads),
      BALLAST_FIELD("update_f32_1_thread_elements_per_s", update_f32_elements_per_s.one_thread),
      BALLAST_FIELD("update_f32_all_threads_elements_per_s", update_f32_elements_per_s.all_threads),
      BALLAST_FIELD("update_bf16_1_thread_elements_per_s", update_bf16_elements_per_s.one_thread),
      BALLAST_FIELD("update_bf16_all_threads_elements_per_s", update_bf16_elements_per_s.all_threads),
      BALLAST_FIELD("update_i8_1_thread_elements_per_s", update_i8_elements_per_s.one_thread),
      BALLAST_FIELD("update_i8_all_threads_elements_per_s", update_i8_elements_per_s.all_threads),
      BALLAST_FIELD("update_f8_1_thread_elements_per_s", update_f8_elements_per_s.one_thread),
      BALLAST_FIELD("update_f8_all_threads_elements_per_s", update_f8_elements_per_s.all_threads),
      BALLAST_FIELD("digest_1_thread_bytes_per_s", digest_bytes_per_s.one_thread),
      BALLAST_FIELD("digest_all_threads_bytes_per_s", digest_bytes_per_s.all_threads),
      BALLAST_KEY(disk_read_bytes_per_s),
      BALLAST_KEY(disk_read_depth),
      BALLAST_KEY(disk_write_bytes_per_s),
      BALLAST_KEY(disk_write_depth),
      BALLAST_KEY(disk_mixed_bytes_per_s),
      BALLAST_KEY(disk_mixed_depth),
      BALLAST_OPTIONAL(update_f32_beside_disk_elements_per_s),
      BALLAST_OPTIONAL(disk_mixed_beside_update_bytes_per_s),
      BALLAST_KEY(disk_direct),
      BALLAST_KEY(disk_append_p50_us),
      BALLAST_KEY(disk_append_p99_us),
      BALLAST_KEY(gpu_in_bytes_per_s),
      BALLAST_KEY(gpu_out_bytes_per_s),
  };
#undef BALLAST_OPTIONAL
#undef BALLAST_KEY
#undef BALLAST_FIELD
  return *kKeys;
}

std::string ShowProfile(const MachineProfile& profile) {
  std::string out = "# Measured by `ballastctl iotune`; 0: there is none.\n";
  for (const ProfileKey& key : ProfileKeys()) absl::StrAppend(&out, key.name, ": ", key.Of(profile), "\n");
  return out;
}

absl::StatusOr<MachineProfile> ParseProfile(absl::string_view text, const std::string& path) {
  MachineProfile profile;
  std::set<std::string> seen;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::string where = absl::StrCat(path, ":", ++number, ": ");
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    const size_t colon = line.find(':');
    const std::string name(absl::StripAsciiWhitespace(line.substr(0, colon)));
    const auto key = std::find_if(ProfileKeys().begin(), ProfileKeys().end(),
                                  [&](const ProfileKey& known) { return known.name == name; });
    if (colon == absl::string_view::npos || key == ProfileKeys().end()) {
      return Bad(
          absl::StrCat(where, "unknown key '", name, "'; expected lines of `key: value` with keys ", KnownKeys()));
    }
    if (!seen.insert(name).second) return Bad(absl::StrCat(where, "key '", name, "' comes twice; keep one"));
    const absl::string_view value = absl::StripAsciiWhitespace(line.substr(colon + 1));
    const bool digits = std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!digits || !absl::SimpleAtoi(value, &key->field(profile))) {
      return Bad(absl::StrCat(where, name, ": expected a whole number, got '", value, "'"));
    }
  }
  for (const ProfileKey& key : ProfileKeys()) {
    if (!key.optional && !seen.contains(key.name)) {
      return Bad(absl::StrCat(path, ": ", key.name, " is missing; measure again with `ballastctl iotune`"));
    }
  }
  return profile;
}

absl::StatusOr<MachineProfile> ReadProfile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad()) {
    return Bad(absl::StrCat(path, ": cannot be read; measure with `ballastctl iotune --out ", path, "`"));
  }
  return ParseProfile(text.str(), path);
}

absl::Status WriteProfile(const MachineProfile& profile, const std::string& path) {
  return WriteSmallFile(path, ShowProfile(profile));
}

}  // namespace ballast::storage
