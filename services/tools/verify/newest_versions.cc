#include "ballast/services/tools/verify/newest_versions.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// Puts the highest version first. Among equal versions, the label that the catalog names comes first.
void Sort(const std::vector<storage::DurableChunk>& known, std::vector<FoundLabel>* labels) {
  const auto named = [&](const FoundLabel& label) {
    return std::any_of(known.begin(), known.end(), [&](const storage::DurableChunk& chunk) {
      return chunk.id == label.chunk.id && chunk.Encode() == label.chunk.Encode();
    });
  };
  std::stable_sort(labels->begin(), labels->end(), [&](const FoundLabel& a, const FoundLabel& b) {
    if (a.chunk.version != b.chunk.version) return a.chunk.version > b.chunk.version;
    return named(a) && !named(b);
  });
}

// `labels`: of one chunk, sorted.
absl::StatusOr<std::optional<storage::DurableChunk>> Newest(const std::vector<FoundLabel>& labels,
                                                            const storage::StateLayout& of_job, const TierFiles& tier,
                                                            int64_t version_max) {
  std::optional<storage::DurableChunk> newest;
  for (const FoundLabel& label : labels) {
    const storage::DurableChunk& chunk = label.chunk;
    if (chunk.version > version_max) {
      return absl::DataLossError(absl::StrCat("chunk ", chunk.id, " has a label of version ", chunk.version,
                                              " at offset ", chunk.offset, ", and its log ends at step ", version_max,
                                              ": the log is an older copy"));
    }
    if (newest.has_value()) {
      // An equal version with different bits belongs to another history.
      if (chunk.version < newest->version) return newest;
      if (chunk.digests == newest->digests) continue;
    }
    // FindLabels passes over other layouts.
    const storage::StateLayout layout = *LayoutOfBits(of_job, label.layout_bits);
    const absl::StatusOr<bool> whole = DigestsHold(*tier.at(chunk.file).file, layout, chunk);
    if (absl::IsInternal(whole.status())) continue;  // most disks report rot so; the log may reach an older version
    BALLAST_RETURN_IF_ERROR(whole.status());
    if (!*whole) continue;
    if (newest.has_value()) {
      return absl::DataLossError(absl::StrCat("two extents, at offsets ", newest->offset, " and ", chunk.offset,
                                              ", both hold chunk ", chunk.id, " at version ", chunk.version,
                                              " with different bits"));
    }
    newest = chunk;
  }
  return newest;
}

}  // namespace

absl::StatusOr<std::map<uint64_t, storage::DurableChunk>> NewestVersions(
    const std::vector<FoundLabel>& labels, const std::vector<storage::DurableChunk>& known,
    const storage::StateLayout& layout, const TierFiles& tier, int64_t version_max) {
  std::map<uint64_t, std::vector<FoundLabel>> by_chunk;
  for (const FoundLabel& label : labels) by_chunk[label.chunk.id].push_back(label);
  std::map<uint64_t, storage::DurableChunk> chosen;
  for (auto& [id, of_chunk] : by_chunk) {
    Sort(known, &of_chunk);
    BALLAST_ASSIGN_OR_RETURN(const auto newest, Newest(of_chunk, layout, tier, version_max));
    if (newest.has_value()) chosen[id] = *newest;
  }
  return chosen;
}

}  // namespace ballast::services
