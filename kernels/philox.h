// Philox4x32-10, the counter-based random numbers of Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
// Computes a single counter; defines the bits of the vector kernels. Callable from CUDA (constexpr).
#pragma once

#include <cstdint>

namespace ballast::kernels {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53, kPhiloxMultiplier1 = 0xcd9e8d57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9, kPhiloxWeyl1 = 0xbb67ae85;
inline constexpr int kPhiloxRounds = 10;

struct PhiloxBits {
  uint32_t word[4];
};

constexpr PhiloxBits Philox(PhiloxBits counter, uint32_t key0, uint32_t key1) {
  auto& x = counter.word;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * x[0], b = uint64_t{kPhiloxMultiplier1} * x[2];
    const uint32_t x1 = x[1], x3 = x[3];
    x[0] = static_cast<uint32_t>(b >> 32) ^ x1 ^ key0;
    x[1] = static_cast<uint32_t>(b);
    x[2] = static_cast<uint32_t>(a >> 32) ^ x3 ^ key1;
    x[3] = static_cast<uint32_t>(a);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

}  // namespace ballast::kernels
