#include "ballast/storage/placement/step_prediction.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ballast::storage {
namespace {

// A durable step syncs its prepared record, the versions that it wrote, and their entries in the catalog.
constexpr double kSyncsPerStep = 3;

// The speed of shape.threads threads: every thread adds its speed until memory is the limit.
double SpeedOf(uint64_t one, uint64_t all, const StepShape& shape) {
  if (shape.threads <= 1) return static_cast<double>(one);
  if (static_cast<uint64_t>(shape.threads) >= shape.machine->threads) return static_cast<double>(all);
  return std::min(static_cast<double>(one) * shape.threads, static_cast<double>(std::max(one, all)));
}

// Bytes that an update reads and writes per element, without padding.
double UpdateBytes(const kernels::OptimizerSpec& optimizer) {
  constexpr uint64_t kElements = uint64_t{1} << 20;
  const auto moments =
      static_cast<uint64_t>(kernels::MomentCount(optimizer)) *
      (kernels::MomentBytes(optimizer.moments, kElements) + kernels::MomentScaleBytes(optimizer.moments, kElements));
  return 2 * (sizeof(float) + static_cast<double>(moments) / kElements) +
         static_cast<double>(kernels::ElementBytes(optimizer.gradient) + kernels::ElementBytes(optimizer.working));
}

// Elements per second of the job's optimizer. AdamW was measured; other optimizers move their bytes at the same rate.
double UpdateSpeed(const StepShape& shape, const kernels::OptimizerSpec& optimizer) {
  const MachineProfile& m = *shape.machine;
  const kernels::MomentFormat formats[] = {kernels::MomentFormat::kF32, kernels::MomentFormat::kBf16,
                                           kernels::MomentFormat::kI8, kernels::MomentFormat::kF8};
  const std::pair<uint64_t, uint64_t> speeds[] = {
      {m.update_f32_elements_per_s.one_thread, m.update_f32_elements_per_s.all_threads},
      {m.update_bf16_elements_per_s.one_thread, m.update_bf16_elements_per_s.all_threads},
      {m.update_i8_elements_per_s.one_thread, m.update_i8_elements_per_s.all_threads},
      {m.update_f8_elements_per_s.one_thread, m.update_f8_elements_per_s.all_threads}};
  const auto at = static_cast<size_t>(std::find(std::begin(formats), std::end(formats), optimizer.moments) - formats);
  const kernels::OptimizerSpec measured{.moments = optimizer.moments};
  return SpeedOf(speeds[at].first, speeds[at].second, shape) * UpdateBytes(measured) / UpdateBytes(optimizer);
}

class Prediction {
 public:
  Prediction(const StepShape& shape, const StateLayout& layout) : shape_(shape), layout_(layout) {}
  StepPrediction Of(absl::Span<const PlacedChunk> chunks);

 private:
  // `amount` of `what` at `per_second`.
  double Seconds(double amount, double per_second, const char* what);
  double DiskSeconds(double read, double written);

