// Every instruction set that this processor runs gives the bits of the plain reference.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/tests/instruction_sets.h"
#include "ballast/tests/kernels/optimizer_samples.h"
#include "ballast/tests/kernels/rounding_reference.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

constexpr size_t kSizes[] = {0,  1,  2,  3,  4,  5,   7,   8,   9,    15,   16,   17,
                             31, 33, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4099};

std::vector<float> AnyFloats(std::mt19937_64& random, size_t n, bool finite = false) {
  std::vector<float> x(n);
  for (float& value : x) value = AnyFloat(random, finite);
  return x;
}

// Sizes of pieces with kTuples random floats in all: each of kSizes, then pieces large enough for streaming stores.
std::vector<size_t> Pieces() {
  std::vector<size_t> pieces(std::begin(kSizes), std::end(kSizes));
  for (uint64_t done = 0; done < kTuples; done += pieces.back()) pieces.push_back((size_t{4} << 20) + 77);
  return pieces;
}

// NaN for a block with Inf or NaN; 0 where the block is stored as zeros.
float ReferenceScale(const float* x, size_t n, float largest_code) {
  float largest = 0;
  bool finite = true;
  for (size_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  const float scale = largest * (1 / largest_code);
  if (!finite) return std::bit_cast<float>(0x7fc00000u);
  return scale < std::numeric_limits<float>::min() ? 0 : scale;
}

class ParityTest : public InstructionSetTest {
 protected:
  // Blocks as in training, of any finite value, of any value, and of tiny ones.
  std::vector<std::byte> QuantizeInput(Dtype dtype, size_t n) {
    std::vector<float> wide(n);
    uint64_t kind = 0;
    for (size_t i = 0; i < n; ++i) {
      if (i % kQuantBlock == 0) kind = random_() % 4;
      wide[i] = AnyFloat(random_, kind != 0) * (kind == 2 ? 0x1p-120f : 1.0f);
      if (kind == 3) wide[i] = static_cast<float>(random_() % 65536) / 32768 - 1;
    }
    std::vector<std::byte> x(n * ElementBytes(dtype));
    FromF32(wide, dtype, x.data());
    return x;
  }

  std::mt19937_64 random_{20260101};
};

TEST_P(ParityTest, SquaredNormOfEveryDtype) {
  std::vector<size_t> sizes = Pieces();
  // Around the places that are read in turns: four of at most 64 leaves each.
  for (const size_t leaves : {3, 4, 5, 7, 8, 13, 255, 256, 257, 263}) {
    for (const size_t n : {leaves * 4096 - 1, leaves * 4096, leaves * 4096 + 1}) sizes.push_back(n);
  }
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const size_t n : sizes) {
      std::vector<float> wide = AnyFloats(random_, n, /*finite=*/true);
      std::vector<std::byte> x(n * ElementBytes(dtype));
      for (float& value : wide) {
        if (dtype == Dtype::kF16) value = std::fmod(value, 60000.0f);
        if (dtype == Dtype::kBf16) value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000u);
      }
      FromF32(wide, dtype, x.data());
      ToF32(dtype, x.data(), absl::MakeSpan(wide));
      const NormResult got = SquaredNorm(dtype, x.data(), n);
      ASSERT_TRUE(got.finite);
      ASSERT_EQ(std::bit_cast<uint64_t>(got.squared_norm), std::bit_cast<uint64_t>(ReferenceNorm(wide.data(), n))) << n;
      if (n == 0) continue;
      for (const float bad : {HUGE_VALF, -HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
        const size_t at = random_() % n;
        const float kept = std::exchange(wide[at], bad);
        FromF32(wide, dtype, x.data());
        ASSERT_FALSE(SquaredNorm(dtype, x.data(), n).finite) << n << " at " << at;
        wide[at] = kept;
      }
    }
  }
}

