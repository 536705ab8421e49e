// GPU memory. State in HBM is updated in HBM: only gradients and working copies cross the bus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/tier/gpu_counters.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

class HbmTier;

// Work that a GPU has begun. The host memory that the work reads and writes is borrowed until Wait() has returned, so
// the destructor waits too.
class HbmWork {
 public:
  HbmWork() = default;  // nothing to wait for
  HbmWork(HbmTier* tier, void* done) : tier_(tier), done_(done) {}
  HbmWork(HbmWork&& other) noexcept
      : tier_(std::exchange(other.tier_, nullptr)), done_(std::exchange(other.done_, nullptr)) {}
  HbmWork& operator=(HbmWork&& other) noexcept;
  ~HbmWork() { (void)Wait(); }
  // Returns once the work is done; at once when called again. INTERNAL (IO).
  absl::Status Wait();

 private:
  HbmTier* tier_ = nullptr;
  void* done_ = nullptr;  // the tier's own
};

// Zeroed device memory, with its share of the budget.
class HbmBlock {
 public:
  HbmBlock() = default;
  HbmBlock(HbmTier* tier, std::byte* data, BudgetLease lease) : tier_(tier), data_(data), lease_(std::move(lease)) {}
  HbmBlock(HbmBlock&& other) noexcept { *this = std::move(other); }
  HbmBlock& operator=(HbmBlock&& other) noexcept;
  ~HbmBlock() { Release(); }
  std::byte* data() const { return data_; }  // a device pointer
  void Mark(TierPart part) { lease_.Mark(part); }
  void Charge(const std::shared_ptr<Account>& account) { lease_.Charge(account); }

 private:
  void Release();
  HbmTier* tier_ = nullptr;
  std::byte* data_ = nullptr;
  BudgetLease lease_;
};

// Target of a kernel's working parameters: device memory, or host memory by way of device memory.
struct HbmWorking {
  std::byte* device = nullptr;
  std::byte* host = nullptr;  // used if `device` is null
};

// The update of one segment of a chunk.
struct HbmSegment {
  kernels::Coefficients coefficients;
  kernels::RandomKey random;
  // The gradient is in host memory, all other pointers are device pointers; the span's own `working` is not read.
  kernels::UpdateSpan span;
  HbmWorking working;
};

// Work for the GPU, done in the order of queueing. Host memory for the work is borrowed until HbmWork::Wait returns.
class HbmQueue {
 public:
  virtual ~HbmQueue() = default;
  virtual absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) = 0;
  // Updates segments of one chunk. The segments' gradients lie in one piece of host memory, at the same distances as
  // their masters. From the begin of the first segment to the end of the last there are at most kHbmSpanElementsMax
  // elements.
  virtual absl::Status Update(const kernels::OptimizerSpec& optimizer, absl::Span<const HbmSegment> segments) = 0;
  virtual absl::Status Round(const float* master, uint64_t elements, kernels::Dtype dtype, HbmWorking working) = 0;
};

// Threads: any. Copies of pulls and moves do not wait for updates. The driver copies pageable host memory by way of its
// own buffers, at about half the speed of page-locked memory. Errors: INTERNAL (IO) with CUDA's text.
class HbmTier {
 public:
  virtual ~HbmTier() = default;
  // RESOURCE_EXHAUSTED (BUDGET).
  virtual absl::StatusOr<HbmBlock> Allocate(uint64_t bytes, absl::string_view what) = 0;
  // CopyIn and CopyOut return when the copy is done.
  virtual absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) = 0;
  virtual absl::Status CopyOut(const std::byte* device, absl::Span<std::byte> host) = 0;
  // Calls `work`, and returns while the GPU does what `work` queued. If `work` fails, waits for what it queued before
  // the error. Several of these run concurrently, in no order. `work` must not call the tier.
  virtual absl::StatusOr<HbmWork> Start(absl::FunctionRef<absl::Status(HbmQueue& queue)> work) = 0;
  // Start, and Wait.
  absl::Status Run(absl::FunctionRef<absl::Status(HbmQueue& queue)> work);
  const GpuCounters& counters() const { return counters_; }

 protected:
  GpuCounters counters_;

 private:
  friend class HbmBlock;
  friend class HbmWork;
  virtual void Free(std::byte* data) = 0;
  virtual absl::Status Wait(void* done) = 0;  // of HbmWork; once
};

// Elements that the scratch memory for a gradient and a working copy holds: those of the largest chunk.
inline constexpr uint64_t kHbmSpanElementsMax = uint64_t{1} << 20;
// Updates that the GPU runs concurrently: one copies its gradient in, one computes, one copies its working copy
// out, and one is being queued.
inline constexpr uint64_t kHbmLanes = 4;
inline constexpr uint64_t kHbmScratchBytes = kHbmLanes * 2 * kHbmSpanElementsMax * sizeof(float);  // the widest dtype

// Takes kHbmScratchBytes of the budget. INVALID_ARGUMENT (BAD_CONFIG) if this build or this machine has no such
// GPU, or the GPU has no memory pools; RESOURCE_EXHAUSTED (BUDGET).
absl::StatusOr<std::unique_ptr<HbmTier>> OpenHbmTier(int device, Ledger* ledger);

}  // namespace ballast::storage
