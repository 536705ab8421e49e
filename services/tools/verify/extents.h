// Compares the chunks' state in the NVMe tier's files with the catalog: labels, digests of arrays, places.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ballast/proto/model/layout.h"
#include "ballast/services/tools/verify/finding.h"
#include "ballast/services/tools/verify/progress.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/v1/log.pb.h"

namespace ballast::services {

// A chunk's extent as the catalog names it.
struct NamedExtent {
  std::string job;
  storage::StateLayout layout;
  storage::DurableChunk chunk;
  std::optional<int64_t> pin = std::nullopt;  // the durable pin that alone keeps the extent; none: the newest state
  bool automatic = false;                     // the pin is automatic: its job may have to go back to it
  bool copied = false;                        // another server holds the chunk, by the Open in the catalog
};
// The extents that the catalog's pins name, each once, and none that `chunks` names.
// `layout_of`: a chunk's layout.
using LayoutOf = absl::FunctionRef<storage::StateLayout(const storage::DurableChunk&)>;
std::vector<NamedExtent> PinnedExtents(const std::string& job, LayoutOf layout_of,
                                       const std::vector<storage::DurableChunk>& chunks,
                                       const std::vector<v1::PinnedVersion>& pins);

// Finds extents of one file that overlap, leave the file or lie at impossible places; their jobs would be refused.
// `file_bytes`: 0 if there is no file.
void CheckPlaces(const std::vector<NamedExtent>& extents, const std::string& path, uint64_t file_bytes,
                 ScrubReport* report);

// Reads a whole extent: its label, and the digest of each array. Findings go to `report`.
void CheckExtent(const storage::BlockFile& file, const NamedExtent& extent, Progress* progress, ScrubReport* report);

// Does the state at `chunk.offset` have the digests of `chunk`? INTERNAL (IO) if the state cannot be read.
absl::StatusOr<bool> DigestsHold(const storage::BlockFile& file, const storage::StateLayout& layout,
                                 const storage::DurableChunk& chunk);

// The layout of a chunk: the job's, or if that does not have the chunk, the one whose size the chunk has. `trained`:
// the layout of chunks that are not frozen.
storage::StateLayout LayoutOfChunk(const storage::StateLayout& trained, const model::Layout& chunks,
                                   const storage::DurableChunk& chunk);
// The layout, among those of a job, that a label's layout_bits name. None: the label is of another job's state.
std::optional<storage::StateLayout> LayoutOfBits(const storage::StateLayout& job, uint64_t layout_bits);

// A label that tells its own place correctly. The digests in the label are not verified yet.
struct FoundLabel {
  storage::DurableChunk chunk;
  uint64_t layout_bits = 0;
};
struct FoundLabels {
  std::map<std::string, std::vector<FoundLabel>> of_jobs;
  uint64_t of_other_lives = 0;     // of these names: left by jobs that were dropped
  uint64_t unreadable_blocks = 0;  // passed over
};
// A job whose labels are wanted.
struct WantedLabels {
  storage::StateLayout layout;  // of chunks that are not frozen
  uint64_t life = 0;
};
// All labels of these jobs in the file with this id, known to the catalog or not.
absl::StatusOr<FoundLabels> FindLabels(const storage::BlockFile& file, storage::NvmeFileId id,
                                       const std::map<std::string, WantedLabels>& wanted, Progress* progress);

}  // namespace ballast::services
