// The choices of a plan. To add a choice, add a field here, a loop in Choices (candidates.h), its effect in Arrange,
// and its cost in PredictStep.
#pragma once

#include <string>

namespace ballast::storage {

// The chunks that get a tier's room, if not all fit.
enum class ChunkOrder {
  kByTier,       // the first chunks of the update
  kSpread,       // evenly over the update, so that the disk always has work
  kStay,         // chunks that lie there already; no chunk moves to a faster tier
  kStayAndFill,  // the same, and then further chunks, evenly
};

enum class HbmUse {
  kFull,   // state with its working copy, and where both do not fit, state alone
  kPairs,  // state with its working copy
  kState,  // state, and working copies in the room that is left
  kNone,   // nothing
};

struct Choice {
  ChunkOrder order = ChunkOrder::kByTier;
  HbmUse hbm = HbmUse::kFull;
  int hbm_quarters = 4;     // of the HBM budget that is used
  bool reads_back = false;  // slices are read back even if they fit in DRAM
  // Chunks with state in DRAM have no working copy: pulls round the master, and more state fits.
  bool rounds_masters = false;

  bool operator==(const Choice&) const = default;
  // "evenly spread, hbm left empty": the part of the choice that differs from the default.
  std::string Describe() const;
};

}  // namespace ballast::storage
