// The dynamic map's tables, as vectors look them up: by the exponent bits of a float, without the number of a decade.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "ballast/kernels/dynamic_map.h"

namespace ballast::kernels {

template <bool kSigned>
struct DynamicMapVectors {
  static constexpr DynamicMap<kSigned> kMap{};
  static constexpr size_t kBinades = 32;
  static constexpr uint32_t kLeastBits = 96u << 23;  // 2^-31

  // Decoding: value = min(1, fma(h, factor, offset)), indexed by h's exponent bits mod 8. Entries 0 ... 6 are decades 1
  // ... 7. Entry 7 serves h = 1, the value 0, and the code of 1, whose h is 256 at least. Twice, for vectors of
  // sixteen.
  alignas(64) float value_factor[16] = {}, value_offset[16] = {};

  // Coding, indexed by exponent bits mod 32: magnitudes from 2^-31 (entry 0; smaller ones are taken as 2^-31) to 2. A
  // binade has one threshold at most. `carry`, added to the magnitude's bits, takes those above it to the next
  // exponent, by which the three tables are indexed: code = fma(magnitude, factor, offset), at most `max`, rounded to
  // nearest even.
  alignas(64) uint32_t carry[kBinades] = {};
  alignas(64) float code_factor[kBinades] = {}, code_offset[kBinades] = {}, code_max[kBinades] = {};

  constexpr DynamicMapVectors() {
    for (size_t i = 0; i < 16; ++i) {
      const bool ends = i % 8 == 7;
      value_factor[i] = ends ? 1 : kMap.value_factor[i % 8 + 1];
      value_offset[i] = ends ? -1 : kMap.value_offset[i % 8 + 1];
    }
    for (size_t i = 0; i < kBinades; ++i) {
      const uint32_t begin = kLeastBits + (static_cast<uint32_t>(i) << 23), end = begin + (1u << 23);
      size_t segment = 0;  // decade + 1; behind the decades, the code of 1
      for (int k = 0; k <= DynamicMap<kSigned>::kDecades; ++k) {
        const auto bits = std::bit_cast<uint32_t>(Threshold(k));
        if (bits < begin) ++segment;
        if (bits >= begin && bits < end) carry[i] = Once(carry[i], end - 1 - bits);
      }
      const bool top = segment > DynamicMap<kSigned>::kDecades;
      code_factor[i] = top ? 0 : kMap.code_factor[segment];
      code_offset[i] = top ? DynamicMap<kSigned>::kTop : kMap.code_offset[segment];
      code_max[i] = top ? DynamicMap<kSigned>::kTop : kMap.code_max[segment];
    }
  }

 private:
  static constexpr float Threshold(int k) {
    return k < DynamicMap<kSigned>::kDecades ? kMap.threshold[k] : kMap.top_threshold;
  }
  // Two thresholds in one binade would fail to compile here.
  static constexpr uint32_t Once(uint32_t old, uint32_t value) { return old == 0 ? value : throw "two thresholds"; }
};

inline constexpr DynamicMapVectors<true> kSignedMapVectors;
inline constexpr DynamicMapVectors<false> kUnsignedMapVectors;

}  // namespace ballast::kernels