TEST_P(ParityTest, SquaredNorm) {
  for (const size_t n : kSizes) {
    for (int round = 0; round < 20; ++round) {
      std::vector<bf16> x;
      for (size_t i = 0; i < n; ++i) {
        const float any = AnyFloat(random_, /*finite=*/true);
        x.push_back(static_cast<bf16>(std::bit_cast<uint32_t>(any) >> 16));
      }
      const NormResult got = SquaredNorm(x);
      ASSERT_TRUE(got.finite);
      ASSERT_EQ(std::bit_cast<uint64_t>(got.squared_norm), std::bit_cast<uint64_t>(ReferenceNorm(x.data(), n))) << n;
      if (n == 0) continue;
      // One bad value anywhere is seen.
      x[random_() % n] = round % 2 == 0 ? 0xff80 : 0x7f81;
      ASSERT_FALSE(SquaredNorm(x).finite) << n;
      ASSERT_EQ(SquaredNorm(x).squared_norm, 0) << n;
    }
  }
}

// Memory whose start is `shift` bytes off an alignment of 64. Large outputs stream only if aligned.
template <typename T>
class AlignedArray {
 public:
  AlignedArray(size_t n, size_t shift) : bytes_(n * sizeof(T) + 128), n_(n) {
    const auto at = reinterpret_cast<uintptr_t>(bytes_.data());
    data_ = reinterpret_cast<T*>(bytes_.data() + (64 - at % 64) + shift);
  }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;
  absl::Span<T> span() { return {data_, n_}; }

 private:
  std::vector<std::byte> bytes_;
  T* data_;
  size_t n_;
};

TEST_P(ParityTest, FromF32) {
  for (const Dtype dtype : kSmallDtypes) {
    const size_t bytes = ElementBytes(dtype);
    for (const size_t n : Pieces()) {
      const std::vector<float> from = AnyFloats(random_, n);
      std::vector<std::byte> expected(n * bytes);
      for (size_t i = 0; i < n; ++i) {
        const uint32_t code = NarrowOne(dtype, from[i]);
        std::memcpy(expected.data() + i * bytes, &code, bytes);
      }
      for (const size_t shift : {size_t{0}, bytes}) {
        AlignedArray<std::byte> got(n * bytes, shift);
        FromF32(from, dtype, got.span().data());
        ASSERT_EQ(absl::MakeConstSpan(got.span()), absl::MakeConstSpan(expected))
            << static_cast<int>(dtype) << " n=" << n << " shift=" << shift;
      }
    }
  }
}

// fp32 to fp32 is a copy, NaNs included.
TEST_P(ParityTest, F32ToF32Copies) {
  for (const size_t n : {size_t{1025}, (size_t{2} << 20) + 77}) {
    const std::vector<float> from = AnyFloats(random_, n);
    for (const size_t shift : {size_t{0}, sizeof(float)}) {
      AlignedArray<float> a(n, shift), b(n, shift);
      FromF32(from, Dtype::kF32, reinterpret_cast<std::byte*>(a.span().data()));
      ToF32(Dtype::kF32, reinterpret_cast<const std::byte*>(from.data()), b.span());
      ASSERT_EQ(std::memcmp(a.span().data(), from.data(), n * sizeof(float)), 0) << n;
      ASSERT_EQ(std::memcmp(b.span().data(), from.data(), n * sizeof(float)), 0) << n;
    }
  }
}

// Outputs large enough to stream, aligned and not aligned.
TEST_P(ParityTest, ToF32Streams) {
  for (const Dtype dtype : kSmallDtypes) {
    const size_t n = (size_t{2} << 20) + 77, bytes = ElementBytes(dtype);
    std::vector<std::byte> from(n * bytes);
    for (std::byte& b : from) b = static_cast<std::byte>(random_());
    for (const size_t shift : {size_t{0}, sizeof(float)}) {
      AlignedArray<float> got(n, shift);
      ToF32(dtype, from.data(), got.span());
      for (size_t i = 0; i < n; ++i) {
        uint32_t code = 0;
        std::memcpy(&code, from.data() + i * bytes, bytes);
        ASSERT_EQ(std::bit_cast<uint32_t>(got.span()[i]), std::bit_cast<uint32_t>(WidenOne(dtype, code))) << i;
      }
    }
  }
}

