// The slices pushed to a chunk for the step in flight: the gradient at its place in a single buffer, value slices, and
// the norms of complete segments. A *logged* chunk keeps a slice's bytes only until the gradient log has them, then
// their place in the log. A gradient that comes in several slices stays in memory all the same, since norms need all
// parts.
//
// Bytes are copied and norms computed outside the job's lock. Until both are done, nobody else may touch the same
// elements; Busy() tells which pushes must wait.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/slices/lent_memory.h"
#include "ballast/services/slices/slice_memory.h"
#include "ballast/storage/chunk/chunk_update.h"

namespace ballast::services {

// Threads: under the job's lock, unless a method says otherwise.
class Intake {
 public:
  // `values`: the dtype in which the chunk keeps values. A value that would be infinite there is not taken.
  Intake(std::shared_ptr<SliceMemory> memory, uint64_t elements, kernels::Dtype gradient, bool logged,
         kernels::Dtype values = kernels::Dtype::kF32);

  // Begins an epoch: forgets all slices, and takes the chunk's segments and slices from `chunk` and `plan`.
  void Reset(const model::Chunk& chunk, const model::EpochPlan& plan);
  // Forgets the slices of a decided step, which the update has taken over.
  void Clear();
  // Gives back the gradient's buffer if no slice is in it; an update that took the buffer keeps it until its end.
  void ReleaseIdle();

  // Do slices of this kind leave memory once the log has them?
  bool Logs(v1::SliceKind kind) const;
  // Bytes that BeginReceive allocates for a slice.
  uint64_t BufferBytes(uint32_t slice, v1::SliceKind kind) const;

  // Is any of `range` (in the chunk) being copied or written to the log, or are norms being computed?
  bool Busy(model::Range range) const;

  // A copy in progress. `generation` tells whether an epoch or step ended meanwhile.
  struct Receipt {
    size_t slice = 0;  // position among the chunk's slices
    model::Range range;
    v1::SliceKind kind = v1::SLICE_KIND_GRADIENT;
    uint64_t attempt = 0;
    uint64_t generation = 0;
    bool logged = false;  // the slice leaves its buffer once the log has it
    std::shared_ptr<SliceMemory::Buffer> buffer;
    uint64_t buffer_begin = 0;  // for a gradient: the element of the chunk at which the buffer begins
    std::byte* to = nullptr;
    // The parts of a value slice that belong to tensors, from the slice's start. Padding may hold anything.
    std::vector<model::Range> tensors;
  };
  // REQUIRES: !Busy(range). `slice`: index into the plan's slices. RESOURCE_EXHAUSTED (BUDGET).
  absl::StatusOr<Receipt> BeginReceive(uint32_t slice, v1::SliceKind kind, uint64_t attempt);
  struct Completed {
    size_t segment = 0;
    model::Range range;  // in the chunk
    kernels::NormResult norm;
  };
  // Returns the segments that this slice completed. If there are any, call ComputeNorms, then StoreNorms.
  std::vector<Completed> EndReceive(const Receipt& receipt, bool ok);
  // As EndReceive, for a slice read back from a log. Norms are computed at the first question for them, but those of a
  // logged gradient at once, since its buffer goes.
  void EndRestore(const Receipt& receipt, const storage::PayloadPlace& place);
  // Drops a slice that EndReceive took: the push was refused after all.
  void Void(const Receipt& receipt);
  // Keeps the elements of a gradient slice busy until Written: the log writes them from where they are.
  void BeginLogging(const Receipt& receipt);
  // `place`: where the log has the slice; null if the log never will.
  void Written(const Receipt& receipt, const storage::PayloadPlace* place);
  // Replaying a decided step: takes a slice by its place in the log, without checking its bytes. REQUIRES: a value
  // slice of a logged chunk, or HasOneSlice.
  void HoldPlace(uint32_t slice, v1::SliceKind kind, uint64_t attempt, const storage::PayloadPlace& place);
  bool HasOneSlice() const { return slots_.size() == 1; }

