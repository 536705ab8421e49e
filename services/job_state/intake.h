// The slices pushed to a chunk for the step in flight: the gradient at its place in a single buffer, value slices, and
// the norms of complete segments. A *logged* chunk keeps a slice's bytes only until the gradient log has them, then
// their place in the log. A gradient that comes in several slices stays in memory all the same, since norms need all
// parts.
//
// Bytes are copied, norms computed and slices written to the log outside the job's lock. Until all that is done, nobody
// else may touch the same elements; LookFor tells which pushes must wait.
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
#include "ballast/services/job_state/lent_memory.h"
#include "ballast/services/job_state/slice_memory.h"
#include "ballast/storage/store/chunk_update.h"

namespace ballast::services {

// Threads: under the job's lock, unless a method says otherwise.
class Intake {
 public:
  // `values`: the dtype in which the chunk keeps values. A value that would be infinite there is not taken.
  Intake(std::shared_ptr<SliceMemory> memory, uint64_t elements, kernels::Dtype gradient, bool logged,
         kernels::Dtype values = kernels::Dtype::kF32);

  // Begins an epoch that keeps no slices: forgets all, and takes the chunk's segments and slices from `chunk` and
  // `plan`.
  void Reset(const model::Chunk& chunk, const model::EpochPlan& plan);
  // Forgets the slices of a decided step, which the update has taken over.
  void Clear();
  // Gives back the gradient's buffer if no slice is in it; an update that took the buffer keeps it until its end.
  void ReleaseIdle();

  // Do slices of this kind leave memory once the log has them?
  bool Logs(v1::SliceKind kind) const;
  // May a slice of this kind stay in the trainer's memory? A gradient may that neither goes to a log nor shares its
  // chunk with another slice.
  bool TakesLent(v1::SliceKind kind) const;
  // What a slice would find if its bytes came now. `slice`: index into the plan's slices.
  struct Outlook {
    bool busy = false;          // its elements are being copied or written to the log, or norms are being computed
    bool logged = false;        // as Logs
    uint64_t buffer_bytes = 0;  // that BeginReceive allocates, unless the slice is lent
  };
  Outlook LookFor(uint32_t slice, v1::SliceKind kind) const;

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
  // The slice's elements are busy until Written, Unlogged or EndRestore. REQUIRES: LookFor(slice, kind) is not busy.
  // RESOURCE_EXHAUSTED (BUDGET). `lent`: has the slice's bytes already. REQUIRES: null, or TakesLent(kind).
  absl::StatusOr<Receipt> BeginReceive(uint32_t slice, v1::SliceKind kind, uint64_t attempt,
                                       std::shared_ptr<SliceMemory::Buffer> lent = nullptr);
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
  // The log, which writes a slice from where its bytes are, needs them no more. `place`: where it has the slice; null
  // if it never will.
  void Written(const Receipt& receipt, const storage::PayloadPlace* place);
  // No log gets the slice. It is dropped if its push was refused after all (not `taken`), or if it should leave memory;
  // otherwise its bytes stay here.
  void Unlogged(const Receipt& receipt, bool taken);
  // Replaying a decided step: takes a slice by its place in the log, without checking its bytes. REQUIRES: a value
  // slice of a logged chunk, or HasOneSlice.
  void HoldPlace(uint32_t slice, v1::SliceKind kind, uint64_t attempt, const storage::PayloadPlace& place);
  bool HasOneSlice() const { return slots_.size() == 1; }

  // Takes a slice that the trainer lends (job/loans.cc). Its bytes stay with the trainer; the caller computes the
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
  // Without the lock: the segments are busy meanwhile, which keeps others away.
  void ComputeNorms(const Receipt& receipt, std::vector<Completed>* completed) const;
  void StoreNorms(const Receipt& receipt, const std::vector<Completed>& completed);

  // Does the intake hold, from exactly this attempt, all slices of the chunk that the step needs?
  bool Holds(const v1::StepHeader& header, uint64_t attempt) const;
  // Norms of the segments of present tensors; cached, or computed now. Of updates that the trainer computed, only
  // whether they are finite.
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
  bool Busy(model::Range range) const;
  uint64_t BufferBytes(const Slot& slot, v1::SliceKind kind) const;
  void Hold(const Receipt& receipt);
  void Free(const Receipt& receipt);
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
  bool norm_counts_ = true;
  std::vector<Slot> slots_;
  std::shared_ptr<SliceMemory::Buffer> gradient_;
  std::vector<model::Range> busy_;  // slices on their way to memory or the log
  int norming_ = 0;
};

}  // namespace ballast::services
