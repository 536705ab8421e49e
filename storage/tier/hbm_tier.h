// GPU memory. State that lives here is updated here: only gradients and working copies cross the bus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

class HbmTier;

// Zeroed device memory, with its share of the budget.
class HbmBlock {
 public:
  HbmBlock() = default;
  HbmBlock(HbmTier* tier, std::byte* data, BudgetLease lease) : tier_(tier), data_(data), lease_(std::move(lease)) {}
  HbmBlock(HbmBlock&& other) noexcept { *this = std::move(other); }
  HbmBlock& operator=(HbmBlock&& other) noexcept;
  ~HbmBlock() { Release(); }
  std::byte* data() const { return data_; }  // a device pointer

 private:
  void Release();
  HbmTier* tier_ = nullptr;
  std::byte* data_ = nullptr;
  BudgetLease lease_;
};

// Where a kernel leaves the working parameters: in device memory, or through it in the host's.
struct HbmWorking {
  std::byte* device = nullptr;
  std::byte* host = nullptr;  // used if `device` is null
};

// Threads: any; one call's work is on the device at a time. Calls return when the work is done. Spans of at most
// kHbmSpanElementsMax. Errors: INTERNAL (IO) with CUDA's text.
class HbmTier {
 public:
  virtual ~HbmTier() = default;
  virtual absl::StatusOr<HbmBlock> Allocate(uint64_t bytes, absl::string_view what) = 0;
  virtual absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) = 0;
  virtual absl::Status CopyOut(const std::byte* device, absl::Span<std::byte> host) = 0;
  // kernels::Update on device pointers, but for span.gradient, which the host holds, and span.working, which is not
  // read.
  virtual absl::Status Update(const kernels::OptimizerSpec& optimizer, const kernels::Coefficients& coefficients,
                              const kernels::RandomKey& random, const kernels::UpdateSpan& span,
                              HbmWorking working) = 0;
  virtual absl::Status Round(const float* master, uint64_t elements, kernels::Dtype dtype, HbmWorking working) = 0;

 private:
  friend class HbmBlock;
  virtual void Free(std::byte* data) = 0;
};

// Of the scratch memory for a gradient and a working copy: the largest chunk.
inline constexpr uint64_t kHbmSpanElementsMax = uint64_t{1} << 20;
inline constexpr uint64_t kHbmScratchBytes = 2 * kHbmSpanElementsMax * sizeof(float);  // the widest dtype

// Takes kHbmScratchBytes of the budget. INVALID_ARGUMENT (BAD_CONFIG) if this build or this machine has no such
// GPU; RESOURCE_EXHAUSTED (BUDGET).
absl::StatusOr<std::unique_ptr<HbmTier>> OpenHbmTier(int device, Ledger* ledger);

}  // namespace ballast::storage
