// Shared by the GPU's kernels: a warp takes a block of 256 elements, and a lane eight of them. In most kernels these
// are neighbours; an update takes two quads of four. Included by .cu files alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ballast/kernels/float_formats.h"

namespace ballast::kernels::cuda {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
constexpr unsigned kEach = 8;
constexpr uint64_t kBlock = kEach * kWarp;
constexpr uint32_t kNanBits = 0x7fc00000u;

// Enough blocks for any GPU; warps stride over what is left.
inline unsigned GridOf(uint64_t threads) {
  constexpr uint64_t kBlocksMax = 8192;
  return static_cast<unsigned>(std::min<uint64_t>((threads + kThreads - 1) / kThreads, kBlocksMax));
}

__device__ inline float OneNan(float x) { return x != x ? __uint_as_float(kNanBits) : x; }

// Elements i ... i + 7 of an array of kBytes each, `count` of them in the array, as raw bits.
template <unsigned kBytes>
__device__ inline void LoadRaw(const std::byte* base, uint64_t i, unsigned count, uint32_t (&raw)[kEach]) {
  const std::byte* from = base + i * kBytes;
  if (count == kEach) {
    alignas(16) uint32_t words[2 * kBytes];
    if constexpr (kBytes == 1) {
      *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (unsigned w = 0; w < kBytes / 2; ++w) {
        reinterpret_cast<uint4*>(words)[w] = reinterpret_cast<const uint4*>(from)[w];
      }
    }
    constexpr unsigned kPerWord = 4 / kBytes, kBits = 8 * kBytes;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      raw[k] = kBytes == 4 ? words[k] : words[k / kPerWord] >> (k % kPerWord * kBits) & ((1u << (kBits % 32)) - 1);
    }
    return;
  }
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    raw[k] = 0;
    if (k >= count) continue;
    if constexpr (kBytes == 1) raw[k] = reinterpret_cast<const uint8_t*>(from)[k];
    if constexpr (kBytes == 2) raw[k] = reinterpret_cast<const uint16_t*>(from)[k];
    if constexpr (kBytes == 4) raw[k] = reinterpret_cast<const uint32_t*>(from)[k];
  }
}

template <unsigned kBytes>
__device__ inline void StoreRaw(const uint32_t (&raw)[kEach], std::byte* base, uint64_t i, unsigned count) {
  std::byte* to = base + i * kBytes;
  if (count == kEach) {
    constexpr unsigned kPerWord = 4 / kBytes, kBits = 8 * kBytes;
    alignas(16) uint32_t words[2 * kBytes] = {};
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) words[k / kPerWord] |= raw[k] << (k % kPerWord * kBits);
    if constexpr (kBytes == 1) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(words);
    } else {
#pragma unroll
      for (unsigned w = 0; w < kBytes / 2; ++w) {
        reinterpret_cast<uint4*>(to)[w] = reinterpret_cast<const uint4*>(words)[w];
      }
    }
    return;
  }
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 1) reinterpret_cast<uint8_t*>(to)[k] = static_cast<uint8_t>(raw[k]);
    if constexpr (kBytes == 2) reinterpret_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(raw[k]);
    if constexpr (kBytes == 4) reinterpret_cast<uint32_t*>(to)[k] = raw[k];
  }
}

__device__ inline void LoadAs(Dtype dtype, const std::byte* base, uint64_t i, unsigned count, float (&x)[kEach]) {
  uint32_t raw[kEach];
  if (dtype == Dtype::kF32) {
    LoadRaw<4>(base, i, count, raw);
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = __uint_as_float(raw[k]);
    return;
  }
  if (ElementBytes(dtype) == 1) {
    LoadRaw<1>(base, i, count, raw);
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      const auto code = static_cast<uint8_t>(raw[k]);
      x[k] = dtype == Dtype::kE4m3 ? FromE4m3(code) : FromE5m2(code);
    }
    return;
  }
  LoadRaw<2>(base, i, count, raw);
  const bool is_bf16 = dtype == Dtype::kBf16;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    x[k] = is_bf16 ? __uint_as_float(raw[k] << 16) : FromF16(static_cast<uint16_t>(raw[k]));
  }
}

__device__ inline void StoreAs(Dtype dtype, const float (&x)[kEach], std::byte* base, uint64_t i, unsigned count) {
  uint32_t raw[kEach];
  if (dtype == Dtype::kF32) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) raw[k] = __float_as_uint(x[k]);
    StoreRaw<4>(raw, base, i, count);
    return;
  }
  if (ElementBytes(dtype) == 1) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) raw[k] = dtype == Dtype::kE4m3 ? ToE4m3(x[k]) : ToE5m2(x[k]);
    StoreRaw<1>(raw, base, i, count);
    return;
  }
  const bool is_bf16 = dtype == Dtype::kBf16;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) raw[k] = is_bf16 ? ToBf16(x[k]) : ToF16(x[k]);
  StoreRaw<2>(raw, base, i, count);
}

