// Layout of a chunk's state in memory and on disk: the fp32 master, then each moment (its values, then the scales of
// 8-bit formats). Every array starts at a multiple of 4096 bytes, so that an array can be read from disk alone. Behind
// the arrays is room for a label (chunk/extent_label.h), so that a state and its label are written in a single write.
#pragma once

#include <cstdint>

#include "ballast/kernels/optimizer.h"

namespace ballast::storage {

// In the order of storage; kernels/optimizer.h lists the moments of each optimizer.
enum class StateArray { kMaster = 0, kMoment1 = 1, kMoment2 = 2, kMoment3 = 3 };
inline constexpr int kStateArraysMax = 1 + kernels::kMomentsMax;

// The layout of a job's chunks: a pure function of the job's optimizer and of whether its store keeps working copies. A
// store without working copies writes the trainer's own parameters, where the trainer lends them; reads of working
// parameters round the master.
class StateLayout {
 public:
  StateLayout() : StateLayout(kernels::OptimizerSpec()) {}
  explicit StateLayout(const kernels::OptimizerSpec& optimizer, bool working_copies = true)
      : optimizer_(optimizer), array_count_(1 + kernels::MomentCount(optimizer)), working_copies_(working_copies) {}

  const kernels::OptimizerSpec& optimizer() const { return optimizer_; }
  int array_count() const { return array_count_; }

  // Bytes of an array in a chunk of `elements`: without padding (UsedBytes) and with padding (ArrayBytes).
  uint64_t UsedBytes(StateArray array, uint64_t elements) const {
    if (array == StateArray::kMaster) return elements * sizeof(float);
    return ScalesAt(elements) + kernels::MomentScaleBytes(optimizer_.moments, elements);
  }
  uint64_t ArrayBytes(StateArray array, uint64_t elements) const { return Pad(UsedBytes(array, elements)); }
  // Offset of an array from the start of the state.
  uint64_t ArrayAt(StateArray array, uint64_t elements) const {
    const auto before = static_cast<uint64_t>(array);
    if (before == 0) return 0;
    return ArrayBytes(StateArray::kMaster, elements) + (before - 1) * ArrayBytes(StateArray::kMoment1, elements);
  }
  // Offset of a moment's scales from the start of its array.
  uint64_t ScalesAt(uint64_t elements) const {
    return (kernels::MomentBytes(optimizer_.moments, elements) + kScaleAlign - 1) / kScaleAlign * kScaleAlign;
  }

  uint64_t LabelAt(uint64_t elements) const { return ArrayAt(static_cast<StateArray>(array_count_), elements); }

  // A chunk's bytes in a tier: for its state with the label, and for its working copy.
  uint64_t StateBytes(uint64_t elements) const { return LabelAt(elements) + kLabelBytes; }
  uint64_t WorkingBytes(uint64_t elements) const {
    return working_copies_ ? Pad(elements * working_element_bytes()) : 0;
  }
  bool working_copies() const { return working_copies_; }

  static constexpr uint64_t kLabelBytes = 4096;

  uint64_t gradient_element_bytes() const { return kernels::ElementBytes(optimizer_.gradient); }
  uint64_t working_element_bytes() const { return kernels::ElementBytes(optimizer_.working); }

 private:
  static constexpr uint64_t kPadBytes = 4096;
  static constexpr uint64_t kScaleAlign = 64;
  static constexpr uint64_t Pad(uint64_t bytes) { return (bytes + kPadBytes - 1) / kPadBytes * kPadBytes; }

  kernels::OptimizerSpec optimizer_;
  int array_count_;
  bool working_copies_;
};

// A chunk's state at `base`, in the host's memory or the GPU's.
struct StateView {
  const StateLayout* layout = nullptr;
  std::byte* base = nullptr;
  uint64_t elements = 0;

  std::byte* array(StateArray which) const { return base + layout->ArrayAt(which, elements); }
  float* master() const { return reinterpret_cast<float*>(base); }
  // Moment `index` (from 0), from element `at` on. REQUIRES: `at` is a multiple of kernels::kMomentBlock if the format
  // has scales.
  kernels::MomentSpan moment(int index, uint64_t at) const {
    std::byte* const begin = array(static_cast<StateArray>(index + 1));
    const kernels::MomentFormat format = layout->optimizer().moments;
    return {
        .values = begin + kernels::MomentBytes(format, at),
        .scales = reinterpret_cast<float*>(begin + layout->ScalesAt(elements) + kernels::MomentScaleBytes(format, at))};
  }
};

}  // namespace ballast::storage
