#include "ballast/services/durability/earlier_extents.h"

#include <algorithm>
#include <set>

#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

// The version that all servers have, and the next.
constexpr uint64_t kAutomaticPins = 2;

}  // namespace

void EarlierExtents::AddChunks(absl::Span<const storage::DurableChunk> chunks) {
  for (const storage::DurableChunk& chunk : chunks) chunks_[chunk.id] = chunk;
}

void EarlierExtents::AddPins(absl::Span<const v1::PinnedVersion> pins) {
  for (const v1::PinnedVersion& pin : pins) {
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      pinned_[chunk.id].push_back({pin.version(), chunk, pin.automatic() && !pin.requested()});
    }
  }
}

std::optional<storage::DurableChunk> EarlierExtents::TakeChunk(uint64_t id) {
  const auto found = chunks_.find(id);
  if (found == chunks_.end()) return std::nullopt;
  const storage::DurableChunk chunk = found->second;
  chunks_.erase(found);
  return chunk;
}

uint64_t EarlierExtents::AsideBytes(uint64_t id, uint64_t state_bytes) const {
  uint64_t kept = 0;
  std::set<uint64_t> seen, asked_for;
  if (const auto pinned = pinned_.find(id); pinned != pinned_.end()) {
    for (const Pinned& chunk : pinned->second) {
      if (!chunk.automatic) asked_for.insert(chunk.kept.offset);
    }
    for (const Pinned& chunk : pinned->second) {
      if (!asked_for.contains(chunk.kept.offset) && seen.insert(chunk.kept.offset).second) kept += chunk.kept.bytes;
    }
  }
  return kAutomaticPins * state_bytes - std::min(kAutomaticPins * state_bytes, kept);
}

absl::Status EarlierExtents::TakeBackPins(absl::Span<const int64_t> versions,
                                          absl::Span<const std::shared_ptr<HeldChunk>> chunks,
                                          storage::ChunkStore* store) {
  for (const int64_t version : versions) store->ExpectPin(version);
  for (const auto& chunk : chunks) {
    const auto pinned = pinned_.find(chunk->id);
    if (pinned == pinned_.end()) continue;
    for (const Pinned& pin : pinned->second) {
      BALLAST_RETURN_IF_ERROR(store->TakeBackPin(pin.version, chunk->store_index, pin.kept, pin.automatic));
    }
    pinned_.erase(pinned);
  }
  return absl::OkStatus();
}

std::vector<uint64_t> EarlierExtents::PinnedIds() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, chunks] : pinned_) ids.push_back(id);
  return ids;
}

}  // namespace ballast::services
