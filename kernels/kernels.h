// The numeric kernels besides the optimizers (optimizer.h): functions over spans, no I/O, no gRPC, no allocation.
//
// Bit-exact everywhere: every CPU path (scalar, AVX2, AVX-512; Highway picks one at run time) and CUDA give the same
// bits: explicit FMA, IEEE divide and square root, no contraction, integer rounding to bf16, fp64 norms over a fixed
// tree; a NaN that AddInto stores is always 0x7fc00000. Threads: any; all functions are pure. Alignment: any,
// 64 bytes is fastest. Spans must not overlap, and hold equal counts.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

// Finite check and fp64 squared norm in one read. Leaves of 256 elements from the span's start, each summed in fp64 in
// eight interleaved lanes (element i into lane i mod 8; lanes added pairwise), leaves added by a binary tree over leaf
// index (the left child of n leaves takes the largest power of two below n).
struct NormResult {
  double squared_norm = 0;
  bool finite = true;  // when false, squared_norm is 0
};
NormResult SquaredNorm(absl::Span<const bf16> gradient);

// Round to nearest even, and exactly back.
void Bf16FromF32(absl::Span<const float> from, absl::Span<bf16> to);
void F32FromBf16(absl::Span<const bf16> from, absl::Span<float> to);

// sum[i] += addend[i], fp32, one rounding each: a node of the gradient tree.
void AddInto(absl::Span<const float> addend, absl::Span<float> sum);

// CRC32C (Castagnoli, RFC 3720), `seed` from an earlier call to continue; 0 to start.
uint32_t Crc32c(absl::Span<const std::byte> bytes, uint32_t seed = 0);

// The instruction set that the vector kernels chose: "AVX3", "AVX2", "EMU128", ...
const char* ActiveIsa();

}  // namespace ballast::kernels
