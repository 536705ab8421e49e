// Random numbers that are a function of their key alone, so that any rank can make any number in any order.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ballast::client {

// A bijection with good avalanche. Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"
// (constants of Stafford's variant 13).
inline uint64_t MixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Folds one more part into a key.
inline uint64_t MixKey(uint64_t key, uint64_t part) { return MixBits(key ^ MixBits(part)); }

inline uint64_t MixKey(uint64_t key, absl::string_view text) {
  for (const char c : text) key = MixKey(key, static_cast<unsigned char>(c));
  return MixKey(key, text.size());
}

}  // namespace ballast::client
