#include "ballast/storage/store/device_update.h"

#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/store/coded_values.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::storage {

absl::Status QueueUpdate(const ChunkUpdate& update, const StoredChunk& chunk, HbmQueue& queue) {
  const StateView state = chunk.View(chunk.memory.state());
  const kernels::OptimizerSpec& optimizer = chunk.layout.optimizer();
  const auto working = [&](uint64_t at) { return chunk.memory.WorkingOfDevice(chunk.layout.ParameterBytes(at)); };
  for (const ChunkUpdate::Values& values : update.values) {
    const auto* from = reinterpret_cast<const std::byte*>(values.values.data());
    auto* to = reinterpret_cast<std::byte*>(state.master() + values.begin);
    BALLAST_RETURN_IF_ERROR(queue.CopyIn({from, values.values.size() * sizeof(float)}, to));
  }
  // Rounds the whole chunk: values may begin anywhere, the device kernel may not.
  if (!update.values.empty()) {
    BALLAST_RETURN_IF_ERROR(queue.Round(state.master(), chunk.elements, optimizer.working, working(0)));
  }
  std::vector<HbmSegment> together;  // segments whose gradients are parts of the chunk's gradient
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t at = segment.begin, n = segment.end - segment.begin;
    if (n == 0) continue;
    const HbmSegment one{.coefficients = segment.coefficients,
                         .random = RandomAt(update, at),
                         .span = SpanOf(update, segment, state, state.master() + at, nullptr, at, n),
                         .working = working(at)};
    if (segment.gradient == nullptr) {
      together.push_back(one);
    } else {
      BALLAST_RETURN_IF_ERROR(queue.Update(optimizer, {&one, 1}));
    }
  }
  return queue.Update(optimizer, together);
}

absl::Status UpdateOnDevice(HbmTier* hbm, const ChunkUpdate& update, StoredChunk& chunk) {
  if (update.values_of == StateArray::kMaster) {
    return hbm->Run([&](HbmQueue& queue) { return QueueUpdate(update, chunk, queue); });
  }
  return ForMomentPieces(update, chunk.View(chunk.memory.state()), [hbm](const MomentPiece& piece) {
    return hbm->Run([&](HbmQueue& queue) -> absl::Status {
      BALLAST_RETURN_IF_ERROR(queue.CopyIn(piece.values, piece.to.values));
      if (piece.scales.empty()) return absl::OkStatus();
      return queue.CopyIn(piece.scales, reinterpret_cast<std::byte*>(piece.to.scales));
    });
  });
}

}  // namespace ballast::storage
