// Versions of a durable store's chunks that stay on the disk until they are unpinned.
//
// Nothing is copied: a pin keeps the extents that hold its version. As long as a chunk's newest extent is such a one,
// the chunk owns it; when the chunk gets another, the pin takes it over and gives the budget for it, which it reserved
// when it was made, in return.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/extent_label.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// Threads: the one that runs the store. `chunk`: the store's own index.
class DurablePins {
 public:
  explicit DurablePins(NvmeTier* nvme) : nvme_(nvme) {}

  // Budget that only automatic pins use, and that comes back when they are dropped: they are never short of it.
  void SetAside(BudgetLease lease) { aside_.Join(std::move(lease)); }
  // Budget, and blocks on the disk, that keeping `bytes` takes; of an automatic pin first what was set aside.
  // RESOURCE_EXHAUSTED: (BUDGET), or (IO) if the disk is full.
  absl::StatusOr<BudgetLease> Reserve(uint64_t bytes, bool automatic = false);
  // Does some pin keep the chunk's newest extent already?
  bool KeepsNewest(uint64_t chunk) const;
  // Would one more pin of the chunk's newest extent have to bring its bytes? Yes if none keeps it, or only automatic
  // ones, and this is another.
  bool NeedsBytes(uint64_t chunk, bool automatic) const;
  // Bytes that pin `pin` has from what was set aside.
  uint64_t AsideBytes(int64_t pin) const;

  // There is such a pin, though it may keep nothing.
  void Expect(int64_t pin) { pins_.try_emplace(pin); }
  bool Has(int64_t pin) const { return pins_.contains(pin); }
  // `entry`: the chunk's newest extent. Takes the extent's bytes out of `reserve` if NeedsBytes.
  void Keep(int64_t pin, uint64_t chunk, const DurableChunk& entry, BudgetLease* reserve, bool automatic = false);
  // All that `pin` has from what was set aside is paid from `reserve` instead. REQUIRES: AsideBytes of it.
  void Adopt(int64_t pin, BudgetLease reserve);
  // After a restart: `entry` is not the chunk's newest extent; the NVMe tier kept it. DATA_LOSS (IO) if it did not.
  absl::Status TakeBack(int64_t pin, uint64_t chunk, const DurableChunk& entry, bool automatic = false);
  // The chunks that the pin keeps, ascending.
  std::vector<uint64_t> ChunksOf(int64_t pin) const;
  // Null if the pin does not keep the chunk.
  const DurableChunk* Find(int64_t pin, uint64_t chunk) const;

  // The chunk has a new extent, `old` is the one before. If pins keep it they take it over, and the budget for another
  // is returned in its stead; `old` is empty then.
  BudgetLease TakeOver(uint64_t chunk, NvmeExtent* old);
  // Frees what no other pin and no chunk has.
  void Drop(int64_t pin);
  // Before the end of a store whose pins outlive it.
  void Leave();

 private:
  struct Kept {
    DurableChunk entry;
    BudgetLease reserve;  // until the extent is taken over
    NvmeExtent extent;    // from then on
    bool aside = false;   // its budget is of what was set aside
  };
  void Pay(Kept* kept, BudgetLease* reserve);

  NvmeTier* const nvme_;
  BudgetLease aside_;
  std::map<int64_t, std::map<uint64_t, std::shared_ptr<Kept>>> pins_;  // by pin and chunk
  std::map<uint64_t, std::weak_ptr<Kept>> newest_;                     // whose extent is still its chunk's
};

}  // namespace ballast::storage
