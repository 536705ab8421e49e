// The functions of kernels.h and optimizer.h for spans in HBM: the same bits as on any CPU. Compiled only where nvcc is
// found.
//
// All pointers are device pointers, 16-byte aligned (scales and norms: their own size); spans must not overlap. Calls
// enqueue on `stream` and return. Dtypes as in kernels.h. Errors: INTERNAL with CUDA's text.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/norm_tree.h"
#include "ballast/kernels/optimizer.h"

struct CUstream_st;  // cudaStream_t, without CUDA's headers

namespace ballast::kernels::cuda {

// One of the spans that are updated by one optimizer, like a chunk's tensors.
struct UpdatePart {
  Coefficients coefficients;
  RandomKey key;
  UpdateSpan span;
};
// Spans of one call must not overlap each other. Neighbours in `parts` share launches, up to kUpdatePartsMax each, as
// long as their coefficients ask for the same loop. Returns the number of launches.
absl::StatusOr<uint64_t> Update(const OptimizerSpec& spec, absl::Span<const UpdatePart> parts, CUstream_st* stream);
// One span, in one launch.
inline absl::Status Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key,
                           const UpdateSpan& span, CUstream_st* stream) {
  const UpdatePart part{.coefficients = c, .key = key, .span = span};
  return Update(spec, {&part, 1}, stream).status();
}

// The parameters of a launch, in the 4 KiB that every GPU takes.
inline constexpr unsigned kUpdatePartsMax = 24;
struct UpdateTable {
  Dtype gradient, working;
  // Where each part ends, in blocks of 256 elements, counted over all parts; behind the last part alike.
  uint32_t ends[kUpdatePartsMax];
  UpdatePart parts[kUpdatePartsMax];
};
static_assert(sizeof(UpdateTable) <= 4096);

struct DeviceNorm {
  double squared_norm;
  uint32_t finite;
};
// Bytes of scratch memory: a double per leaf of the norm.
constexpr uint64_t NormScratchBytes(uint64_t n) {
  return (n + kNormLeafElements - 1) / kNormLeafElements * sizeof(double);
}
absl::Status SquaredNorm(Dtype dtype, const std::byte* gradient, uint64_t n, double* scratch, DeviceNorm* result,
                         CUstream_st* stream);

absl::Status FromF32(const float* from, Dtype dtype, std::byte* to, uint64_t n, CUstream_st* stream);
absl::Status ToF32(Dtype dtype, const std::byte* from, float* to, uint64_t n, CUstream_st* stream);
absl::Status AddInto(Dtype dtype, const std::byte* addend, float* sum, uint64_t n, CUstream_st* stream);
absl::Status Quantize(QuantFormat format, Dtype dtype, const std::byte* x, uint64_t n, std::byte* quantized,
                      float* scales, CUstream_st* stream);
absl::Status Dequantize(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                        std::byte* x, CUstream_st* stream);

}  // namespace ballast::kernels::cuda
