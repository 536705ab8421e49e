// Copy on write for pins.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "ballast/storage/store/chunk_reader.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// A chunk's present state, kept for pins while an update replaces the state. Prepare does all work that can fail,
// before the chunk changes; Install cannot fail. NVMe state is not copied: the pin inherits the extent and the chunk
// moves to a fresh extent. The copy of a remainder has the fp32 master: the working copy, which it would need
// otherwise, is about to change.
class CopyOnWrite {
 public:
  // `account`: whose the copy is. `loaded`: the chunk's state in memory if its tier is NVMe. `extent_is_kept`: a
  // durable pin keeps the chunk's extent, so the extent cannot be inherited. The copy goes to free NVMe space, else to
  // DRAM. RESOURCE_EXHAUSTED (BUDGET) if neither has room; the message also says what refused the extent, the budget or
  // a full disk.
  static absl::StatusOr<CopyOnWrite> Prepare(Tiers* tiers, const std::shared_ptr<Account>& account, ChunkReader* reader,
                                             const StoredChunk& chunk, const std::byte* loaded, bool extent_is_kept)
      ABSL_LOCKS_EXCLUDED(chunk.mutex);
  // In place of a copy: the state cannot be read, and `lost` is what readers of the pins are told.
  static CopyOnWrite Lost(const StoredChunk& chunk, const absl::Status& lost);
  // Does the copy take the chunk's extent and leave the chunk a fresh extent?
  bool takes_extent() const { return fresh_.has_value(); }
  // `run`: the run about to update the chunk.
  void Install(StoredChunk& chunk, uint64_t run) && ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);

 private:
  explicit CopyOnWrite(const StoredChunk& chunk) : copy_{.layout = chunk.layout.Whole()} {}
  absl::Status FillExtent(Tiers* tiers, const std::shared_ptr<Account>& account, ChunkReader* reader,
                          const StoredChunk& chunk, const std::byte* loaded);
  absl::Status FillDram(Tiers* tiers, const std::shared_ptr<Account>& account, const StoredChunk& chunk,
                        const std::byte* loaded);
  uint64_t bytes(const StoredChunk& chunk) const;  // of the copy
  void CopyWhole(const StoredChunk& chunk, const std::byte* from, std::byte* to) const ABSL_LOCKS_EXCLUDED(chunk.mutex);

  PinnedCopy copy_;
  std::optional<NvmeExtent> fresh_;  // the chunk's next extent
};

}  // namespace ballast::storage