// The scale of a block, for codes up to `code_largest`, from the largest bits of a magnitude that any lane of the warp
// has; and its inverse. Inverse 0: the block is stored as zeros.
struct BlockScale {
  float scale, inverse;
};
__device__ inline BlockScale WarpScaleOf(uint32_t largest, float inverse_of_largest_code) {
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (largest >= 0x7f800000u) return {__uint_as_float(kNanBits), 0};
  const float scale = __fmul_rn(__uint_as_float(largest), inverse_of_largest_code);
  if (__float_as_uint(scale) < 0x00800000u) return {0, 0};
  return {scale, __fdiv_rn(1.0f, scale)};
}

// The place of a block of kE4m3Blocks, and of its scale.
__device__ inline std::byte* E4m3BlockAt(std::byte* base, uint64_t block) { return base + block * kE4m3BlockBytes; }
__device__ inline float* E4m3ScaleAt(std::byte* base, uint64_t block) {
  return reinterpret_cast<float*>(E4m3BlockAt(base, block) + kE4m3Block);
}

// Four codes, the first in the lowest byte.
__device__ inline uint32_t E4m3Codes(const float* x, float inverse) {
  uint32_t word = 0;
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    word |= (inverse == 0 ? 0u : uint32_t{ToE4m3(__fmul_rn(x[k], inverse))}) << 8 * k;
  }
  return word;
}

// A quad: four neighbouring elements of kBytes each, as they lie in memory.
constexpr unsigned kQuad = 4;
template <unsigned kBytes>
struct RawQuad {
  uint32_t word[kBytes];
};
template <unsigned kBytes>
struct QuadVector;
template <>
struct QuadVector<1> {
  using Type = uint32_t;
};
template <>
struct QuadVector<2> {
  using Type = uint2;
};
template <>
struct QuadVector<4> {
  using Type = uint4;
};

// The quad at element i, of whose elements the array has the first `count`; the others are 0.
template <unsigned kBytes>
__device__ inline RawQuad<kBytes> LoadQuad(const std::byte* base, uint64_t i, unsigned count) {
  using Vector = typename QuadVector<kBytes>::Type;
  const std::byte* const from = base + i * kBytes;
  alignas(16) RawQuad<kBytes> raw = {};
  if (count == kQuad) {
    *reinterpret_cast<Vector*>(raw.word) = *reinterpret_cast<const Vector*>(from);
    return raw;
  }
#pragma unroll
  for (unsigned k = 0; k < kQuad; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 1) raw.word[0] |= uint32_t{reinterpret_cast<const uint8_t*>(from)[k]} << 8 * k;
    if constexpr (kBytes == 2) raw.word[k / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(from)[k]} << 16 * (k % 2);
    if constexpr (kBytes == 4) raw.word[k] = reinterpret_cast<const uint32_t*>(from)[k];
  }
  return raw;
}

template <unsigned kBytes>
__device__ inline void StoreQuad(const RawQuad<kBytes>& quad, std::byte* base, uint64_t i, unsigned count) {
  using Vector = typename QuadVector<kBytes>::Type;
  std::byte* const to = base + i * kBytes;
  if (count == kQuad) {
    alignas(16) const RawQuad<kBytes> raw = quad;
    *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(raw.word);
    return;
  }
#pragma unroll
  for (unsigned k = 0; k < kQuad; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 1) reinterpret_cast<uint8_t*>(to)[k] = static_cast<uint8_t>(quad.word[0] >> 8 * k);
    if constexpr (kBytes == 2) {
      reinterpret_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(quad.word[k / 2] >> 16 * (k % 2));
    }
    if constexpr (kBytes == 4) reinterpret_cast<uint32_t*>(to)[k] = quad.word[k];
  }
}

// The lane's first element in a block of 256 elements, and how many of its elements `n` has.
__device__ inline uint64_t LaneAt(uint64_t block) { return block * kBlock + threadIdx.x % kWarp * kEach; }
__device__ inline unsigned LaneCount(uint64_t n, uint64_t i) {
  return i >= n ? 0 : n - i < kEach ? static_cast<unsigned>(n - i) : kEach;
}

// body(block, first element of the lane, its elements in `n`) for the lane's part of every block of 256 elements; all
// lanes of a warp together, those without elements too.
template <typename Body>
__device__ inline void ForBlocks(uint64_t n, Body body) {
  const uint64_t blocks = (n + kBlock - 1) / kBlock, stride = uint64_t{gridDim.x} * (kThreads / kWarp);
  const uint64_t first = uint64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (uint64_t block = first; block < blocks; block += stride) {
    const uint64_t i = LaneAt(block);
    body(block, i, LaneCount(n, i));
  }
}

}  // namespace ballast::kernels::cuda