TEST_P(ParityTest, ToF32OfEveryCode) {
  for (const Dtype dtype : kSmallDtypes) {
    const size_t bytes = ElementBytes(dtype), codes = size_t{1} << (8 * bytes);
    std::vector<std::byte> from(codes * bytes);
    std::vector<float> expected(codes);
    for (uint32_t code = 0; code < codes; ++code) {
      std::memcpy(from.data() + code * bytes, &code, bytes);
      expected[code] = WidenOne(dtype, code);
    }
    for (const size_t skip : {0, 1, 3, 200}) {
      std::vector<float> got(codes - skip);
      ToF32(dtype, from.data() + skip * bytes, absl::MakeSpan(got));
      ASSERT_EQ(std::memcmp(got.data(), expected.data() + skip, got.size() * sizeof(float)), 0)
          << static_cast<int>(dtype);
    }
  }
}

TEST_P(ParityTest, AddSmallFormats) {
  for (const Dtype dtype : kSmallDtypes) {
    const size_t bytes = ElementBytes(dtype);
    for (const size_t n : Pieces()) {
      std::vector<float> sum = AnyFloats(random_, n), expected = sum;
      std::vector<std::byte> addend(n * bytes);
      for (size_t i = 0; i < n; ++i) {
        const auto code = static_cast<uint32_t>(random_()) & ((1u << (8 * bytes)) - 1);
        std::memcpy(addend.data() + i * bytes, &code, bytes);
        expected[i] = ReferenceNan(expected[i] + WidenOne(dtype, code));
      }
      AddInto(dtype, addend.data(), absl::MakeSpan(sum));
      ASSERT_EQ(Bits(sum), Bits(expected)) << static_cast<int>(dtype) << " n=" << n;
    }
  }
}

// Large outputs go past the caches where they are aligned: the same bits as where they are not.
TEST_P(ParityTest, QuantizersThatStream) {
  for (const auto& [format, n] : {std::pair{QuantFormat::kInt8, size_t{4'400'001}}, {QuantFormat::kInt4, 8'800'001}}) {
    const std::vector<std::byte> x = QuantizeInput(Dtype::kBf16, n);
    AlignedArray<std::byte> streamed(QuantBytes(format, n), 0), plain(QuantBytes(format, n), 1);
    std::vector<float> scales(QuantScales(n)), plain_scales(scales.size());
    Quantize(format, Dtype::kBf16, x.data(), n, streamed.span().data(), scales.data());
    Quantize(format, Dtype::kBf16, x.data(), n, plain.span().data(), plain_scales.data());
    ASSERT_EQ(Bits(scales), Bits(plain_scales));
    ASSERT_EQ(streamed.span(), plain.span());
    AlignedArray<std::byte> back(2 * n, 0), plain_back(2 * n, 2);
    Dequantize(format, streamed.span().data(), scales.data(), n, Dtype::kBf16, back.span().data());
    Dequantize(format, streamed.span().data(), scales.data(), n, Dtype::kBf16, plain_back.span().data());
    ASSERT_EQ(back.span(), plain_back.span());
  }
}

