// The functions of kernels.h and optimizer.h for spans in HBM: the same bits as on any CPU. Compiled only where nvcc is
// found.
//
// All pointers are device pointers, 16-byte aligned (scales and norms: their own size); spans must not overlap. Calls
// enqueue on `stream` and return. Dtypes as in kernels.h. Errors: INTERNAL with CUDA's text.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/norm_tree.h"
#include "ballast/kernels/optimizer.h"

struct CUstream_st;  // cudaStream_t, without CUDA's headers

namespace ballast::kernels::cuda {

absl::Status Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span,
                    CUstream_st* stream);

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
