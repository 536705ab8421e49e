// Norms, conversions, sums and quantizers. Plain multiplications and additions below are not contracted (-fmad=false);
// every rounding that matters is spelled out.
#include <cuda_runtime.h>

#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/elements.cuh"
#include "ballast/kernels/cuda/launch.cuh"
#include "ballast/kernels/norm_tree.h"

namespace ballast::kernels::cuda {
namespace {

constexpr uint64_t kLeafElements = kNormLeafElements;
static_assert(kNormLanes == kWarp && kQuantBlock == kBlock && kLeafElements % kBlock == 0);

unsigned GridOfBlocks(uint64_t n) { return GridOf((n + kBlock - 1) / kBlock * kWarp); }

// ---- norm

// A warp takes a leaf. Lane k of the norm is lane k of the warp: sixteen-byte loads pass their elements to the right
// lanes through shared memory.
__global__ void __launch_bounds__(kThreads)
    LeafKernel(Dtype dtype, const std::byte* gradient, uint64_t n, double* leaves, uint64_t leaf_count) {
  __shared__ float staged[kThreads / kWarp][kBlock];
  const unsigned lane = threadIdx.x % kWarp;
  float* const mine = staged[threadIdx.x / kWarp];
  const uint64_t stride = uint64_t{gridDim.x} * (kThreads / kWarp);
  for (uint64_t leaf = uint64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; leaf < leaf_count;
       leaf += stride) {
    double sum = 0;
    for (uint64_t at = leaf * kLeafElements; at < (leaf + 1) * kLeafElements; at += kBlock) {
      const uint64_t i = at + lane * kEach;
      float x[kEach];
      LoadAs(dtype, gradient, i, i >= n ? 0 : n - i < kEach ? static_cast<unsigned>(n - i) : kEach, x);
      __syncwarp();
#pragma unroll
      for (unsigned k = 0; k < kEach; ++k) mine[lane * kEach + k] = x[k];
      __syncwarp();
#pragma unroll
      for (unsigned k = 0; k < kEach; ++k) {
        const double y = mine[k * kWarp + lane];
        sum = __dadd_rn(sum, __dmul_rn(y, y));
      }
    }
    for (unsigned distance = 1; distance < kWarp; distance *= 2) {
      sum = __dadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    }
    if (lane == 0) leaves[leaf] = sum;
  }
}

// Runs as one block. Level by level, a last node without a sibling moves up unchanged: the CPU's tree.
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

// ---- conversions and sums

__global__ void __launch_bounds__(kThreads)
    ConvertKernel(Dtype from_dtype, const std::byte* from, Dtype to_dtype, std::byte* to, uint64_t n) {
  ForBlocks(n, [&](uint64_t, uint64_t i, unsigned count) {
    float x[kEach];
    LoadAs(from_dtype, from, i, count, x);
    StoreAs(to_dtype, x, to, i, count);
  });
}

__global__ void __launch_bounds__(kThreads) EncodeBlocksKernel(const std::byte* from, std::byte* to, uint64_t n) {
  ForBlocks(n, [&](uint64_t block, uint64_t i, unsigned count) {
    float x[kEach];
    LoadAs(Dtype::kF32, from, i, count, x);
    uint32_t largest = 0;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) largest = max(largest, __float_as_uint(x[k]) & 0x7fffffffu);
    const BlockScale s = WarpScaleOf(largest, 1 / kE4m3Largest);
    // Blocks begin at multiples of four bytes. Lanes without elements write the block's zeros.
    auto* const words = reinterpret_cast<uint32_t*>(E4m3BlockAt(to, block)) + threadIdx.x % kWarp * 2;
    words[0] = E4m3Codes(x, s.inverse);
    words[1] = E4m3Codes(x + 4, s.inverse);
    if (threadIdx.x % kWarp == 0) *E4m3ScaleAt(to, block) = s.scale;
  });
}

__global__ void __launch_bounds__(kThreads) DecodeBlocksKernel(const std::byte* from, std::byte* to, uint64_t n) {
  ForBlocks(n, [&](uint64_t block, uint64_t i, unsigned count) {
    auto* const base = const_cast<std::byte*>(from);
    const float scale = *E4m3ScaleAt(base, block);
    const auto* const words = reinterpret_cast<const uint32_t*>(E4m3BlockAt(base, block)) + threadIdx.x % kWarp * 2;
    float x[kEach];
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      x[k] = OneNan(__fmul_rn(FromE4m3(static_cast<uint8_t>(words[k / 4] >> 8 * (k % 4))), scale));
    }
    StoreAs(Dtype::kF32, x, to, i, count);
  });
}

__global__ void __launch_bounds__(kThreads)
    AddKernel(Dtype dtype, const std::byte* addend, std::byte* sum, uint64_t n) {
  ForBlocks(n, [&](uint64_t, uint64_t i, unsigned count) {
    float x[kEach], y[kEach];
    LoadAs(dtype, addend, i, count, x);
    LoadAs(Dtype::kF32, sum, i, count, y);
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) y[k] = OneNan(__fadd_rn(y[k], x[k]));
    StoreAs(Dtype::kF32, y, sum, i, count);
  });
}

// ---- quantizers

// A lane's eight elements are four bytes of int4. The upper half of a byte whose element does not exist is 0.
__device__ void StoreNibbles(const uint32_t (&code)[kEach], std::byte* base, uint64_t i, unsigned count) {
  uint32_t word = 0;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) word |= (k < count ? code[k] : 0u) << 4 * k;
  std::byte* const to = base + i / 2;
  if (count == kEach) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
  for (unsigned k = 0; k < count; k += 2) to[k / 2] = static_cast<std::byte>(word >> 4 * k & 0xffu);
}

