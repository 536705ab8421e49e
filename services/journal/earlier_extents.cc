#include "ballast/services/journal/earlier_extents.h"

#include <algorithm>
#include <set>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// The version that all servers have, and the next.
constexpr uint64_t kAutomaticPins = 2;

// Two files may have extents at the same offset.
std::pair<storage::NvmeFileId, uint64_t> PlaceOf(const storage::DurableChunk& chunk) {
  return {chunk.file, chunk.offset};
}

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

std::vector<storage::DurableChunk> EarlierExtents::TakePin(int64_t version) {
  std::vector<storage::DurableChunk> left;
  for (auto& [id, pins] : pinned_) {
    for (const Pinned& pin : pins) {
      if (pin.version == version) left.push_back(pin.kept);
    }
    std::erase_if(pins, [&](const Pinned& pin) { return pin.version == version; });
  }
  std::erase_if(pinned_, [](const auto& entry) { return entry.second.empty(); });
  return left;
}

std::vector<storage::DurableChunk> EarlierExtents::TakeChunks() {
  std::vector<storage::DurableChunk> left;
  for (const auto& [id, chunk] : std::exchange(chunks_, {})) left.push_back(chunk);
  return left;
}

std::optional<storage::DurableChunk> EarlierExtents::FindChunk(uint64_t id) const {
  const auto found = chunks_.find(id);
  return found == chunks_.end() ? std::nullopt : std::optional(found->second);
}

uint64_t EarlierExtents::AsideBytes(uint64_t id, uint64_t state_bytes) const {
  uint64_t kept = 0;
  std::set<std::pair<storage::NvmeFileId, uint64_t>> seen, asked_for;
  if (const auto pinned = pinned_.find(id); pinned != pinned_.end()) {
    for (const Pinned& chunk : pinned->second) {
      if (!chunk.automatic) asked_for.insert(PlaceOf(chunk.kept));
    }
    for (const Pinned& chunk : pinned->second) {
      const auto place = PlaceOf(chunk.kept);
      if (!asked_for.contains(place) && seen.insert(place).second) kept += chunk.kept.bytes;
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
