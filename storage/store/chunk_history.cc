#include "ballast/storage/store/chunk_history.h"

#include <algorithm>

namespace ballast::storage {

const PinnedCopy* ChunkHistory::Find(uint64_t runs) const {
  const auto found = std::find_if(copies_.begin(), copies_.end(), [&](const Kept& kept) { return kept.Serves(runs); });
  return found == copies_.end() ? nullptr : &found->copy;
}

void ChunkHistory::DropUnused(absl::Span<const uint64_t> pins) {
  std::erase_if(copies_, [&](const Kept& kept) {
    return std::none_of(pins.begin(), pins.end(), [&](uint64_t runs) { return kept.Serves(runs); });
  });
}

void ChunkHistory::Leave() {
  for (Kept& kept : copies_) kept.copy.extent.Leave();
}

}  // namespace ballast::storage
