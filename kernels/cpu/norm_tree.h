// The shape of the norm: leaves of 256 elements, eight lanes in a leaf, a binary tree over the leaves.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

inline constexpr size_t kNormLeafElements = 256;
inline constexpr size_t kNormLanes = 8;

inline double SumLanes(const double* lane) {
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// Adds leaves, in order, into the tree whose left children are complete: a binary counter of partial sums.
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