  const StepShape& shape_;
  const StateLayout& layout_;
  StepPrediction out_;
};

double Prediction::Seconds(double amount, double per_second, const char* what) {
  if (amount <= 0) return 0;
  if (per_second > 0) return amount / per_second;
  if (std::find(out_.unmeasured.begin(), out_.unmeasured.end(), what) == out_.unmeasured.end()) {
    out_.unmeasured.emplace_back(what);
  }
  return 0;
}

double Prediction::DiskSeconds(double read, double written) {
  const MachineProfile& m = *shape_.machine;
  const double both = std::min(read, written);
  return Seconds(2 * both, static_cast<double>(m.disk_mixed_bytes_per_s), "reads beside writes of the disk") +
         Seconds(read - both, static_cast<double>(m.disk_read_bytes_per_s), "reads of the disk") +
         Seconds(written - both, static_cast<double>(m.disk_write_bytes_per_s), "writes of the disk");
}

StepPrediction Prediction::Of(absl::Span<const PlacedChunk> chunks) {
  const MachineProfile& m = *shape_.machine;
  const double update_speed = UpdateSpeed(shape_, layout_.optimizer());
  const double digest_speed = SpeedOf(m.digest_bytes_per_s.one_thread, m.digest_bytes_per_s.all_threads, shape_);
  const auto gradient_bytes = static_cast<double>(layout_.gradient_element_bytes());
  const auto working_bytes = static_cast<double>(layout_.working_element_bytes());
  double read = 0, written = 0, flushed = 0, logged = 0, in = 0, out = 0, front = 0, slot = 0;
  for (const PlacedChunk& chunk : chunks) {
    if (chunk.frozen != Frozen::kNo) continue;  // no step updates it
    const auto elements = static_cast<double>(chunk.elements);
    const auto state = static_cast<double>(layout_.StateBytes(chunk.elements));
    const double read_back = elements * gradient_bytes * shape_.read_back_share;
    logged += shape_.durable && shape_.logged ? elements * gradient_bytes : read_back;
    read += read_back;
    if (chunk.placement.state == TierKind::kNvme) {
      if (read <= 0) front = out_.compute;
      slot = std::max(slot, state);
      read += state;
      written += state;
    } else if (shape_.durable) {
      flushed += state * shape_.flushed_share;
    }
    // State on NVMe is digested after its read and before its write, flushed state only before its write.
    const double digested = chunk.placement.state == TierKind::kNvme ? 2 * state
                            : shape_.durable                         ? state * shape_.flushed_share
                                                                     : 0;
    if (chunk.placement.state != TierKind::kHbm) {
      out_.compute += Seconds(elements, update_speed, "the optimizer");
    } else {
      in += elements * gradient_bytes;
      if (chunk.placement.working != TierKind::kHbm) out += elements * working_bytes;
      Seconds(elements, 0, "the optimizer on the GPU");
    }
    out_.compute += Seconds(digested + read_back, digest_speed, "digests");
  }
  out_.disk_read = Seconds(read, static_cast<double>(m.disk_read_bytes_per_s), "reads of the disk");
  const auto write_speed = static_cast<double>(m.disk_write_bytes_per_s);
  out_.disk_write = Seconds(written + flushed, write_speed, "writes of the disk");
  out_.log_write = Seconds(logged, write_speed, "writes of the disk");
  out_.disk = DiskSeconds(read, written + flushed + logged);
  if (slot > 0) {
    // Meanwhile the disk may fill the staging buffers and write the log and flushes.
    const uint64_t slots = shape_.staging_bytes / static_cast<uint64_t>(slot);
    const double ahead = std::min(read, static_cast<double>(slots) * slot);
    const double meanwhile = Seconds(ahead, static_cast<double>(m.disk_read_bytes_per_s), "reads of the disk") +
                             Seconds(flushed + logged, write_speed, "writes of the disk");
    out_.disk_idle = std::max(0.0, front - meanwhile);
  }
  if (shape_.durable && shape_.logged) out_.sync = kSyncsPerStep * 1e-6 * static_cast<double>(m.disk_append_p50_us);
  out_.gpu_link = Seconds(in, static_cast<double>(m.gpu_in_bytes_per_s), "the GPU's link") +
                  Seconds(out, static_cast<double>(m.gpu_out_bytes_per_s), "the GPU's link");
  out_.total = std::max(out_.compute + out_.gpu_link, out_.disk_idle + out_.disk) + out_.sync;
  return std::move(out_);
}

}  // namespace

std::string StepPrediction::Explain() const {
  const double work = compute + gpu_link, transfers = disk_idle + disk;
  std::string text = absl::StrFormat("A step should take %.3f s on this server, bound by %s: compute %.3f s", total,
                                     transfers > work     ? "the disk"
                                     : gpu_link > compute ? "the GPU's link"
                                                          : "compute",
                                     compute);
  if (gpu_link > 0) absl::StrAppendFormat(&text, ", GPU link %.3f s", gpu_link);
  if (disk > 0) {
    absl::StrAppendFormat(&text, "; the disk %.3f s, of which alone reads would take %.3f, writes %.3f, the log %.3f",
                          disk, disk_read, disk_write, log_write);
  }
  if (disk_idle > 0) absl::StrAppendFormat(&text, "; it is idle for the first %.3f s", disk_idle);
  if (sync > 0) absl::StrAppendFormat(&text, "; syncs %.3f s", sync);
  absl::StrAppend(&text, ".");
  if (!unmeasured.empty()) {
    absl::StrAppend(&text, " Not counted, since the profile has no figure: ", absl::StrJoin(unmeasured, ", "), ".");
  }
  return text;
}

StepPrediction PredictStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks) {
  return Prediction(shape, layout).Of(chunks);
}

}  // namespace ballast::storage
