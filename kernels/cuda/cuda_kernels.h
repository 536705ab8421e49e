// The kernels of kernels.h for HBM-resident spans: the same bits as on any CPU. Compiled by nvcc, absent without it.
//
// All pointers are device pointers, 16-byte aligned; calls enqueue on `stream` and return. Errors: INTERNAL with CUDA's
// text.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"

struct CUstream_st;  // cudaStream_t, without CUDA's headers

namespace ballast::kernels::cuda {

absl::Status Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span,
                    CUstream_st* stream);

// `leaves`: device scratch of ceil(n / 256) doubles; `result`: device {double squared_norm; uint32 finite}.
struct DeviceNorm {
  double squared_norm;
  uint32_t finite;
};
absl::Status SquaredNorm(const bf16* gradient, uint64_t n, double* leaves, DeviceNorm* result, CUstream_st* stream);
absl::Status Bf16FromF32(const float* from, bf16* to, uint64_t n, CUstream_st* stream);

}  // namespace ballast::kernels::cuda
