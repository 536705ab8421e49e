// Layout of a chunk's state in memory and on disk: the fp32 master, then each moment (its values, then the scales of
// 8-bit formats). Instead of the master, a layout may have its remainder: the bits that the chunk's working copy lacks.
// Or the trainer's parameter is the master, which then takes no bytes here. A frozen chunk's state is only its working
// copy, in the place of the master. A chunk whose updates the trainer assists has a master alone. Every array starts at
// a multiple of 4096 bytes, so that a server can read it alone. Behind the arrays is room for a label
// (store/extent_label.h), so that one write has both.
#pragma once

#include <cstdint>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/placement/tier_kind.h"

namespace ballast::storage {

// In the order of storage; kernels/optimizer.h lists the moments of each optimizer.
enum class StateArray { kMaster = 0, kMoment1 = 1, kMoment2 = 2, kMoment3 = 3 };
inline constexpr int kStateArraysMax = 1 + kernels::kMomentsMax;

// The layout of a job's chunks: a pure function of the job's optimizer, of whether chunks have working copies, and of
// the chunk's form. Reads of working parameters of a chunk without a working copy round the master. A store
// without any working copies writes the trainer's own parameters, where the trainer lends them. A frozen chunk has a
// single array, kMaster: values in the working dtype, or quantized (kernels::Quantize), and no working copy. A chunk
// with a working copy may keep a remainder (OptimizerSpec::master): kMaster is then the masters' lower halves, and
// where 8-bit formats have scales, the bitmap of carries (kernels::SplitF32). A chunk without a copy keeps fp32. With
// lent masters kMaster is empty: each update names the trainer's memory, and nothing here reads masters.
class StateLayout {
 public:
  StateLayout() : StateLayout(kernels::OptimizerSpec()) {}
  explicit StateLayout(const kernels::OptimizerSpec& optimizer, bool working_copies = true,
                       StateForm form = StateForm::kFull)
      : optimizer_(form == StateForm::kMaster ? PlainSgd(optimizer) : optimizer),
        array_count_(form == StateForm::kFull ? 1 + kernels::MomentCount(optimizer) : 1),
        has_working_copies_(working_copies),
        form_(form) {}

  // The layout of the same store's chunks of another form, and of those without a working copy. REQUIRES: this is of
  // kFull, where `form` is another.
  StateLayout Of(StateForm form) const { return StateLayout(optimizer_, has_working_copies_, form); }
  StateLayout WithoutWorkingCopy() const { return StateLayout(optimizer_, false, form_); }
  // The layout of the same state that is whole without a working copy.
  StateLayout Whole() const { return keeps_remainder() ? WithoutWorkingCopy() : *this; }
  StateLayout Of(StateForm form, const ChunkPlacement& placement) const {
    return placement.working.has_value() ? Of(form) : Of(form).WithoutWorkingCopy();
  }

  // What updates these chunks: the job's optimizer, or SGD without momentum (kMaster).
  const kernels::OptimizerSpec& optimizer() const { return optimizer_; }
  int array_count() const { return array_count_; }
  StateForm form() const { return form_; }

  // Bytes of the first `elements` values of an array, and of their scales, which 8-bit formats have.
  uint64_t ValueBytes(StateArray array, uint64_t elements) const {
    if (array != StateArray::kMaster) return kernels::MomentBytes(optimizer_.moments, elements);
    if (form_ == StateForm::kQ8) return kernels::QuantBytes(kernels::QuantFormat::kInt8, elements);
    if (lends_master()) return 0;
    if (keeps_remainder()) return elements * sizeof(uint16_t);
    return elements * (!IsFrozen(form_) ? sizeof(float) : working_element_bytes());
  }
  uint64_t ScaleBytes(StateArray array, uint64_t elements) const {
    if (array != StateArray::kMaster) return kernels::MomentScaleBytes(optimizer_.moments, elements);
    if (keeps_remainder()) return kernels::CarryBytes(elements);
    return form_ == StateForm::kQ8 ? kernels::QuantScales(elements) * sizeof(float) : 0;
  }
  // Bytes of an array in a chunk of `elements`: without padding (UsedBytes) and with padding (ArrayBytes).
  uint64_t UsedBytes(StateArray array, uint64_t elements) const {
    const uint64_t scales = ScaleBytes(array, elements);
    return scales == 0 ? ValueBytes(array, elements) : ScalesAt(array, elements) + scales;
  }
  uint64_t ArrayBytes(StateArray array, uint64_t elements) const { return Pad(UsedBytes(array, elements)); }
  // Offset of an array from the start of the state.
  uint64_t ArrayAt(StateArray array, uint64_t elements) const {
    const auto before = static_cast<uint64_t>(array);
    if (before == 0) return 0;
    return ArrayBytes(StateArray::kMaster, elements) + (before - 1) * ArrayBytes(StateArray::kMoment1, elements);
  }
  // Offset of an array's scales from its start.
  uint64_t ScalesAt(StateArray array, uint64_t elements) const {
    return (ValueBytes(array, elements) + kScaleAlign - 1) / kScaleAlign * kScaleAlign;
  }

