// The chunks' state in nvme.tier against what is said of it: labels, array digests, places.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/verify/finding.h"
#include "ballast/services/verify/progress.h"
#include "ballast/storage/extent_label.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::services {

// A chunk's extent as the catalog names it.
struct NamedExtent {
  std::string job;
  storage::StateLayout layout;
  storage::DurableChunk chunk;
};

// Extents that overlap, leave the file or lie at places that no extent has; on these a server would not start.
// `file_bytes`: 0 where there is no file.
void CheckPlaces(const std::vector<NamedExtent>& extents, const std::string& path, uint64_t file_bytes,
                 ScrubReport* report);

// Reads all of an extent: its label and the digest of each array. Findings go to `report`.
void CheckExtent(const storage::BlockFile& file, const NamedExtent& extent, Progress* progress, ScrubReport* report);

// Does the state at `chunk.offset` have the digests of `chunk`? INTERNAL (IO) if it cannot be read.
absl::StatusOr<bool> DigestsHold(const storage::BlockFile& file, const storage::StateLayout& layout,
                                 const storage::DurableChunk& chunk);

// A label that says the truth about where it lies. Not yet looked at: the digests that it names.
struct FoundLabel {
  storage::DurableChunk chunk;
  uint64_t layout_bits = 0;
};
// All labels in the file, by job: for each, whether or not the catalog knows of it. `layouts`: of the jobs that are
// wanted. Blocks that cannot be read are passed over, and counted in `unreadable`.
absl::StatusOr<std::map<std::string, std::vector<FoundLabel>>> FindLabels(
    const storage::BlockFile& file, const std::map<std::string, storage::StateLayout>& layouts, Progress* progress,
    uint64_t* unreadable);

}  // namespace ballast::services
