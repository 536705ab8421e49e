#include "ballast/storage/placement/plan_cost.h"

#include <vector>

namespace ballast::storage {

void Predict(const PlanRequest& request, Plan* plan) {
  if (request.shape.machine == nullptr) return;
  std::vector<PlacedChunk> chunks = request.placed;
  uint64_t before = 0;
  for (const PlacedChunk& chunk : chunks) before += !IsFrozen(chunk.form) ? chunk.elements : 0;
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    chunks.push_back({request.elements[i], plan->chunks[i], request.LayoutOf(i).form()});
  }
  StepShape shape = request.shape;
  shape.durable = request.durable;
  const uint64_t trained = request.TrainedElements();
  if (plan->reads_back && trained > 0) {
    const double read_back =
        static_cast<double>(plan->read_back_bytes) / static_cast<double>(request.layout.gradient_element_bytes());
    shape.read_back_share =
        (shape.read_back_share * static_cast<double>(before) + read_back) / static_cast<double>(before + trained);
  } else if (request.present.empty() && before + trained > 0) {
    shape.read_back_share *= static_cast<double>(before) / static_cast<double>(before + trained);
  }
  plan->prediction = PredictStep(shape, request.layout, chunks);
}

double MoveSeconds(const PlanRequest& request, const Plan& plan) {
  if (request.present.empty() || request.shape.machine == nullptr) return 0;
  double read = 0, written = 0, in = 0, out = 0;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const TierKind from = request.present[i].state, to = plan.chunks[i].state;
    if (from == to) continue;
    const auto bytes = static_cast<double>(request.LayoutOf(i).StateBytes(request.elements[i]));
    if (from == TierKind::kNvme) read += bytes;
    if (from == TierKind::kHbm) out += bytes;
    if (to == TierKind::kNvme) written += bytes;
    if (to == TierKind::kHbm) in += bytes;
  }
  const MachineProfile& m = *request.shape.machine;
  const auto seconds = [](double bytes, uint64_t per_second) {
    return per_second == 0 ? 0 : bytes / static_cast<double>(per_second);
  };
  // A move waits for each of its transfers.
  return seconds(read, m.disk_read_bytes_per_s) + seconds(written, m.disk_write_bytes_per_s) +
         seconds(in, m.gpu_in_bytes_per_s) + seconds(out, m.gpu_out_bytes_per_s);
}

double CostOf(const PlanRequest& request, const Plan& plan) {
  const double step = plan.prediction.has_value() ? plan.prediction->total + plan.prediction->pulls : 0;
  return kStepsToRepay * step + MoveSeconds(request, plan);
}

}  // namespace ballast::storage
