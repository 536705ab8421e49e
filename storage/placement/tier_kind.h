// The tiers that chunks live in.
#pragma once

#include <cstdint>
#include <optional>

namespace ballast::storage {

enum class TierKind { kHbm = 0, kDram = 1, kNvme = 2 };
inline constexpr int kTierKinds = 3;
const char* TierName(TierKind tier);  // "hbm", "dram", "nvme"

struct TierBytes {
  uint64_t hbm = 0;
  uint64_t dram = 0;
  uint64_t nvme = 0;
  uint64_t& operator[](TierKind tier) { return tier == TierKind::kHbm ? hbm : tier == TierKind::kDram ? dram : nvme; }
  uint64_t operator[](TierKind tier) const { return const_cast<TierBytes&>(*this)[tier]; }
};

struct ChunkPlacement {
  TierKind state = TierKind::kDram;
  // HBM or DRAM. None: the chunk has no working copy, pulls round the master wherever the state lies.
  std::optional<TierKind> working = TierKind::kDram;
};

// A chunk keeps the state that an optimizer updates (kNo), or values that no step changes: in the working dtype, or in
// 8 bits.
enum class Frozen : uint8_t { kNo, kWorking, kQ8 };

struct PlacedChunk {
  uint64_t elements = 0;
  ChunkPlacement placement;
  Frozen frozen = Frozen::kNo;
};

}  // namespace ballast::storage
