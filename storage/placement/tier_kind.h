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
  // HBM or DRAM. nullopt: the chunk has no working copy, and pulls round the master wherever the state lies.
  std::optional<TierKind> working = TierKind::kDram;
};

// What a chunk keeps: the state that the job's optimizer updates (kFull), a master without moments, which plain SGD
// updates (kMaster), or values that no step changes: in the working dtype, or in 8 bits. On disk as numbers.
enum class StateForm : uint8_t { kFull = 0, kWorking = 1, kQ8 = 2, kMaster = 3 };

inline bool IsFrozen(StateForm form) { return form == StateForm::kWorking || form == StateForm::kQ8; }

struct PlacedChunk {
  uint64_t elements = 0;  // 0: a gap
  ChunkPlacement placement;
  StateForm form = StateForm::kFull;

  // Where a chunk was removed from its store: it takes no bytes anywhere, and stays where it is.
  static PlacedChunk Gap() { return {.placement = {.working = std::nullopt}}; }
  bool gap() const { return elements == 0; }
};

}  // namespace ballast::storage