  uint64_t LabelAt(uint64_t elements) const { return ArrayAt(static_cast<StateArray>(array_count_), elements); }

  // A chunk's bytes in a tier: for its state with the label, and for its working copy. A gap (PlacedChunk) takes none.
  uint64_t StateBytes(uint64_t elements) const { return elements == 0 ? 0 : LabelAt(elements) + kLabelBytes; }
  uint64_t WorkingBytes(uint64_t elements) const { return working_copies() ? Pad(ParameterBytes(elements)) : 0; }
  // Bytes of `elements` working parameters, from a multiple of the dtype's grain on.
  uint64_t ParameterBytes(uint64_t elements) const { return kernels::BytesOf(optimizer_.working, elements); }
  // True if the chunk has a working copy in addition to its state.
  bool working_copies() const { return has_working_copies_ && !IsFrozen(form_); }
  // Whether the master is its working copy and a remainder.
  bool keeps_remainder() const { return working_copies() && optimizer_.master == kernels::MasterFormat::kRemainder; }

  // Whether the master is only in the trainer's memory. Such a layout has no working copies.
  bool lends_master() const { return optimizer_.master == kernels::MasterFormat::kLent && !IsFrozen(form_); }

  static constexpr uint64_t kLabelBytes = 4096;

  uint64_t gradient_element_bytes() const { return kernels::ElementBytes(optimizer_.gradient); }
  // REQUIRES: the working dtype has no scales. Chunks with frozen values have none.
  uint64_t working_element_bytes() const { return kernels::ElementBytes(optimizer_.working); }

 private:
  static kernels::OptimizerSpec PlainSgd(kernels::OptimizerSpec optimizer) {
    optimizer.kind = kernels::OptimizerKind::kSgd;
    optimizer.amsgrad = optimizer.momentum = optimizer.nesterov = false;
    return optimizer;
  }

  static constexpr uint64_t kPadBytes = 4096;
  static constexpr uint64_t kScaleAlign = 64;
  static constexpr uint64_t Pad(uint64_t bytes) { return (bytes + kPadBytes - 1) / kPadBytes * kPadBytes; }

  kernels::OptimizerSpec optimizer_;
  int array_count_;
  bool has_working_copies_;
  StateForm form_;
};

// A chunk's state at `base`, in the host's memory or the GPU's.
struct StateView {
  const StateLayout* layout = nullptr;
  std::byte* base = nullptr;
  uint64_t elements = 0;

  std::byte* array(StateArray which) const { return base + layout->ArrayAt(which, elements); }
  // REQUIRES: the layout keeps no remainder, and lends no master.
  float* master() const { return reinterpret_cast<float*>(base); }
  // Moment `index` (from 0), from element `at` on. REQUIRES: `at` is a multiple of kernels::kMomentBlock if the format
  // has scales.
  kernels::MomentSpan moment(int index, uint64_t at) const {
    const auto which = static_cast<StateArray>(index + 1);
    std::byte* const begin = array(which);
    return {
        .values = begin + layout->ValueBytes(which, at),
        .scales = reinterpret_cast<float*>(begin + layout->ScalesAt(which, elements) + layout->ScaleBytes(which, at))};
  }
};

}  // namespace ballast::storage
