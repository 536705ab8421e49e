#include "ballast/storage/durable_pins.h"

#include <utility>

namespace ballast::storage {

absl::StatusOr<BudgetLease> DurablePins::Reserve(uint64_t bytes) const {
  if (bytes == 0) return BudgetLease();
  // As an extent first: a disk that is full refuses the pin, not a step after it.
  absl::StatusOr<NvmeExtent> reserved = nvme_->Allocate(bytes, "a durable pin of all chunks' state");
  if (!reserved.ok()) return reserved.status();
  return reserved->TakeLease();
}

bool DurablePins::KeepsNewest(uint64_t chunk) const {
  const auto found = newest_.find(chunk);
  return found != newest_.end() && !found->second.expired();
}

void DurablePins::Keep(int64_t pin, uint64_t chunk, const DurableChunk& entry, BudgetLease* reserve) {
  std::shared_ptr<Kept> kept = newest_[chunk].lock();
  if (kept == nullptr) {
    kept = std::make_shared<Kept>();
    kept->entry = entry;
    kept->reserve = reserve->Split(entry.bytes);
    newest_[chunk] = kept;
  }
  pins_[pin][chunk] = std::move(kept);
}

absl::Status DurablePins::TakeBack(int64_t pin, uint64_t chunk, const DurableChunk& entry) {
  // Two pins between which the chunk did not change share its extent.
  for (const auto& [other, chunks] : pins_) {
    const auto found = chunks.find(chunk);
    if (found == chunks.end() || found->second->entry.offset != entry.offset) continue;
    pins_[pin][chunk] = found->second;
    return absl::OkStatus();
  }
  absl::StatusOr<NvmeExtent> extent = nvme_->TakeKept(entry.offset);
  if (!extent.ok()) return extent.status();
  auto kept = std::make_shared<Kept>();
  kept->entry = entry;
  kept->extent = *std::move(extent);
  pins_[pin][chunk] = std::move(kept);
  return absl::OkStatus();
}

std::vector<uint64_t> DurablePins::ChunksOf(int64_t pin) const {
  std::vector<uint64_t> chunks;
  if (const auto found = pins_.find(pin); found != pins_.end()) {
    for (const auto& [chunk, kept] : found->second) chunks.push_back(chunk);
  }
  return chunks;
}

const DurableChunk* DurablePins::Find(int64_t pin, uint64_t chunk) const {
  const auto chunks = pins_.find(pin);
  if (chunks == pins_.end()) return nullptr;
  const auto kept = chunks->second.find(chunk);
  return kept == chunks->second.end() ? nullptr : &kept->second->entry;
}

BudgetLease DurablePins::TakeOver(uint64_t chunk, NvmeExtent* old) {
  const auto found = newest_.find(chunk);
  if (found == newest_.end()) return {};
  const std::shared_ptr<Kept> kept = found->second.lock();
  newest_.erase(found);
  if (kept == nullptr) return {};
  kept->extent = std::move(*old);
  return std::move(kept->reserve);
}

void DurablePins::Leave() {
  for (auto& [pin, chunks] : pins_) {
    for (auto& [chunk, kept] : chunks) kept->extent.Leave();
  }
}

}  // namespace ballast::storage
