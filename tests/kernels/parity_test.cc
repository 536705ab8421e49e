// Every instruction set that this processor runs gives the bits of the plain reference.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/tests/kernels/instruction_sets.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

constexpr size_t kSizes[] = {0,  1,  2,  3,  4,  5,   7,   8,   9,    15,   16,   17,
                             31, 33, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4099};

class ParityTest : public InstructionSetTest {
 protected:
  std::mt19937_64 random_{20260101};
};

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

TEST_P(ParityTest, Bf16FromF32) {
  for (const size_t n : kSizes) {
    std::vector<float> from;
    std::vector<bf16> expected, to(n);
    for (size_t i = 0; i < n; ++i) {
      from.push_back(AnyFloat(random_));
      expected.push_back(ReferenceRound(from.back()));
    }
    Bf16FromF32(from, absl::MakeSpan(to));
    ASSERT_EQ(to, expected) << n;
  }
}

// Halfway cases and their neighbours, for every bf16.
TEST_P(ParityTest, Bf16RoundsTiesToEven) {
  for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    std::vector<float> from;
    std::vector<bf16> expected, to(65536);
    for (uint32_t upper = 0; upper < 65536; ++upper) {
      from.push_back(std::bit_cast<float>(upper << 16 | low));
      expected.push_back(ReferenceRound(from.back()));
    }
    Bf16FromF32(from, absl::MakeSpan(to));
    ASSERT_EQ(to, expected) << low;
  }
}

TEST_P(ParityTest, F32FromBf16) {
  std::vector<bf16> from(65536);
  std::vector<uint32_t> expected(65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    from[i] = static_cast<bf16>(i);
    expected[i] = i << 16;
  }
  for (const size_t n : {size_t{65536}, size_t{65533}}) {
    std::vector<float> to(n);
    F32FromBf16(absl::MakeConstSpan(from).subspan(65536 - n), absl::MakeSpan(to));
    const std::vector<uint32_t> tail(expected.begin() + static_cast<ptrdiff_t>(65536 - n), expected.end());
    ASSERT_EQ(Bits(to), tail);
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
    const GuardedSpan<bf16> gradient(n), working(n);
    const GuardedSpan<float> p(n), m(n), v(n);
    UpdateSpan span{.n = n,
                    .gradient = reinterpret_cast<const std::byte*>(gradient.span().data()),
                    .master = p.span().data(),
                    .moments = {},
                    .working = reinterpret_cast<std::byte*>(working.span().data())};
    span.moments[0].values = reinterpret_cast<std::byte*>(m.span().data());
    span.moments[1].values = reinterpret_cast<std::byte*>(v.span().data());
    Update({}, {}, {}, span);
    EXPECT_TRUE(SquaredNorm(gradient.span()).finite);
    Bf16FromF32(p.span(), working.span());
    F32FromBf16(gradient.span(), p.span());
    AddInto(p.span(), m.span());
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, ParityTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

}  // namespace
}  // namespace ballast::kernels
