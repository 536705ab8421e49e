// All 2^32 floats through every narrowing conversion: each instruction set against the definition, the definition
// against rounding in double. Minutes; `tests/run.sh exhaustive`.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "ballast/tests/instruction_sets.h"
#include "ballast/tests/kernels/rounding_reference.h"

namespace ballast::kernels {
namespace {

constexpr uint32_t kPieceBits = 20, kPieces = 1u << (32 - kPieceBits);

// Calls check(piece) for all pieces of the 2^32, on all cores, until one returns false.
template <typename Check>
void ForAllPieces(const std::string& what, const Check& check) {
  std::atomic<uint32_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (uint32_t piece = next++; piece < kPieces; piece = next++) {
        if (piece % (kPieces / 4) == 0)
          std::printf("%s: %u of 4 quarters begun\n", what.c_str(), piece / (kPieces / 4) + 1);
        if (!check(piece)) next = kPieces;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const char* NameOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kF16:
      return "f16";
    case Dtype::kE4m3:
      return "e4m3";
    default:
      return "e5m2";
  }
}

TEST(Exhaustive, EveryFloatRoundsAsInDouble) {
  for (const Dtype dtype : kSmallDtypes) {
    ForAllPieces(std::string("definition of ") + NameOf(dtype), [dtype](uint32_t piece) {
      for (uint32_t low = 0; low < 1u << kPieceBits; ++low) {
        const float x = std::bit_cast<float>(piece << kPieceBits | low);
        if (RoundsRight(dtype, x)) continue;
        ADD_FAILURE() << NameOf(dtype) << " of bits " << (piece << kPieceBits | low);
        return false;
      }
      return true;
    });
  }
}

class ExhaustiveTest : public InstructionSetTest {};

TEST_P(ExhaustiveTest, EveryFloatRoundsAsDefined) {
  for (const Dtype dtype : kSmallDtypes) {
    const size_t bytes = ElementBytes(dtype), count = size_t{1} << kPieceBits;
    ForAllPieces(std::string(ActiveIsa()) + " " + NameOf(dtype), [=](uint32_t piece) {
      thread_local std::vector<uint32_t> bits(count);
      thread_local std::vector<float> x(count);
      thread_local std::vector<std::byte> got, expected;
      got.resize(count * bytes), expected.resize(count * bytes);
      std::iota(bits.begin(), bits.end(), piece << kPieceBits);
      std::memcpy(x.data(), bits.data(), count * sizeof(float));
      FromF32(x, dtype, got.data());
      for (size_t i = 0; i < count; ++i) {
        const uint32_t code = NarrowOne(dtype, x[i]);
        std::memcpy(expected.data() + i * bytes, &code, bytes);
      }
      if (got == expected) return true;
      ADD_FAILURE() << ActiveIsa() << " " << NameOf(dtype) << " in the piece of bits " << (piece << kPieceBits);
      return false;
    });
  }
}

TEST_P(ExhaustiveTest, EveryFloatIsItsBf16AndTheRest) {
  const size_t count = size_t{1} << kPieceBits;
  ForAllPieces(std::string(ActiveIsa()) + " splits", [=](uint32_t piece) {
    thread_local std::vector<float> x(count), back(count);
    thread_local std::vector<bf16> rounded(count);
    thread_local std::vector<uint16_t> low(count);
    thread_local std::vector<uint8_t> carries(CarryBytes(count));
    for (uint32_t i = 0; i < count; ++i) x[i] = std::bit_cast<float>((piece << kPieceBits) + i);
    Bf16FromF32(x, absl::MakeSpan(rounded));
    SplitF32(x, low.data(), carries.data());
    JoinF32(rounded.data(), low.data(), carries.data(), absl::MakeSpan(back));
    if (std::memcmp(x.data(), back.data(), count * sizeof(float)) == 0) return true;
    ADD_FAILURE() << ActiveIsa() << " in the piece of bits " << (piece << kPieceBits);
    return false;
  });
}

INSTANTIATE_TEST_SUITE_P(Isa, ExhaustiveTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

}  // namespace
}  // namespace ballast::kernels
