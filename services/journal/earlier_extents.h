// Extents that an earlier run of the server left for a job: its chunks' newest states, and the extents of kept
// versions. Chunks take them back when the job's Open brings the chunks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/storage/store/chunk_store.h"

namespace ballast::services {

// Threads: the one that recovers, then the worker.
class EarlierExtents {
 public:
  void AddChunks(absl::Span<const storage::DurableChunk> chunks);
  void AddPins(absl::Span<const v1::PinnedVersion> pins);

  // The chunk's newest state, until somebody has taken it.
  std::optional<storage::DurableChunk> FindChunk(uint64_t id) const;
  void Taken(uint64_t id) { chunks_.erase(id); }
  // The version is kept no more: the extents that nobody has taken of it.
  std::vector<storage::DurableChunk> TakePin(int64_t version);
  // Those that nobody has taken.
  std::vector<storage::DurableChunk> TakeChunks();
  // Bytes of NVMe budget to set aside for a new chunk's automatic pins, less what they have on the disk already.
  uint64_t AsideBytes(uint64_t id, uint64_t state_bytes) const;
  // After `store` has these chunks: gives it the states that kept versions have of them.
  absl::Status TakeBackPins(absl::Span<const int64_t> versions, absl::Span<const std::shared_ptr<HeldChunk>> chunks,
                            storage::ChunkStore* store);

  // Chunks and pinned chunks that are still here.
  size_t chunks() const { return chunks_.size(); }
  size_t pinned_chunks() const { return pinned_.size(); }
  // Ids of the chunks that kept versions have.
  std::vector<uint64_t> PinnedIds() const;
  // The first chunk of either. REQUIRES: there is one.
  uint64_t first() const { return chunks_.empty() ? pinned_.begin()->first : chunks_.begin()->first; }

 private:
  struct Pinned {
    int64_t version = -1;
    storage::DurableChunk kept;
    bool automatic = false;  // for the server alone: no request asked for the pin
  };
  std::map<uint64_t, storage::DurableChunk> chunks_;
  std::map<uint64_t, std::vector<Pinned>> pinned_;  // by chunk
};

}  // namespace ballast::services