  // Takes a slice that the trainer lends (requests/loans.cc). Its bytes stay with the trainer; the caller computes the
  // norms, or checks the values.
  void HoldLent(uint32_t slice, v1::SliceKind kind, uint64_t attempt);
  // Until this call a lent segment's norm counts as 0. `generation`: as when the slices were taken; a call for an
  // earlier generation does nothing.
  void StoreLentNorm(size_t segment, uint64_t generation, const kernels::NormResult& norm);
  uint64_t generation() const { return generation_; }
  bool lent(v1::SliceKind kind) const;
  // For a trainer that takes its memory back: VoidLent forgets the lent slices, CopyLent copies them into own buffers.
  void VoidLent();
  absl::Status CopyLent(const model::Chunk& chunk, const LentMemory& lent);

  // Without the lock, between BeginReceive and EndReceive. The first element of a value slice, from its start, that is
  // not finite where the chunk keeps it: such an element would stay in the state for ever, whereas an infinite gradient
  // only skips a step. None: all are.
  std::optional<uint64_t> FindNotFinite(const Receipt& receipt) const;
  // Without the lock: Busy() keeps others away from the segments meanwhile.
  void ComputeNorms(const Receipt& receipt, std::vector<Completed>* completed) const;
  void StoreNorms(const Receipt& receipt, const std::vector<Completed>& completed);

  // Does the intake hold, from exactly this attempt, all slices of the chunk that the step needs?
  bool Holds(const v1::StepHeader& header, uint64_t attempt) const;
  // Norms of the segments of present tensors; cached, or computed now.
  v1::ChunkNorm Norm(absl::string_view gradient_presence);

  using Buffers = std::vector<std::shared_ptr<SliceMemory::Buffer>>;
  // Puts value slices of `attempt`, cut to the tensors of `presence`, into `update`; lent slices are left out. `keep`:
  // receives the buffers that the update's spans borrow from.
  void TakeValues(absl::string_view presence, uint64_t attempt, storage::ChunkUpdate* update, Buffers* keep) const;
  // Likewise for the gradient.
  void TakeGradient(storage::ChunkUpdate* update, Buffers* keep) const;

 private:
  struct Held {
    std::optional<uint64_t> attempt;
    std::shared_ptr<SliceMemory::Buffer> buffer;  // the slice's own, if any
    std::optional<storage::PayloadPlace> place;   // in the log, instead of a buffer
    bool lent = false;                            // in the trainer's memory, instead of any buffer
  };
  struct Slot {
    uint32_t slice = 0;  // index into the plan's slices
    model::Range range;  // in the chunk
    Held gradient;
    Held value;
    Held& held(v1::SliceKind kind) { return kind == v1::SLICE_KIND_VALUE ? value : gradient; }
    const Held& held(v1::SliceKind kind) const { return kind == v1::SLICE_KIND_VALUE ? value : gradient; }
  };
  std::vector<Slot>::const_iterator FindSlot(uint32_t slice) const;
  void Hold(const Receipt& receipt);
  std::vector<Completed> CompletedBy(const Receipt& receipt) const;
  bool Complete(const model::Segment& segment, uint64_t attempt) const;
  // `gradient`: begins at element `begin` of the chunk.
  kernels::NormResult NormOf(const std::byte* gradient, uint64_t begin, model::Range range) const;
  uint64_t element_bytes() const { return kernels::ElementBytes(dtype_); }

  const std::shared_ptr<SliceMemory> memory_;
  const uint64_t elements_;
  const kernels::Dtype dtype_;
  const bool logged_;
  const float value_max_;
  uint64_t generation_ = 0;
  uint64_t chunk_ = 0;
  std::vector<model::Segment> segments_;
  std::vector<std::optional<kernels::NormResult>> norms_;  // per segment
  std::vector<Slot> slots_;
  std::shared_ptr<SliceMemory::Buffer> gradient_;
  std::vector<model::Range> receiving_;
  std::vector<model::Range> logging_;
  int norming_ = 0;
};

}  // namespace ballast::services