// The plainest quantizer, and its stated error bound.
TEST_P(ParityTest, Quantize) {
  for (const QuantFormat format : {QuantFormat::kInt8, QuantFormat::kInt4}) {
    const float largest_code = format == QuantFormat::kInt8 ? 127 : 7;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{255}, size_t{256}, size_t{257},
                             size_t{511}, size_t{1024}, kTuples / 3 | 1}) {
        const std::vector<std::byte> x = QuantizeInput(dtype, n);
        std::vector<float> wide(n), expected(n), scales(QuantScales(n)), got_scales(QuantScales(n));
        ToF32(dtype, x.data(), absl::MakeSpan(wide));
        std::vector<int> codes(n);
        for (size_t begin = 0; begin < n; begin += kQuantBlock) {
          const size_t end = std::min<size_t>(n, begin + kQuantBlock);
          float& scale = scales[begin / kQuantBlock];
          scale = ReferenceScale(wide.data() + begin, end - begin, largest_code);
          for (size_t i = begin; i < end; ++i) {
            codes[i] = scale > 0 ? static_cast<int>(std::nearbyint(static_cast<double>(wide[i]) * (1 / scale))) : 0;
            expected[i] = ReferenceNan(static_cast<float>(codes[i]) * scale);
            if (!std::isnan(scale)) {
              const double bound = scale > 0 ? 0.5 * scale * (1 + 0x1p-14) : largest_code * 0x1p-126;
              ASSERT_LE(std::fabs(static_cast<double>(wide[i]) - expected[i]), bound) << n;
            }
          }
        }
        std::vector<std::byte> quantized(QuantBytes(format, n)), expected_bytes(quantized.size());
        for (size_t i = 0; i < n; ++i) {
          const auto low = static_cast<unsigned>(codes[i]);
          if (format == QuantFormat::kInt8)
            expected_bytes[i] = static_cast<std::byte>(low);
          else
            expected_bytes[i / 2] |= static_cast<std::byte>((low & 15) << (i % 2 * 4));
        }
        Quantize(format, dtype, x.data(), n, quantized.data(), got_scales.data());
        ASSERT_EQ(Bits(got_scales), Bits(scales)) << n;
        ASSERT_EQ(quantized, expected_bytes) << n;
        std::vector<float> got(n);
        Dequantize(format, quantized.data(), scales.data(), n, Dtype::kF32, reinterpret_cast<std::byte*>(got.data()));
        ASSERT_EQ(Bits(got), Bits(expected)) << n;
        for (const Dtype to : {Dtype::kBf16, Dtype::kF16}) {
          std::vector<uint16_t> half(n), expected_half(n);
          for (size_t i = 0; i < n; ++i) expected_half[i] = static_cast<uint16_t>(NarrowOne(to, expected[i]));
          Dequantize(format, quantized.data(), scales.data(), n, to, reinterpret_cast<std::byte*>(half.data()));
          ASSERT_EQ(half, expected_half) << n;
        }
      }
    }
  }
}

// The plainest split, and back: every kind of float, ties and NaNs among them, comes back to the bit.
TEST_P(ParityTest, SplitAndJoinF32) {
  constexpr uint32_t kSpecial[] = {0x3f808000, 0x3f818000, 0x3f817fff, 0x7f7fffff, 0xff7f8000, 0x7f800000, 0x7f800001,
                                   0xffbfffff, 0x7fc00000, 0xffffffff, 0x80000000, 0x00008000, 0x00018000};
  for (const size_t n : Pieces()) {
    std::vector<float> from = AnyFloats(random_, n);
    for (size_t i = 0; i < n; i += 7) from[i] = std::bit_cast<float>(kSpecial[i / 7 % std::size(kSpecial)]);
    std::vector<bf16> rounded(n);
    std::vector<uint16_t> low(n), expected_low(n);
    std::vector<uint8_t> carries(CarryBytes(n), 0xff), expected_carries(CarryBytes(n));
    Bf16FromF32(from, absl::MakeSpan(rounded));
    for (size_t i = 0; i < n; ++i) {
      const auto bits = std::bit_cast<uint32_t>(from[i]);
      expected_low[i] = static_cast<uint16_t>(bits);
      if (rounded[i] != bits >> 16) expected_carries[i / 8] |= static_cast<uint8_t>(1u << i % 8);
    }
    SplitF32(from, low.data(), carries.data());
    ASSERT_EQ(low, expected_low) << n;
    ASSERT_EQ(carries, expected_carries) << n;
    std::vector<float> back(n);
    JoinF32(rounded.data(), low.data(), carries.data(), absl::MakeSpan(back));
    ASSERT_EQ(std::memcmp(back.data(), from.data(), n * sizeof(float)), 0) << n;
  }
}

