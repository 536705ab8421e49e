// Updates state in the host's memory: values, then the optimizer. Digests of the state before and after are taken block
// by block, while a block is in the processor's cache: a separate pass over the state would cost as much as the update.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/extent_label.h"

namespace ballast::storage {

// The threads for the computation: the pool's, if there is a pool, and the caller's, which calls `poll` between pieces.
struct Compute {
  kernels::ThreadPool* pool = nullptr;
  absl::FunctionRef<void()> poll;
};

// CRC32C of each array, with its padding.
ArrayDigests DigestState(const StateView& state, const Compute& compute);

// CRC32C of any bytes, computed in parallel.
uint32_t DigestBytes(absl::Span<const std::byte> bytes, const Compute& compute);

// Makes the whole chunk's working copy from its master. REQUIRES: the state holds the master.
void RoundMaster(const StateView& state, std::byte* working, const Compute& compute);

struct UpdateDigests {
  // The digests that the caller wants.
  bool of_old = false;
  bool of_new = false;
  ArrayDigests old_state = {};
  ArrayDigests new_state = {};
};

// Digests of a piece so far, for each array: of values, and of the scales that 8-bit moments keep behind all values.
struct PieceDigest {
  std::array<uint32_t, kStateArraysMax> values = {};
  std::array<uint32_t, kStateArraysMax> scales = {};
};

// Changes state and working copy (the whole chunk's; null if the store keeps none) as `update` says, in pieces that any
// threads compute in any order. REQUIRES: `update` is valid for the chunk, its segments begin at multiples of
// kernels::kMomentBlock. Borrows `update` and the memory; stays where it is.
class StateUpdate {
 public:
  // Does what comes before the pieces: writes values, and digests states that the pieces do not pass. Reads
  // `of_old` and `of_new` of `wanted`.
  StateUpdate(const ChunkUpdate& update, const StateView& state, std::byte* working, const Compute& compute,
              UpdateDigests wanted);
  StateUpdate(const StateUpdate&) = delete;
  StateUpdate& operator=(const StateUpdate&) = delete;

  uint64_t pieces() const { return pieces_; }
  // Any thread, each piece once.
  void Run(uint64_t piece);
  // After all pieces: the digests that were wanted.
  const UpdateDigests& Digests();

 private:
  // The update's segments, in the order of their place in the chunk, to find the segments that overlap a block.
  class Segments {
   public:
    explicit Segments(const ChunkUpdate& update);
    bool Any(uint64_t at, uint64_t end) const;
    // Calls `function` with each segment that overlaps [at, end), and the overlap.
    void Meet(uint64_t at, uint64_t end,
              absl::FunctionRef<void(const ChunkUpdate::SegmentUpdate&, uint64_t, uint64_t)> function) const;

   private:
    std::vector<const ChunkUpdate::SegmentUpdate*>::const_iterator From(uint64_t at) const;
    std::vector<const ChunkUpdate::SegmentUpdate*> sorted_;
  };
  // Digests the old state where the pieces do not pass it. True if nothing is left for the pieces: the update changes
  // nothing, or the chunk is frozen, and its values are written.
  bool DoneWhole(const Compute& compute);
  // `master`: of elements [at, end); empty where the trainer lends it.
  void UpdateBlock(uint64_t at, uint64_t end, absl::Span<float> master) const;

  const ChunkUpdate& update_;
  const StateView state_;
  std::byte* const working_;
  UpdateDigests digests_;  // `of_old`, `of_new`: taken by the pieces
  const Segments segments_;
  uint64_t pieces_ = 0;
  std::vector<PieceDigest> old_pieces_, new_pieces_;
};

// A StateUpdate with all its pieces.
void UpdateState(const ChunkUpdate& update, const StateView& state, std::byte* working, const Compute& compute,
                 UpdateDigests* digests);

// The kernel's arguments for `n` elements of `segment`, from element `at` of the chunk on; the gradient is in the
// host's memory.
// `master`: the element's.
kernels::UpdateSpan SpanOf(const ChunkUpdate& update, const ChunkUpdate::SegmentUpdate& segment, const StateView& state,
                           float* master, std::byte* working, uint64_t at, uint64_t n);
// The update's random key for elements from `at` of the chunk on.
kernels::RandomKey RandomAt(const ChunkUpdate& update, uint64_t at);

}  // namespace ballast::storage
