// The plainest blocks of e4m3, with the functions of one element.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

inline std::vector<std::byte> ReferenceBlocks(absl::Span<const float> x) {
  std::vector<std::byte> coded(BytesOf(Dtype::kE4m3Blocks, x.size()));
  std::byte* to = coded.data();
  for (size_t begin = 0; begin < x.size(); begin += kE4m3Block, to += kE4m3BlockBytes) {
    const absl::Span<const float> block = x.subspan(begin, kE4m3Block);
    float largest = 0;
    bool finite = true;
    for (const float value : block) {
      finite = finite && std::isfinite(value);
      largest = std::max(largest, std::fabs(value));
    }
    float scale = finite ? largest * (1 / kE4m3Largest) : std::bit_cast<float>(0x7fc00000u);
    if (scale < std::numeric_limits<float>::min()) scale = 0;
    std::memcpy(to + kE4m3Block, &scale, sizeof(scale));
    for (size_t i = 0; scale > 0 && i < block.size(); ++i) {
      to[i] = static_cast<std::byte>(ToE4m3(block[i] * (1 / scale)));
    }
  }
  return coded;
}

inline std::vector<float> ReferenceValues(absl::Span<const std::byte> coded, size_t n) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) {
    const std::byte* const block = coded.data() + i / kE4m3Block * kE4m3BlockBytes;
    float scale = 0;
    std::memcpy(&scale, block + kE4m3Block, sizeof(scale));
    x[i] = FromE4m3(static_cast<uint8_t>(block[i % kE4m3Block])) * scale;
    if (x[i] != x[i]) x[i] = std::bit_cast<float>(0x7fc00000u);
  }
  return x;
}

}  // namespace ballast::kernels
