#include "ballast/storage/update/moment_values.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/update/state_update.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kGatheredElements = uint64_t{1} << 12;
static_assert(kGatheredElements % kernels::kMomentBlock == 0);

}  // namespace

absl::Status ForMomentPieces(const ChunkUpdate& update, const StateView& state,
                             absl::FunctionRef<absl::Status(const MomentPiece&)> put) {
  const kernels::OptimizerSpec& optimizer = state.layout->optimizer();
  const int index = static_cast<int>(update.values_of) - 1;
  std::vector<const ChunkUpdate::Values*> parts;
  for (const ChunkUpdate::Values& values : update.values) {
    if (!values.values.empty()) parts.push_back(&values);
  }
  std::sort(parts.begin(), parts.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
  alignas(64) float gathered[kGatheredElements];
  alignas(64) std::byte coded[kGatheredElements * sizeof(float)];
  float scales[kGatheredElements / kernels::kMomentBlock];
  uint64_t begin = 0, count = 0;  // of what is gathered
  const auto flush = [&] {
    if (count == 0) return absl::OkStatus();
    kernels::WriteMoment(optimizer, index, RandomAt(update, begin), {gathered, count}, {coded, scales});
    const uint64_t scale_bytes = kernels::MomentScaleBytes(optimizer.moments, count);
    const MomentPiece piece{.values = {coded, kernels::MomentBytes(optimizer.moments, count)},
                            .scales = {reinterpret_cast<const std::byte*>(scales), scale_bytes},
                            .to = state.moment(index, begin)};
    count = 0;
    return put(piece);
  };
  for (const ChunkUpdate::Values* part : parts) {
    if (part->begin != begin + count) BALLAST_RETURN_IF_ERROR(flush());
    for (absl::Span<const float> rest = part->values; !rest.empty();) {
      if (count == kGatheredElements) BALLAST_RETURN_IF_ERROR(flush());
      if (count == 0) begin = part->begin + (part->values.size() - rest.size());
      const uint64_t taken = std::min<uint64_t>(rest.size(), kGatheredElements - count);
      std::copy_n(rest.begin(), taken, gathered + count);
      count += taken;
      rest.remove_prefix(taken);
    }
  }
  return flush();
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
