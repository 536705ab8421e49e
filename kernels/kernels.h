// The numeric kernels besides the optimizers (optimizer.h): functions over spans, no I/O, no gRPC, no allocation.
//
// Bit-exact everywhere: every CPU path (no vectors, AVX2, AVX-512; Highway picks one at run time) and CUDA give the
// same bits. Hence explicit FMA, IEEE divide and square root, no contraction, integer rounding (float_formats.h), and
// fp64 norms over a fixed tree. A NaN that a sum or Dequantize stores as fp32 is always 0x7fc00000. Threads: any, in
// any floating-point mode (ieee_mode.h); all functions are pure. Alignment: the element's own, 64 bytes is fastest.
// Spans must not overlap, and hold equal counts.
//
// Typed by Dtype where several are taken: `from` and `to` then hold BytesOf(dtype, n). A dtype that a function does not
// list ends the process. On GPUs: cuda/cuda_kernels.h has all of them but CRC32C.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

// Finite check and fp64 squared norm in one read; gradient: kBf16, kF16 or kF32. Leaves have 4096 elements from the
// span's start. Each leaf is summed in fp64 in 32 interleaved lanes (element i into lane i mod 32; lanes added
// pairwise, neighbours first). Leaves are added by a binary tree over the leaf index (the left child of n leaves takes
// the largest power of two below n).
struct NormResult {
  double squared_norm = 0;
  bool finite = true;  // when false, squared_norm is 0
};
NormResult SquaredNorm(Dtype dtype, const std::byte* gradient, uint64_t n);
NormResult SquaredNorm(absl::Span<const bf16> gradient);

// FromF32 rounds to nearest even, as in float_formats.h; ToF32 widens exactly. Dtype: any.
// kE4m3Blocks: scale = largest magnitude of the block times fp32(1 / 448); code = e4m3(x times fp32(1 / scale)), which
// never overflows; value = code times scale, rounded once to fp32. |x - value| <= (1 + 2^-13) x the larger of |x| / 16
// and scale / 1024. A block with Inf or NaN comes back as NaN; a block whose scale would be below 2^-126 comes
// back as zeros. FromF32 writes the last block whole, as if zeros followed.
void FromF32(absl::Span<const float> from, Dtype dtype, std::byte* to);
void ToF32(Dtype dtype, const std::byte* from, absl::Span<float> to);
void Bf16FromF32(absl::Span<const float> from, absl::Span<bf16> to);
void F32FromBf16(absl::Span<const bf16> from, absl::Span<float> to);

// An fp32 as its bf16, which FromF32 rounds, and the rest: the lower 16 bits, and a carry, which says that rounding
// added to the upper 16 (1, or the quiet bit of a NaN). JoinF32 gives every fp32 back, to the bit. Carries are bits of
// a bitmap, element 0 the lowest of the first byte; the last byte's unused bits are zero. from, to, rounded, low: n
// elements; carries: CarryBytes(n).
constexpr uint64_t CarryBytes(uint64_t n) { return (n + 7) / 8; }
void SplitF32(absl::Span<const float> from, uint16_t* low, uint8_t* carries);
void JoinF32(const bf16* rounded, const uint16_t* low, const uint8_t* carries, absl::Span<float> to);

// sum[i] += addend[i], fp32, one rounding each: a node of the gradient tree; accumulation of 16-bit gradients.
void AddInto(absl::Span<const float> addend, absl::Span<float> sum);
void AddInto(Dtype dtype, const std::byte* addend, absl::Span<float> sum);

// Blockwise symmetric integers, as ZeRO++ sends weights and gradients (Wang et al. 2023, sections 3.1 and 3.3). Each
// block of kQuantBlock elements has an fp32 scale = largest magnitude times fp32(1 / Q); q = x times fp32(1 / scale),
// rounded to nearest even, |q| <= Q.
// kInt8: Q = 127, a byte each. kInt4: Q = 7, two to a byte, the even element in the lower half; n rounded up to even.
// Error: |x - value| <= scale / 2 x (1 + 2^-14), plus the rounding of the value to a 16-bit dtype. A block with Inf or
// NaN comes back as NaN; a block whose scale would be below 2^-126 comes back as zeros.
enum class QuantFormat : uint8_t { kInt8, kInt4 };
inline constexpr uint64_t kQuantBlock = 256;
constexpr uint64_t QuantBytes(QuantFormat format, uint64_t n) { return format == QuantFormat::kInt8 ? n : (n + 1) / 2; }
constexpr uint64_t QuantScales(uint64_t n) { return (n + kQuantBlock - 1) / kQuantBlock; }

// x: kF32, kBf16 or kF16; quantized[QuantBytes(n)], scales[QuantScales(n)] written.
void Quantize(QuantFormat format, Dtype dtype, const std::byte* x, uint64_t n, std::byte* quantized, float* scales);
void Dequantize(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                std::byte* x);

// CRC32C (Castagnoli, RFC 3720), `seed` from an earlier call to continue; 0 to start.
uint32_t Crc32c(absl::Span<const std::byte> bytes, uint32_t seed = 0);
// CRC32C of two spans end to end, from the CRC32C of each span (with seed 0) and the size of the second.
uint32_t Crc32cConcat(uint32_t first, uint32_t second, uint64_t second_bytes);
// Copies `from` to to[from.size()] and returns the CRC32C of the copy, which holds even if another process writes to
// `from` meanwhile.
uint32_t CopyCrc32c(absl::Span<const std::byte> from, std::byte* to, uint32_t seed = 0);

// The instruction set chosen by the vector kernels: "AVX3", "AVX2", "EMU128", ...
const char* ActiveIsa();

}  // namespace ballast::kernels
