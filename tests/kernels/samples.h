// Random inputs with every class of float, and the plainest possible reference of each kernel.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels {

// A few hundred draws include zeros, denormals, extremes, Inf and NaN (both kinds, both signs).
inline float AnyFloat(std::mt19937_64& random, bool finite = false) {
  static constexpr uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff,
                                          0xff7fffff, 0x3f800000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345,
                                          0x7f800001, 0xff812345, 0x00018000, 0x00008000};
  for (;;) {
    const uint64_t draw = random();
    float x;
    switch (draw % 8) {
      case 0:
        x = std::bit_cast<float>(kSpecial[(draw >> 8) % std::size(kSpecial)]);
        break;
      case 1:  // denormal
        x = std::bit_cast<float>(static_cast<uint32_t>(draw >> 32) & 0x807fffffu);
        break;
      case 2:  // any bits
        x = std::bit_cast<float>(static_cast<uint32_t>(draw >> 32));
        break;
      default:  // as in training
        x = std::ldexp(static_cast<float>(static_cast<int32_t>(draw >> 32)), -31 - static_cast<int>(draw >> 3 & 31));
    }
    if (!finite || std::isfinite(x)) return x;
  }
}

inline float ReferenceNan(float x) { return x != x ? std::bit_cast<float>(0x7fc00000u) : x; }

inline double ValueOf(bf16 x) { return FromBf16(x); }
inline double ValueOf(float x) { return x; }

template <typename T>
double ReferenceLeaf(const T* x, size_t n) {
  double lane[32] = {};
  for (size_t i = 0; i < n; ++i) {
    const double value = ValueOf(x[i]);
    lane[i % 32] += value * value;
  }
  for (size_t width = 1; width < 32; width *= 2) {
    for (size_t i = 0; i < 32; i += 2 * width) lane[i] += lane[i + width];
  }
  return lane[0];
}

template <typename T>
double ReferenceNorm(const T* x, size_t n) {
  const size_t leaves = (n + 4095) / 4096;
  if (leaves == 0) return 0;
  if (leaves == 1) return ReferenceLeaf(x, n);
  const size_t left = std::bit_floor(leaves - 1) * 4096;
  return ReferenceNorm(x, left) + ReferenceNorm(x + left, n - left);
}

template <typename T>
std::vector<uint32_t> Bits(const std::vector<T>& values) {
  std::vector<uint32_t> bits;
  for (const T& x : values) {
    if constexpr (sizeof(T) == 2) {
      bits.push_back(x);
    } else {
      bits.push_back(std::bit_cast<uint32_t>(x));
    }
  }
  return bits;
}

}  // namespace ballast::kernels
