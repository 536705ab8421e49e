// The dynamic map of 8-bit optimizer states (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
// section 2.2; Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning"). The map has seven decades from
// 10^-7 to 1. Decade i = 0 ... 6 is cut into 2^i (signed) or 2^(i+1) (unsigned) equal parts; the values are the parts'
// middles, and 0, and 1.
//
// Code k counts the values upwards from 0. The signed map adds 0x80 for negative values. Code 0x80 itself, which would
// be -0, means 1; -1 has no code. Within a decade value and code are linear in each other, and the decade is the
// exponent of 2k + 1 (signed) or k + 1 (unsigned): so coding needs no search, only eight-entry tables that fit into a
// vector register.
#pragma once

#include <bit>
#include <cstdint>

namespace ballast::kernels {

template <bool kSigned>
struct DynamicMap {
  static constexpr uint32_t kTop = kSigned ? 128 : 255;  // the code of 1
  static constexpr int kDecades = 7;
  // Sixteen entries, as many as the widest vector has; only the first eight are used.
  using Table = float[16];

  // Indexed by decade + 1; 0 is the value 0.
  Table value_factor = {}, value_offset = {};  // value = min(1, fma(h, factor, offset)), h = 2k + 1 or k + 1
  Table code_factor = {}, code_offset = {};    // code = fma(value, factor, offset), rounded to nearest even,
  Table code_max = {};                         // and at most this
  float threshold[kDecades] = {};              // magnitudes above threshold[i] belong to decade i or a later decade
  float top_threshold = 0;                     // magnitudes above get the code of 1

  constexpr DynamicMap() {
    double unit = 1e-6;  // the end of decade i
    double last = 0;     // the value before the decade's first value
    for (int i = 0; i < kDecades; ++i, unit *= 10) {
      const double parts = kSigned ? 1 << i : 2 << i, width = 0.9 * unit / parts;
      const double first_code = kSigned ? 1 << i : (2 << i) - 1, first = 0.1 * unit + width / 2;
      threshold[i] = static_cast<float>((last + first) / 2);
      last = first + (parts - 1) * width;
      const double codes_per_h = kSigned ? 0.5 : 1.0, first_h = kSigned ? 2 * first_code + 1 : first_code + 1;
      value_factor[i + 1] = static_cast<float>(width * codes_per_h);
      value_offset[i + 1] = static_cast<float>(first - first_h * width * codes_per_h);
      code_factor[i + 1] = static_cast<float>(1 / width);
      code_offset[i + 1] = static_cast<float>(first_code - first / width);
      code_max[i + 1] = static_cast<float>(first_code + parts - 1);
    }
    top_threshold = static_cast<float>((last + 1) / 2);
  }
};

inline constexpr DynamicMap<true> kSignedMap;
inline constexpr DynamicMap<false> kUnsignedMap;

}  // namespace ballast::kernels
