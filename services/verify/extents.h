// The chunks' state in nvme.tier against what is said of it: labels, array digests, places.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/verify/finding.h"
#include "ballast/services/verify/progress.h"
#include "ballast/storage/extent_label.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/v1/log.pb.h"

namespace ballast::services {

// A chunk's extent as the catalog names it.
struct NamedExtent {
  std::string job;
  storage::StateLayout layout;
  storage::DurableChunk chunk;
  std::optional<int64_t> pin = std::nullopt;  // it is only what this durable pin keeps, not the newest state
  bool automatic = false;                     // and its job may have to go back to it
};
// What the catalog says of pins whose extents are not those of `chunks` or of a pin before.
std::vector<NamedExtent> PinnedExtents(const std::string& job, const storage::StateLayout& layout,
                                       const std::vector<storage::DurableChunk>& chunks,
                                       const std::vector<v1::PinnedVersion>& pins);

// Extents that overlap, leave the file or lie at places that no extent has; their jobs are refused.
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
struct FoundLabels {
  std::map<std::string, std::vector<FoundLabel>> of_jobs;
  uint64_t of_other_lives = 0;     // of these names: what jobs left that were dropped since
  uint64_t unreadable_blocks = 0;  // passed over
};
// A job whose labels are wanted.
struct WantedLabels {
  storage::StateLayout layout;
  uint64_t life = 0;
};
// All labels of these jobs in the file, whether or not the catalog knows of them.
absl::StatusOr<FoundLabels> FindLabels(const storage::BlockFile& file,
                                       const std::map<std::string, WantedLabels>& wanted, Progress* progress);

}  // namespace ballast::services
