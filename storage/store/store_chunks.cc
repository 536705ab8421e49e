#include "ballast/storage/store/store_chunks.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/update_checks.h"

namespace ballast::storage {

absl::StatusOr<StoredChunk*> StoreChunks::Find(uint64_t chunk) const {
  absl::ReaderMutexLock lock(&mutex_);
  if (chunk >= chunks_.size()) {
    return Bad(model::kBadRange, absl::StrCat("chunk ", chunk, " of a store of ", chunks_.size(), " chunks"));
  }
  if (placed_[chunk].gap()) return Bad(model::kBadRange, absl::StrCat("chunk ", chunk, " was removed from its store"));
  return const_cast<StoredChunk*>(&chunks_[chunk]);
}

uint64_t StoreChunks::count() const {
  absl::ReaderMutexLock lock(&mutex_);
  return chunks_.size();
}

uint64_t StoreChunks::present() const {
  absl::ReaderMutexLock lock(&mutex_);
  return present_;
}

uint64_t StoreChunks::largest_bytes() const {
  uint64_t largest = 0;
  for (const StoredChunk* chunk : All()) largest = std::max(largest, chunk->state_bytes());
  return largest;
}

std::vector<StoredChunk*> StoreChunks::All() const {
  absl::ReaderMutexLock lock(&mutex_);
  std::vector<StoredChunk*> all;
  all.reserve(present_);
  for (const StoredChunk& chunk : chunks_) {
    if (!placed_[chunk.index].gap()) all.push_back(const_cast<StoredChunk*>(&chunk));
  }
  return all;
}

std::vector<PlacedChunk> StoreChunks::placed() const {
  absl::ReaderMutexLock lock(&mutex_);
  return placed_;
}

ChunkStore::Residency StoreChunks::residency() const {
  absl::ReaderMutexLock lock(&mutex_);
  return residency_;
}

std::vector<StoredChunk*> StoreChunks::Append(std::vector<NewChunk> added) {
  std::vector<StoredChunk*> chunks;
  absl::MutexLock lock(&mutex_);
  for (NewChunk& fresh : added) {
    StoredChunk& chunk = chunks_.emplace_back(fresh.layout, chunks_.size(), fresh.elements, fresh.id,
                                              std::move(fresh.memory), std::move(fresh.extent));
    placed_.push_back({chunk.elements, chunk.memory.placement(), chunk.layout.form()});
    CountIn(chunk);
    chunks.push_back(&chunk);
  }
  present_ += added.size();
  return chunks;
}

void StoreChunks::Replace(const StoredChunk& chunk) {
  absl::MutexLock lock(&mutex_);
  CountOut(chunk);
  placed_[chunk.index].placement = chunk.memory.placement();
  CountIn(chunk);
}

void StoreChunks::Remove(const StoredChunk& chunk) {
  absl::MutexLock lock(&mutex_);
  CountOut(chunk);
  placed_[chunk.index] = PlacedChunk::Gap();
  --present_;
}

void StoreChunks::FreeUnshared() {
  std::set<const DramBlock*> used;
  for (const StoredChunk* chunk : All()) used.insert(chunk->memory.shared());
  for (DramBlock& block : shared_) {
    if (!used.contains(&block)) block = DramBlock();
  }
}

void StoreChunks::CountOut(const StoredChunk& chunk) {
  const ChunkPlacement& placement = placed_[chunk.index].placement;
  residency_.state[placement.state] -= chunk.state_bytes();
  if (placement.working.has_value()) residency_.working[*placement.working] -= chunk.working_bytes();
}

void StoreChunks::CountIn(const StoredChunk& chunk) {
  const ChunkPlacement& placement = chunk.memory.placement();
  residency_.state[placement.state] += chunk.state_bytes();
  if (placement.working.has_value()) residency_.working[*placement.working] += chunk.working_bytes();
}

}  // namespace ballast::storage