TEST_P(ParityTest, AddInto) {
  for (const size_t n : kSizes) {
    std::vector<float> addend, sum, expected;
    for (size_t i = 0; i < n; ++i) {
      addend.push_back(AnyFloat(random_));
      sum.push_back(AnyFloat(random_));
      expected.push_back(ReferenceNan(sum[i] + addend[i]));
    }
    AddInto(addend, absl::MakeSpan(sum));
    ASSERT_EQ(Bits(sum), Bits(expected)) << n;
  }
}

// Spans that end where the mapped memory ends: one element too far is a crash.
template <typename T>
class GuardedSpan {
 public:
  explicit GuardedSpan(size_t n) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (n * sizeof(T) / page + 2) * page;
    base_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + bytes_ - page, page, PROT_NONE);
    span_ = absl::Span<T>(reinterpret_cast<T*>(base_ + bytes_ - page) - n, n);
  }
  ~GuardedSpan() { munmap(base_, bytes_); }
  absl::Span<T> span() const { return span_; }

 private:
  char* base_;
  size_t bytes_;
  absl::Span<T> span_;
};

TEST_P(ParityTest, NothingBeyondTheEndIsTouched) {
  for (const size_t n : kSizes) {
    const GuardedSpan<float> wide(n), sum(n), scales(QuantScales(n));
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kE4m3, Dtype::kE5m2}) {
      const GuardedSpan<std::byte> narrow(n * ElementBytes(dtype));
      FromF32(wide.span(), dtype, narrow.span().data());
      ToF32(dtype, narrow.span().data(), wide.span());
      AddInto(dtype, narrow.span().data(), sum.span());
      if (ElementBytes(dtype) == 1) continue;
      EXPECT_TRUE(SquaredNorm(dtype, narrow.span().data(), n).finite);
      for (const QuantFormat format : {QuantFormat::kInt8, QuantFormat::kInt4}) {
        const GuardedSpan<std::byte> codes(QuantBytes(format, n));
        Quantize(format, dtype, narrow.span().data(), n, codes.span().data(), scales.span().data());
        Dequantize(format, codes.span().data(), scales.span().data(), n, dtype, narrow.span().data());
      }
    }
    const GuardedSpan<uint16_t> rounded(n), low(n);
    const GuardedSpan<uint8_t> carries(CarryBytes(n));
    SplitF32(wide.span(), low.span().data(), carries.span().data());
    JoinF32(rounded.span().data(), low.span().data(), carries.span().data(), wide.span());
    for (const MomentFormat format : kFormats) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        const OptimizerSpec spec{.amsgrad = true, .moments = format, .gradient = dtype, .working = dtype};
        const GuardedSpan<std::byte> gradient(n * ElementBytes(dtype)), working(n * ElementBytes(dtype));
        const GuardedSpan<std::byte> a(MomentBytes(format, n)), b(MomentBytes(format, n)), x(MomentBytes(format, n));
        const uint64_t blocks = MomentScaleBytes(format, n) / sizeof(float);
        const GuardedSpan<float> as(blocks), bs(blocks), xs(blocks);
        Update(spec, {}, {},
               {.n = n,
                .gradient = gradient.span().data(),
                .master = wide.span().data(),
                .moments = {{{a.span().data(), as.span().data()},
                             {b.span().data(), bs.span().data()},
                             {x.span().data(), xs.span().data()}}},
                .working = working.span().data()});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, ParityTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

}  // namespace
}  // namespace ballast::kernels
