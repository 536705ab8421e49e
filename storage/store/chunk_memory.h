// Where one chunk's state and working copy lie in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "ballast/storage/placement/tier_kind.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

// Memory of a single chunk, in HBM or DRAM. Holds a state that moved up, and on a server with a GPU every state in
// memory: page-locked and device memory cannot be given back in parts, so chunks do not share blocks there. Also holds
// a working copy in HBM, or a working copy that left HBM.
struct OwnMemory {
  HbmBlock hbm;
  DramBlock dram;
  HbmBlock hbm_working;
  DramBlock dram_working;
  void Charge(const std::shared_ptr<Account>& account) {
    hbm.Charge(account);
    dram.Charge(account);
    hbm_working.Charge(account);
    dram_working.Charge(account);
  }
};

// The chunk's parts of a block that chunks share; null where the chunk has its own memory, or none.
struct SharedMemory {
  DramBlock* block = nullptr;
  std::byte* state = nullptr;
  std::byte* working = nullptr;
};

// Threads: the store's thread alone changes it, holding the chunk's `mutex`; every other thread reads it holding
// `mutex`.
class ChunkMemory {
 public:
  ChunkMemory(ChunkPlacement placement, OwnMemory own, const SharedMemory& shared);

  const ChunkPlacement& placement() const { return placement_; }
  TierKind tier() const { return placement_.state; }  // the state's
  // Host or device memory; null on NVMe.
  std::byte* state() const { return state_; }
  // Host or device memory; null if the chunk has no working copy beside its state.
  std::byte* working() const { return working_; }
  // The working copy from byte `at` on, as the target of a device's kernels.
  HbmWorking WorkingOfDevice(uint64_t at = 0) const;

  // The state lies in tier `to` from now on, in `memory` unless that is NVMe. A working copy for which `memory` has
  // DRAM lies there. `memory` gets what the chunk leaves.
  void MoveTo(TierKind to, OwnMemory* memory);
  // The block whose parts the chunk shares.
  DramBlock* shared() const { return shared_; }
  // The chunk has no working copy any more. Returns where it was: in the shared block.
  std::byte* DropWorking();
  // The chunk has no memory any more, and never will. Returns its own memory; `shared` gets its parts of the shared
  // block.
  OwnMemory Remove(SharedMemory* shared);
  bool removed() const { return removed_; }

 private:
  std::byte* OwnState() const;

  ChunkPlacement placement_;
  OwnMemory own_;
  DramBlock* shared_;
  std::byte* state_;
  std::byte* working_;
  bool removed_ = false;
};

}  // namespace ballast::storage
