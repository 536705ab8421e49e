// What has been pushed to one chunk for the step in flight: the gradient at its place in one buffer, value slices, and
// the norms of the segments that are complete. Of a *logged* chunk: a slice's bytes are here only until the gradient
// log has them, then their place in it; but a gradient that several ranks have parts of stays, since norms need all
// parts.
//
// Bytes are copied and norms computed outside the job's lock. Until both are done, nobody else may touch the same
// elements: Busy() tells whom to make wait.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/lent_memory.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/slabs.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// DRAM for slices of one job. What its epoch reserved is there for sure; more is taken from the tier while needed.
// Large buffers that come back are kept for the next, within what is reserved. Beside a GPU the reserved memory is
// page-locked slabs, out of which buffers are cut: a GPU copies from and to others at half the speed. Threads: any.
class ProvisionalMemory {
 public:
  // Borrows `tiers`. The destructor returns what is reserved.
  explicit ProvisionalMemory(storage::Tiers* tiers) : tiers_(tiers) {}
  ~ProvisionalMemory();

  // RESOURCE_EXHAUSTED (BUDGET).
  absl::Status Reserve(uint64_t bytes);
  void Unreserve(uint64_t bytes);
  uint64_t reserved_bytes() const;
  // Is so much of it free?
  bool Fits(uint64_t bytes) const;

  // Aligned to 4096 bytes, so that the log can write it from where it is, and in huge pages where it is large, which
  // makes that cheap; uninitialised. Returns its bytes when destroyed.
  class Buffer {
   public:
    // `cut`: of the slabs, or empty; `pages`: empty, or as large.
    Buffer(std::shared_ptr<ProvisionalMemory> memory, uint64_t bytes, absl::Span<std::byte> cut, storage::Arena pages);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    std::byte* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<ProvisionalMemory> memory_;
    uint64_t bytes_;
    absl::Span<std::byte> cut_;
    storage::Arena pages_;
    std::byte* data_;
  };
  static absl::StatusOr<std::shared_ptr<Buffer>> Allocate(const std::shared_ptr<ProvisionalMemory>& memory,
                                                          uint64_t bytes);

 private:
  // `kept`: pages of as many bytes, if there are some.
  absl::Status Acquire(uint64_t bytes, storage::Arena* kept);
  void Release(uint64_t bytes, storage::Arena pages);

  storage::Tiers* const tiers_;
  storage::Slabs slabs_;  // beside a GPU: what is reserved
  mutable absl::Mutex mu_;
  uint64_t reserved_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t extra_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // taken beyond the reservation
  std::vector<storage::Arena> kept_ ABSL_GUARDED_BY(mu_);
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // with the used ones no more than is reserved
};

// Threads: the job's lock, except where said.
class Intake {
 public:
  Intake(std::shared_ptr<ProvisionalMemory> memory, uint64_t elements, kernels::Dtype gradient, bool logged)
      : memory_(std::move(memory)), elements_(elements), dtype_(gradient), logged_(logged) {}

  // A new epoch: everything held is void; these are the chunk's segments and slices from now on.
  void Reset(const model::Chunk& chunk, const model::EpochPlan& plan);
  // The step is decided: its slices belong to the update now.
  void Clear();
  // Gives back the gradient's memory if no slice is in it; an update that has it keeps it until its end.
  void ReleaseIdle();

  // Do slices of this kind leave their memory once the log has them?
  bool Logs(v1::SliceKind kind) const;
  // Memory that BeginReceive of a slice will take.
  uint64_t BufferBytes(uint32_t slice, v1::SliceKind kind) const;

  // Some of [range) (in the chunk) is being copied, or written to the log, or norms are being computed.
  bool Busy(model::Range range) const;

