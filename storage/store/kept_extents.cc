#include "ballast/storage/store/kept_extents.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::storage {

void KeptExtents::SetAside(NvmeRoom room) {
  room.Mark(TierPart::kPins);
  aside_.Join(std::move(room));
  const uint64_t bytes = std::min(owed_, aside_.bytes());
  aside_.Split(bytes);
  owed_ -= bytes;
}

absl::StatusOr<NvmeRoom> KeptExtents::Reserve(uint64_t bytes, bool automatic) {
  const uint64_t there = automatic ? std::min(bytes, aside_.bytes()) : 0;
  NvmeRoom room;
  if (bytes > there) {
    BALLAST_ASSIGN_OR_RETURN(room, nvme_->Promise(bytes - there, "a durable pin of all chunks' state"));
    room.Mark(TierPart::kPins);
    room.Charge(account_);
  }
  if (there > 0) room.Join(aside_.Split(there));
  return room;
}

bool KeptExtents::KeepsNewest(uint64_t chunk) const {
  const auto found = newest_.find(chunk);
  return found != newest_.end() && !found->second.expired();
}

bool KeptExtents::NeedsBytes(uint64_t chunk, bool automatic) const {
  const auto found = newest_.find(chunk);
  const std::shared_ptr<Kept> kept = found == newest_.end() ? nullptr : found->second.lock();
  return kept == nullptr || (kept->aside && !automatic);
}

uint64_t KeptExtents::AsideBytes(int64_t pin) const {
  uint64_t bytes = 0;
  if (const auto found = pins_.find(pin); found != pins_.end()) {
    for (const auto& [chunk, kept] : found->second.chunks) bytes += kept->aside ? kept->entry.bytes : 0;
  }
  return bytes;
}

void KeptExtents::Pay(Kept* kept, NvmeRoom* reserve) {
  if (!std::exchange(kept->aside, false)) return;
  SetAside(reserve->Split(kept->entry.bytes));
}

void KeptExtents::Keep(int64_t pin, uint64_t chunk, const DurableChunk& entry, NvmeRoom* reserve, bool automatic) {
  std::shared_ptr<Kept> kept = newest_[chunk].lock();
  if (kept == nullptr) {
    kept = std::make_shared<Kept>();
    kept->entry = entry;
    kept->reserve = reserve->Split(entry.bytes);
    kept->aside = automatic;
    newest_[chunk] = kept;
  } else if (!automatic) {
    Pay(kept.get(), reserve);
  }
  pins_[pin].chunks[chunk] = std::move(kept);
}

void KeptExtents::Adopt(int64_t pin, NvmeRoom reserve) {
  for (auto& [chunk, kept] : pins_[pin].chunks) Pay(kept.get(), &reserve);
}

absl::Status KeptExtents::TakeBack(int64_t pin, uint64_t chunk, const DurableChunk& entry, bool automatic) {
  // Two pins between which the chunk did not change share its extent.
  for (const auto& [other, there] : pins_) {
    const auto found = there.chunks.find(chunk);
    if (found == there.chunks.end() || found->second->entry.offset != entry.offset ||
        found->second->entry.file != entry.file) {
      continue;
    }
    if (found->second->aside && !automatic) shares_[chunk] -= entry.bytes;
    found->second->aside = found->second->aside && automatic;
    pins_[pin].chunks[chunk] = found->second;
    return absl::OkStatus();
  }
  absl::StatusOr<NvmeExtent> extent = nvme_->TakeKept(entry.offset, entry.file);
  if (!extent.ok()) return extent.status();
  auto kept = std::make_shared<Kept>();
  kept->entry = entry;
  kept->extent = *std::move(extent);
  kept->extent.Mark(TierPart::kPins);
  kept->extent.Charge(account_);
  kept->aside = automatic;
  if (automatic) AddShare(chunk, entry.bytes);
  pins_[pin].chunks[chunk] = std::move(kept);
  return absl::OkStatus();
}

void KeptExtents::Add(int64_t pin, uint64_t chunk, const DurableChunk& entry, NvmeExtent extent) {
  const auto kept = std::make_shared<Kept>();
  kept->entry = entry;
  kept->extent = std::move(extent);
  kept->extent.Mark(TierPart::kPins);
  kept->extent.Charge(account_);
  pins_[pin].chunks[chunk] = kept;
}

bool KeptExtents::Share(int64_t pin, uint64_t chunk, int64_t version, const ArrayDigests& digests) {
  for (const auto& [other, there] : pins_) {
    const auto found = there.chunks.find(chunk);
    if (found == there.chunks.end() || found->second->aside) continue;
    const DurableChunk& entry = found->second->entry;
    if (entry.version != version || entry.digests != digests) continue;
    const std::shared_ptr<Kept> same = found->second;
    pins_[pin].chunks[chunk] = same;
    return true;
  }
  return false;
}

