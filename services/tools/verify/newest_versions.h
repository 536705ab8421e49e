// Finds the newest whole state of each chunk by the labels of a job's extents.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/tools/verify/data_directory.h"
#include "ballast/services/tools/verify/extents.h"

namespace ballast::services {

// Returns, by chunk id, the highest version whose digests match, and leaves out chunks without one. `known`: the chunks
// in the catalog; among equal versions they win. DATA_LOSS if a label has a version above `version_max`, or two states
// of one version differ. Skips extents that the disk cannot read; other errors are DigestsHold's. REQUIRES: FindLabels
// has found the labels, in these files.
absl::StatusOr<std::map<uint64_t, storage::DurableChunk>> NewestVersions(
    const std::vector<FoundLabel>& labels, const std::vector<storage::DurableChunk>& known,
    const storage::StateLayout& layout, const TierFiles& tier, int64_t version_max);

}  // namespace ballast::services