  // One copy in progress. `generation` tells whether an epoch or step went by meanwhile.
  struct Receipt {
    size_t slice = 0;  // position among the chunk's slices
    model::Range range;
    v1::SliceKind kind = v1::SLICE_KIND_GRADIENT;
    uint64_t attempt = 0;
    uint64_t generation = 0;
    bool logged = false;  // it leaves the buffer once the log has it
    std::shared_ptr<ProvisionalMemory::Buffer> buffer;
    uint64_t buffer_begin = 0;  // of a gradient: the element of the chunk that the buffer begins with
    std::byte* to = nullptr;
    // Of a value slice, from its start: what belongs to tensors. Padding may hold anything.
    std::vector<model::Range> tensors;
  };
  // REQUIRES: !Busy(range). `slice`: index into the plan's slices. RESOURCE_EXHAUSTED (BUDGET).
  absl::StatusOr<Receipt> BeginReceive(uint32_t slice, v1::SliceKind kind, uint64_t attempt);
  struct Completed {
    size_t segment = 0;
    model::Range range;  // in the chunk
    kernels::NormResult norm;
  };
  // Returns the segments that this slice completed: if any, ComputeNorms, then StoreNorms.
  std::vector<Completed> EndReceive(const Receipt& receipt, bool ok);
  // As EndReceive of what a log held: norms wait until somebody asks for them, but not those of a logged gradient.
  void EndRestore(const Receipt& receipt, const storage::PayloadPlace& place);
  // What EndReceive held was refused after all.
  void Void(const Receipt& receipt);
  // Until Written the elements of a gradient slice must not change: the log writes them from where they are.
  void BeginLogging(const Receipt& receipt);
  // `place`: where the log has the slice; null if it never will.
  void Written(const Receipt& receipt, const storage::PayloadPlace* place);
  // Of a decided step that is replayed: the slice is in the log, whole or not. REQUIRES: a value slice of a logged
  // chunk, or HasOneSlice.
  void HoldPlace(uint32_t slice, v1::SliceKind kind, uint64_t attempt, const storage::PayloadPlace& place);
  bool HasOneSlice() const { return slots_.size() == 1; }

  // Slices that the trainer lends (lending.cc): held, but the bytes are nowhere here, and the caller computes the
  // norms, or checks the values.
  void HoldLent(uint32_t slice, v1::SliceKind kind, uint64_t attempt);
  // Until then those count 0. `generation`: when the slices were held; later ones have nothing to do with it.
  void StoreLentNorm(size_t segment, uint64_t generation, const kernels::NormResult& norm);
  uint64_t generation() const { return generation_; }
  bool lent(v1::SliceKind kind) const;
  // The trainer takes its memory back: they are not held any more / or copied from it.
  void VoidLent();
  absl::Status CopyLent(const model::Chunk& chunk, const LentMemory& lent);

  // Outside the lock, between the two. INVALID_ARGUMENT (BAD_REQUEST) if an element of a value slice is not finite: it
  // would be in the state for ever, where an infinite gradient only skips a step. `begin`: of the slice, in its unit.
  static absl::Status CheckFinite(const Receipt& receipt, uint32_t unit, uint64_t begin);
  // Outside the lock: Busy() keeps others from the segments meanwhile.
  void ComputeNorms(const Receipt& receipt, std::vector<Completed>* completed) const;
  void StoreNorms(const Receipt& receipt, const std::vector<Completed>& completed);

  // Are all slices held, in exactly this attempt, that such a step needs of the chunk?
  bool Holds(const v1::StepHeader& header, uint64_t attempt) const;
  // Norms of the segments of present tensors; cached, or computed now.
  v1::ChunkNorm Norm(absl::string_view gradient_presence);

  using Buffers = std::vector<std::shared_ptr<ProvisionalMemory::Buffer>>;
  // Puts value slices of `attempt`, cut to the tensors of `presence`, into `update`, but for those that are lent;
  // `keep`: what its spans borrow from.
  void TakeValues(absl::string_view presence, uint64_t attempt, storage::ChunkUpdate* update, Buffers* keep) const;
  // The same of the gradient.
  void TakeGradient(storage::ChunkUpdate* update, Buffers* keep) const;

 private:
  struct Held {
    std::optional<uint64_t> attempt;
    std::shared_ptr<ProvisionalMemory::Buffer> buffer;  // its own, if it has one
    std::optional<storage::PayloadPlace> place;         // in the log, in the buffer's stead
    bool lent = false;                                  // in the trainer's memory, in any buffer's stead
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
  // `gradient`: its element `begin` of the chunk and those behind.
  kernels::NormResult NormOf(const std::byte* gradient, uint64_t begin, model::Range range) const;
  uint64_t element_bytes() const { return kernels::ElementBytes(dtype_); }

  const std::shared_ptr<ProvisionalMemory> memory_;
  const uint64_t elements_;
  const kernels::Dtype dtype_;
  const bool logged_;
  uint64_t generation_ = 0;
  uint64_t chunk_ = 0;
  std::vector<model::Segment> segments_;
  std::vector<std::optional<kernels::NormResult>> norms_;  // per segment
  std::vector<Slot> slots_;
  std::shared_ptr<ProvisionalMemory::Buffer> gradient_;
  std::vector<model::Range> receiving_;
  std::vector<model::Range> logging_;
  int norming_ = 0;
};

}  // namespace ballast::services