void KeptExtents::AddZero(int64_t pin, uint64_t chunk) { pins_[pin].zero.insert(chunk); }

void KeptExtents::Imported(uint64_t chunk) {
  for (auto& [pin, there] : pins_) {
    if (!there.chunks.contains(chunk) && !there.zero.contains(chunk)) there.lacked.insert(chunk);
  }
}

bool KeptExtents::Lacks(int64_t pin, uint64_t chunk) const {
  const auto found = pins_.find(pin);
  return found == pins_.end() || found->second.lacked.contains(chunk);
}

std::vector<uint64_t> KeptExtents::LackedBy(int64_t pin) const {
  const auto found = pins_.find(pin);
  if (found == pins_.end()) return {};
  return {found->second.lacked.begin(), found->second.lacked.end()};
}

void KeptExtents::Drop(int64_t pin) {
  const auto found = pins_.find(pin);
  if (found == pins_.end()) return;
  for (auto& [chunk, kept] : found->second.chunks) Release(std::move(kept));
  pins_.erase(found);
}

void KeptExtents::Release(std::shared_ptr<Kept> kept) {
  if (kept.use_count() > 1 || !kept->aside) return;
  SetAside(std::move(kept->reserve));
  if (kept->extent.bytes() > 0) SetAside(kept->extent.TakeRoom());
}

void KeptExtents::Remove(uint64_t chunk) {
  newest_.erase(chunk);
  for (auto& [pin, there] : pins_) {
    if (const auto kept = there.chunks.extract(chunk); !kept.empty()) Release(std::move(kept.mapped()));
    there.zero.erase(chunk);
    there.lacked.erase(chunk);
  }
  if (const auto share = shares_.extract(chunk); !share.empty()) owed_ += share.mapped();
  SetAside({});
}

std::vector<uint64_t> KeptExtents::ChunksOf(int64_t pin) const {
  std::vector<uint64_t> chunks;
  if (const auto found = pins_.find(pin); found != pins_.end()) {
    for (const auto& [chunk, kept] : found->second.chunks) chunks.push_back(chunk);
  }
  return chunks;
}

const DurableChunk* KeptExtents::Find(int64_t pin, uint64_t chunk) const {
  const auto found = pins_.find(pin);
  if (found == pins_.end()) return nullptr;
  const auto kept = found->second.chunks.find(chunk);
  return kept == found->second.chunks.end() ? nullptr : &kept->second->entry;
}

std::optional<int64_t> KeptExtents::PinAt(uint64_t chunk, const DurableChunk& place) const {
  for (const auto& [pin, there] : pins_) {
    const DurableChunk* const entry = Find(pin, chunk);
    if (entry != nullptr && entry->offset == place.offset && entry->file == place.file) return pin;
  }
  return std::nullopt;
}

std::vector<DurableChunk> KeptExtents::Of(uint64_t chunk) const {
  std::vector<DurableChunk> entries;
  for (const auto& [pin, there] : pins_) {
    const auto kept = there.chunks.find(chunk);
    if (kept == there.chunks.end()) continue;
    const DurableChunk& entry = kept->second->entry;
    const bool seen = std::any_of(entries.begin(), entries.end(), [&](const DurableChunk& other) {
      return other.offset == entry.offset && other.file == entry.file;
    });
    if (!seen) entries.push_back(entry);
  }
  return entries;
}

std::vector<uint64_t> KeptExtents::Bytes(uint64_t chunks) const {
  std::vector<uint64_t> bytes(chunks, 0);
  std::unordered_set<const Kept*> seen;
  for (const auto& [pin, there] : pins_) {
    for (const auto& [chunk, kept] : there.chunks) {
      if (chunk < chunks && seen.insert(kept.get()).second) bytes[chunk] += kept->entry.bytes;
    }
  }
  return bytes;
}

NvmeRoom KeptExtents::TakeOver(uint64_t chunk, NvmeExtent* old) {
  const auto found = newest_.find(chunk);
  if (found == newest_.end()) return {};
  const std::shared_ptr<Kept> kept = found->second.lock();
  newest_.erase(found);
  if (kept == nullptr) return {};
  kept->extent = std::move(*old);
  kept->extent.Mark(TierPart::kPins);
  return std::move(kept->reserve);
}

void KeptExtents::Leave() {
  aside_.Leave();
  for (auto& [pin, there] : pins_) {
    for (auto& [chunk, kept] : there.chunks) {
      kept->reserve.Leave();
      kept->extent.Leave();
    }
  }
}

}  // namespace ballast::storage
