// The shape of the norm: leaves of 4096 elements, 32 lanes in a leaf, a binary tree over the leaves.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

inline constexpr size_t kNormLeafElements = 4096;
inline constexpr size_t kNormLanes = 32;

// Adds neighbours first: lanes 0 + 1, 2 + 3 ..., then neighbouring sums. Overwrites `lane`.
inline double SumLanes(double* lane) {
  for (size_t count = kNormLanes; count > 1; count /= 2) {
    for (size_t i = 0; i < count / 2; ++i) lane[i] = lane[2 * i] + lane[2 * i + 1];
  }
  return lane[0];
}

// Adds leaves, in order, into the tree with complete left children: a binary counter of partial sums.
class NormTree {
 public:
  void Add(double leaf) {
    for (uint64_t carry = leaves_++; (carry & 1) != 0; carry >>= 1) leaf = partial_[--depth_] + leaf;
    partial_[depth_++] = leaf;
  }

  double Total() const {
    if (depth_ == 0) return 0;
    double total = partial_[depth_ - 1];
    for (size_t i = depth_ - 1; i-- > 0;) total = partial_[i] + total;
    return total;
  }

 private:
  double partial_[64];
  size_t depth_ = 0;
  uint64_t leaves_ = 0;
};

}  // namespace ballast::kernels
