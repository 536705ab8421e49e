#include "ballast/storage/store/coded_values.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kGatheredElements = uint64_t{1} << 12;
static_assert(kGatheredElements % kernels::kMomentBlock == 0);

// Calls `put` for the update's values, as fp32, in the order of their place: runs of whole blocks of kMomentBlock, but
// for a segment's last block, and at most kGatheredElements. Values of one block may come in several parts.
absl::Status ForBlocks(const ChunkUpdate& update, kernels::Dtype narrow,
                       absl::FunctionRef<absl::Status(uint64_t begin, absl::Span<const float>)> put) {
  const uint64_t width = kernels::ElementBytes(narrow);
  std::vector<const ChunkUpdate::Values*> parts;
  for (const ChunkUpdate::Values& values : update.values) {
    if (values.count(width) > 0) parts.push_back(&values);
  }
  std::sort(parts.begin(), parts.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
  alignas(64) float gathered[kGatheredElements];
  uint64_t begin = 0, count = 0;  // of what is gathered
  const auto flush = [&] {
    return count == 0 ? absl::OkStatus() : put(begin, {gathered, std::exchange(count, uint64_t{0})});
  };
  for (const ChunkUpdate::Values* part : parts) {
    if (part->begin != begin + count) BALLAST_RETURN_IF_ERROR(flush());
    const uint64_t all = part->count(width);
    for (uint64_t done = 0; done < all;) {
      if (count == kGatheredElements) BALLAST_RETURN_IF_ERROR(flush());
      if (count == 0) begin = part->begin + done;
      const uint64_t taken = std::min(all - done, kGatheredElements - count);
      if (part->narrow.empty()) {
        std::copy_n(part->values.begin() + static_cast<std::ptrdiff_t>(done), taken, gathered + count);
      } else {
        kernels::ToF32(narrow, part->narrow.data() + done * width, {gathered + count, taken});
      }
      count += taken;
      done += taken;
    }
  }
  return flush();
}

}  // namespace

absl::Status ForMomentPieces(const ChunkUpdate& update, const StateView& state,
                             absl::FunctionRef<absl::Status(const MomentPiece&)> put) {
  const kernels::OptimizerSpec& optimizer = state.layout->optimizer();
  const int index = static_cast<int>(update.values_of) - 1;
  alignas(64) std::byte coded[kGatheredElements * sizeof(float)];
  float scales[kGatheredElements / kernels::kMomentBlock];
  return ForBlocks(update, optimizer.working, [&](uint64_t begin, absl::Span<const float> values) {
    const uint64_t count = values.size();
    kernels::WriteMoment(optimizer, index, RandomAt(update, begin), values, {coded, scales});
    const uint64_t scale_bytes = kernels::MomentScaleBytes(optimizer.moments, count);
    return put({.values = {coded, kernels::MomentBytes(optimizer.moments, count)},
                .scales = {reinterpret_cast<const std::byte*>(scales), scale_bytes},
                .to = state.moment(index, begin)});
  });
}

void WriteFrozen(const ChunkUpdate& update, const StateView& state) {
  const StateLayout& layout = *state.layout;
  const kernels::Dtype dtype = layout.optimizer().working;
  constexpr auto kArray = StateArray::kMaster;
  std::byte* const scales =
      state.base + (layout.form() == StateForm::kQ8 ? layout.ScalesAt(kArray, state.elements) : 0);
  const absl::Status written = ForBlocks(update, dtype, [&](uint64_t begin, absl::Span<const float> values) {
    std::byte* const to = state.base + layout.ValueBytes(kArray, begin);
    if (layout.form() == StateForm::kWorking) {
      kernels::FromF32(values, dtype, to);
      return absl::OkStatus();
    }
    kernels::Quantize(kernels::QuantFormat::kInt8, kernels::Dtype::kF32,
                      reinterpret_cast<const std::byte*>(values.data()), values.size(), to,
                      reinterpret_cast<float*>(scales + layout.ScaleBytes(kArray, begin)));
    return absl::OkStatus();
  });
  (void)written;  // copying cannot fail
  for (const ChunkUpdate::Values& values : update.values) {
    const uint64_t count = values.count(layout.working_element_bytes());
    const bool there = layout.form() == StateForm::kWorking && values.working == values.narrow.data();
    if (values.working == nullptr || there) continue;
    ReadFrozen(state, values.begin, count, dtype, values.working);
  }
}

void ReadFrozen(const StateView& state, uint64_t begin, uint64_t count, kernels::Dtype dtype, std::byte* to) {
  if (count == 0) return;  // `to` may be null
  const StateLayout& layout = *state.layout;
  constexpr auto kArray = StateArray::kMaster;
  if (layout.form() == StateForm::kWorking) {
    const std::byte* const from = state.base + layout.ValueBytes(kArray, begin);
    const kernels::Dtype working = layout.optimizer().working;
    if (dtype == working) {
      std::memcpy(to, from, count * kernels::ElementBytes(dtype));
    } else {
      kernels::ToF32(working, from, {reinterpret_cast<float*>(to), count});
    }
    return;
  }
  const std::byte* const scales = state.base + layout.ScalesAt(kArray, state.elements);
  const uint64_t width = kernels::ElementBytes(dtype);
  const auto read = [&](uint64_t at, uint64_t n, std::byte* into) {
    kernels::Dequantize(kernels::QuantFormat::kInt8, state.base + layout.ValueBytes(kArray, at),
                        reinterpret_cast<const float*>(scales + layout.ScaleBytes(kArray, at)), n, dtype, into);
  };
  // The first block, if the range begins amid it, then the rest.
  if (const uint64_t amid = begin % kernels::kQuantBlock; amid > 0) {
    alignas(64) std::byte block[kernels::kQuantBlock * sizeof(float)];
    const uint64_t taken = std::min(count, kernels::kQuantBlock - amid);
    read(begin - amid, amid + taken, block);
    std::memcpy(to, block + amid * width, taken * width);
    begin += taken;
    count -= taken;
    to += taken * width;
  }
  if (count > 0) read(begin, count, to);
}

void WriteMoments(const ChunkUpdate& update, const StateView& state) {
  const absl::Status copied = ForMomentPieces(update, state, [](const MomentPiece& piece) {
    std::memcpy(piece.to.values, piece.values.data(), piece.values.size());
    if (!piece.scales.empty()) std::memcpy(piece.to.scales, piece.scales.data(), piece.scales.size());
    return absl::OkStatus();
  });
  (void)copied;  // copying cannot fail
}

}  // namespace ballast::storage