__device__ void LoadNibbles(const std::byte* base, uint64_t i, unsigned count, uint32_t (&code)[kEach]) {
  const std::byte* const from = base + i / 2;
  uint32_t word = 0;
  if (count == kEach) {
    word = *reinterpret_cast<const uint32_t*>(from);
  } else {
    for (unsigned k = 0; k < count; k += 2) word |= static_cast<uint32_t>(from[k / 2]) << 4 * k;
  }
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) code[k] = word >> 4 * k & 0xfu;
}

__global__ void __launch_bounds__(kThreads) QuantizeKernel(QuantFormat format, Dtype dtype, const std::byte* x,
                                                           uint64_t n, std::byte* quantized, float* scales) {
  const bool is_int8 = format == QuantFormat::kInt8;
  const float inverse_largest = is_int8 ? 1.0f / 127 : 1.0f / 7;
  ForBlocks(n, [&](uint64_t block, uint64_t i, unsigned count) {
    float value[kEach];
    LoadAs(dtype, x, i, count, value);
    uint32_t largest = 0;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      largest = max(largest, k < count ? __float_as_uint(value[k]) & 0x7fffffffu : 0u);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    float scale = __fmul_rn(__uint_as_float(largest), inverse_largest);
    const bool finite = largest < 0x7f800000u, zero = !finite || __float_as_uint(scale) < 0x00800000u;
    if (zero) scale = finite ? 0.0f : __uint_as_float(kNanBits);
    const float inverse = zero ? 0.0f : __fdiv_rn(1.0f, scale);
    uint32_t code[kEach];
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      // Rounded to an integer, even on a tie, in two's complement.
      code[k] = zero ? 0u : __float_as_uint(__fmaf_rn(value[k], inverse, 0x1.8p23f)) & (is_int8 ? 0xffu : 0xfu);
    }
    is_int8 ? StoreRaw<1>(code, quantized, i, count) : StoreNibbles(code, quantized, i, count);
    if (threadIdx.x % kWarp == 0) scales[block] = scale;
  });
}

__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                     std::byte* x) {
  const bool is_int8 = format == QuantFormat::kInt8;
  const int sign = is_int8 ? 0x80 : 0x8;
  ForBlocks(n, [&](uint64_t block, uint64_t i, unsigned count) {
    uint32_t code[kEach];
    is_int8 ? LoadRaw<1>(quantized, i, count, code) : LoadNibbles(quantized, i, count, code);
    const float scale = scales[block];
    float value[kEach];
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      value[k] = OneNan(__fmul_rn(static_cast<float>((static_cast<int>(code[k]) ^ sign) - sign), scale));
    }
    StoreAs(dtype, value, x, i, count);
  });
}

absl::Status Convert(Dtype from_dtype, const std::byte* from, Dtype to_dtype, std::byte* to, uint64_t n,
                     CUstream_st* stream) {
  if (n == 0) return absl::OkStatus();
  if (to_dtype == Dtype::kE4m3Blocks) {
    return Launch("an encoding", EncodeBlocksKernel, GridOfBlocks(n), kThreads, stream, from, to, n);
  }
  if (from_dtype == Dtype::kE4m3Blocks) {
    return Launch("a decoding", DecodeBlocksKernel, GridOfBlocks(n), kThreads, stream, from, to, n);
  }
  return Launch("a conversion", ConvertKernel, GridOfBlocks(n), kThreads, stream, from_dtype, from, to_dtype, to, n);
}

}  // namespace

absl::Status SquaredNorm(Dtype dtype, const std::byte* gradient, uint64_t n, double* scratch, DeviceNorm* result,
                         CUstream_st* stream) {
  const uint64_t leaf_count = (n + kLeafElements - 1) / kLeafElements;
  if (leaf_count > 0) {
    const absl::Status launched = Launch("SquaredNorm's leaves", LeafKernel, GridOf(leaf_count * kWarp), kThreads,
                                         stream, dtype, gradient, n, scratch, leaf_count);
    if (!launched.ok()) return launched;
  }
  constexpr unsigned kTreeThreads = 1024;
  return Launch("SquaredNorm's tree", TreeKernel, 1, kTreeThreads, stream, scratch, leaf_count, result);
}

absl::Status FromF32(const float* from, Dtype dtype, std::byte* to, uint64_t n, CUstream_st* stream) {
  return Convert(Dtype::kF32, reinterpret_cast<const std::byte*>(from), dtype, to, n, stream);
}

absl::Status ToF32(Dtype dtype, const std::byte* from, float* to, uint64_t n, CUstream_st* stream) {
  return Convert(dtype, from, Dtype::kF32, reinterpret_cast<std::byte*>(to), n, stream);
}

absl::Status AddInto(Dtype dtype, const std::byte* addend, float* sum, uint64_t n, CUstream_st* stream) {
  if (n == 0) return absl::OkStatus();
  return Launch("AddInto", AddKernel, GridOfBlocks(n), kThreads, stream, dtype, addend,
                reinterpret_cast<std::byte*>(sum), n);
}

absl::Status Quantize(QuantFormat format, Dtype dtype, const std::byte* x, uint64_t n, std::byte* quantized,
                      float* scales, CUstream_st* stream) {
  if (n == 0) return absl::OkStatus();
  return Launch("Quantize", QuantizeKernel, GridOfBlocks(n), kThreads, stream, format, dtype, x, n, quantized, scales);
}

absl::Status Dequantize(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                        std::byte* x, CUstream_st* stream) {
  if (n == 0) return absl::OkStatus();
  return Launch("Dequantize", DequantizeKernel, GridOfBlocks(n), kThreads, stream, format, quantized, scales, n, dtype,
                x);
}

}  // namespace ballast::kernels::cuda
