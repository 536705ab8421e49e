// Plain multiplications and additions below are not contracted (-fmad=false); every rounding that matters is spelled
// out.
#include <cuda_runtime.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/cuda/cuda_kernels.h"

namespace ballast::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kLeafElements = 256;
constexpr unsigned kLanes = 8;
// Enough blocks for any GPU; threads stride over what is left.
constexpr uint64_t kBlocksMax = 4096;

unsigned Blocks(uint64_t threads) {
  return static_cast<unsigned>(std::min<uint64_t>((threads + kThreads - 1) / kThreads, kBlocksMax));
}

absl::Status LaunchStatus(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("launch of ", kernel, " failed: ", cudaGetErrorString(error)));
}

// Eight threads a leaf, one per lane.
__global__ void LeafKernel(const bf16* gradient, uint64_t n, double* leaves, uint64_t leaf_count) {
  const unsigned lane = threadIdx.x % kLanes;
  const uint64_t stride = uint64_t{gridDim.x} * (blockDim.x / kLanes);
  // All threads of a warp go round equally often, as shuffles need.
  const uint64_t first = uint64_t{blockIdx.x} * (blockDim.x / kLanes);
  for (uint64_t base = first; base < leaf_count; base += stride) {
    const uint64_t leaf = base + threadIdx.x / kLanes;
    double sum = 0;
    if (leaf < leaf_count) {
      const uint64_t begin = leaf * kLeafElements;
      const uint64_t end = begin + kLeafElements < n ? begin + kLeafElements : n;
      for (uint64_t i = begin + lane; i < end; i += kLanes) {
        const double x = FromBf16(gradient[i]);
        sum = __dadd_rn(sum, __dmul_rn(x, x));
      }
    }
    for (unsigned distance = 1; distance < kLanes; distance *= 2) {
      sum = __dadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    }
    if (lane == 0 && leaf < leaf_count) leaves[leaf] = sum;
  }
}

// One block. Level by level a last node without a sibling moves up as it is, which is the CPU's tree.
__global__ void TreeKernel(double* leaves, uint64_t leaf_count, DeviceNorm* result) {
  for (uint64_t width = 1; width < leaf_count; width *= 2) {
    for (uint64_t i = threadIdx.x * 2 * width; i + width < leaf_count; i += blockDim.x * 2 * width) {
      leaves[i] = __dadd_rn(leaves[i], leaves[i + width]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const double total = leaf_count == 0 ? 0 : leaves[0];
    result->finite = isfinite(total) ? 1 : 0;
    result->squared_norm = isfinite(total) ? total : 0;
  }
}

__global__ void RoundKernel(const float* from, bf16* to, uint64_t n) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) to[i] = ToBf16(from[i]);
}

}  // namespace

absl::Status SquaredNorm(const bf16* gradient, uint64_t n, double* leaves, DeviceNorm* result, CUstream_st* stream) {
  const uint64_t leaf_count = (n + kLeafElements - 1) / kLeafElements;
  if (leaf_count > 0) {
    LeafKernel<<<Blocks(leaf_count * kLanes), kThreads, 0, stream>>>(gradient, n, leaves, leaf_count);
    if (absl::Status status = LaunchStatus("SquaredNorm's leaves"); !status.ok()) return status;
  }
  constexpr unsigned kTreeThreads = 1024;
  TreeKernel<<<1, kTreeThreads, 0, stream>>>(leaves, leaf_count, result);
  return LaunchStatus("SquaredNorm's tree");
}

absl::Status Bf16FromF32(const float* from, bf16* to, uint64_t n, CUstream_st* stream) {
  if (n == 0) return absl::OkStatus();
  RoundKernel<<<Blocks(n), kThreads, 0, stream>>>(from, to, n);
  return LaunchStatus("Bf16FromF32");
}

}  // namespace ballast::kernels::cuda
