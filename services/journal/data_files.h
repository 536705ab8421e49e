// Names of the files that a server keeps for its jobs in its data directory. The catalog and the NVMe tier name their
// own.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast::services {

inline constexpr char kLogPrefix[] = "log-";      // gradient logs
inline constexpr char kSpillPrefix[] = "spill-";  // transient ones, of jobs whose slices do not fit into memory

inline std::string LogPath(absl::string_view directory, absl::string_view job) {
  return absl::StrCat(directory, "/", kLogPrefix, job);
}
inline std::string SpillPath(absl::string_view directory, absl::string_view job) {
  return absl::StrCat(directory, "/", kSpillPrefix, job);
}

}  // namespace ballast::services
