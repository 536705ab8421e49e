// A chunk's states by run: the run that made the present one, and the earlier states that pins keep.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// A state that a pin keeps. Without extent and DRAM it is zero: a state before the first update takes no space.
struct PinnedCopy {
  StateLayout layout;         // the copy's, which is whole without a working copy
  absl::Status lost = {};     // not OK: the state could not be read when a restore replaced it; what readers are told
  NvmeExtent extent = {};     // empty: the state is in `dram`
  ArrayDigests digests = {};  // the extent's
  DramBlock dram = {};

  bool zero() const { return extent.bytes() == 0 && dram.bytes().empty(); }
  // REQUIRES: the state is in `dram`.
  StateView View(uint64_t elements) const { return {&layout, dram.bytes().data(), elements}; }
};

// Threads: whoever holds the chunk's `mutex`; the copies are added and dropped by holders of `reading` too.
class ChunkHistory {
 public:
  // Run of the last update, from 1; 0: the state is all zero, and its extent not written.
  uint64_t updated_in() const { return updated_in_; }
  bool zero() const { return updated_in_ == 0; }
  void Update(uint64_t run) { updated_in_ = run; }

  // The present state counts no more, until one is imported: no pin for reading has the chunk.
  void Void() { void_ = true; }
  bool is_void() const { return void_; }
  // The present state was imported: pins for reading that were made before do not have the chunk.
  void Begin() {
    begins_ = updated_in_;
    void_ = false;
  }
  // Does the chunk exist under a pin that was made after `runs` runs?
  bool Exists(uint64_t runs) const { return !void_ && runs >= begins_; }

  // Keeps a copy of the present state, which run `run` is about to replace.
  void Keep(PinnedCopy copy, uint64_t run) { copies_.push_back({updated_in_, run, std::move(copy)}); }
  // The state after `runs` runs, if it was replaced since and a pin keeps it; else null.
  const PinnedCopy* Find(uint64_t runs) const;
  // Frees the copies that serve no pin. `pins`: the number of runs before each pin.
  void DropUnused(absl::Span<const uint64_t> pins);
  // At the store's end: what copies have on the disk stays for the next run of the server.
  void Leave();

 private:
  // For the pins made after run `from` (inclusive) and before run `to`.
  struct Kept {
    uint64_t from = 0;
    uint64_t to = 0;
    PinnedCopy copy;
    bool Serves(uint64_t runs) const { return from <= runs && runs < to; }
  };

  uint64_t updated_in_ = 0;
  uint64_t begins_ = 0;  // run of the last import, from 1; 0: there was none
  bool void_ = false;
  std::vector<Kept> copies_;
};

}  // namespace ballast::storage
