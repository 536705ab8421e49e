#include "ballast/storage/placement/step_prediction.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/storage/placement/step_events.h"

namespace ballast::storage {
namespace {

// A durable step syncs its prepared record, the versions that it wrote, and their entries in the catalog.
constexpr double kSyncsPerStep = 3;

// Gradients that are read ahead at a time (LogReads::kReadsMax), if there is memory for them.
constexpr uint64_t kReadBackSlots = 8;

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
  const uint64_t passing =
      kernels::BytesOf(optimizer.gradient, kElements) + kernels::BytesOf(optimizer.working, kElements);
  return 2 * sizeof(float) + static_cast<double>(2 * moments + passing) / kElements;
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
  // `amount` of `what` at `per_second`; where the profile has no speed, 0, and `what` is named.
  double Seconds(double amount, double per_second, const char* what);
  ChunkWork WorkOf(const PlacedChunk& chunk);
  void CountDisk(absl::Span<const ChunkWork> work, double logged);
  void CountPulls(const PlacedChunk& chunk);
  DiskSpeeds Disk() const;
  SideBySide BothBusy() const;

  const StepShape& shape_;
  const StateLayout& layout_;
  const double update_speed_ = UpdateSpeed(shape_, layout_.optimizer());
  const double digest_speed_ =
      SpeedOf(shape_.machine->digest_bytes_per_s.one_thread, shape_.machine->digest_bytes_per_s.all_threads, shape_);
  double logged_ = 0;
  uint64_t slot_bytes_ = 0;
  StepPrediction out_;
};

constexpr char kReads[] = "reads of the disk", kWrites[] = "writes of the disk";
constexpr char kRounding[] = "copies in dram";
constexpr char kBoth[] = "reads beside writes of the disk", kLink[] = "the GPU's link";
constexpr double kNoLimit = 1e18;  // bytes per second

double Prediction::Seconds(double amount, double per_second, const char* what) {
  if (amount <= 0) return 0;
  if (per_second > 0) return amount / per_second;
  if (std::find(out_.unmeasured.begin(), out_.unmeasured.end(), what) == out_.unmeasured.end()) {
    out_.unmeasured.emplace_back(what);
  }
  return 0;
}

ChunkWork Prediction::WorkOf(const PlacedChunk& chunk) {
  const MachineProfile& m = *shape_.machine;
  const auto elements = static_cast<double>(chunk.elements);
  const uint64_t state_bytes = layout_.Of(chunk.form, chunk.placement).StateBytes(chunk.elements);
  const auto state = static_cast<double>(state_bytes);
  const double gradient = elements * static_cast<double>(layout_.gradient_element_bytes());
  const double flushed = shape_.durable ? state * shape_.flushed_share : 0;
  ChunkWork work{.gradient_read = gradient * shape_.read_back_share};
  logged_ += shape_.durable && shape_.logged ? gradient : work.gradient_read;
  double digested = work.gradient_read, link = 0;
  switch (chunk.placement.state) {
    case TierKind::kNvme:
      work.state_read = work.stored = state;
      slot_bytes_ = std::max(slot_bytes_, state_bytes);
      digested += 2 * state;  // after its read and before its write
      break;
    case TierKind::kDram:
      work.flushed = flushed;
      digested += flushed;
      break;
    case TierKind::kHbm:
      work.spilled = flushed;
      digested += flushed;
      link = Seconds(gradient, static_cast<double>(m.gpu_in_bytes_per_s), kLink);
      const bool copied = chunk.placement.working != TierKind::kHbm;
      const double out = flushed + (copied ? static_cast<double>(layout_.ParameterBytes(chunk.elements)) : 0);
      link += Seconds(out, static_cast<double>(m.gpu_out_bytes_per_s), kLink);
      Seconds(elements, 0, "the optimizer on the GPU");
      break;
  }
  const bool on_device = chunk.placement.state == TierKind::kHbm;
  const double computed =
      (on_device ? 0 : Seconds(elements, update_speed_, "the optimizer")) + Seconds(digested, digest_speed_, "digests");
  work.busy = computed + link;
  out_.compute += computed;
  out_.gpu_link += link;
  return work;
}

void Prediction::CountDisk(absl::Span<const ChunkWork> work, double logged) {
  const MachineProfile& m = *shape_.machine;
  const auto read_speed = static_cast<double>(m.disk_read_bytes_per_s);
  const auto write_speed = static_cast<double>(m.disk_write_bytes_per_s);
  double read = 0, written = 0;
  for (const ChunkWork& chunk : work) {
    read += chunk.gradient_read + chunk.state_read;
    written += chunk.stored + chunk.flushed + chunk.spilled;
  }
  out_.disk_read = Seconds(read, read_speed, kReads);
  out_.disk_write = Seconds(written, write_speed, kWrites);
  out_.log_write = Seconds(logged, write_speed, kWrites);
  // As much of both as can be under way together, and the rest of either alone.
  const DiskSpeeds disk = Disk();
  const double beside_read = disk.BesideWrites(), beside_write = disk.BesideReads();
  const double together = std::min(read / beside_read, (written + logged) / beside_write);
  if (together > 0) Seconds(1, static_cast<double>(m.disk_mixed_bytes_per_s), kBoth);
  out_.disk = together + (read - together * beside_read) / disk.read +
              (written + logged - together * beside_write) / disk.write;
  // A device may be faster when reads and writes take turns.
  out_.disk_least = std::min(out_.disk, out_.disk_read + out_.disk_write + out_.log_write);
}

void Prediction::CountPulls(const PlacedChunk& chunk) {
  const MachineProfile& m = *shape_.machine;
  const bool frozen = IsFrozen(chunk.form);
  if (!frozen && chunk.placement.working.has_value()) return;
  const StateLayout layout = layout_.Of(chunk.form, chunk.placement);
  const double read = shape_.passes * static_cast<double>(layout.ArrayBytes(StateArray::kMaster, chunk.elements));
  if (chunk.placement.state == TierKind::kNvme) {
    out_.pulls += Seconds(read, static_cast<double>(m.disk_read_bytes_per_s), kReads);
  }
  if (frozen) return;
  const double written = shape_.passes * static_cast<double>(layout.ParameterBytes(chunk.elements));
  // A copy reads and writes the bytes that it counts once.
  out_.pulls += Seconds((read + written) / 2, static_cast<double>(m.dram_copy_bytes_per_s.one_thread), kRounding);
}

DiskSpeeds Prediction::Disk() const {
  const MachineProfile& m = *shape_.machine;
  const auto or_no_limit = [](uint64_t speed) { return speed > 0 ? static_cast<double>(speed) : kNoLimit; };
  return {.read = or_no_limit(m.disk_read_bytes_per_s),
          .write = or_no_limit(m.disk_write_bytes_per_s),
          .mixed = or_no_limit(m.disk_mixed_bytes_per_s)};
}

SideBySide Prediction::BothBusy() const {
  const MachineProfile& m = *shape_.machine;
  const auto part = [](uint64_t beside, uint64_t alone) {
    return beside == 0 || alone == 0 ? 1 : std::min(1.0, static_cast<double>(beside) / static_cast<double>(alone));
  };
  return {.worker = part(m.update_f32_beside_disk_elements_per_s, m.update_f32_elements_per_s.all_threads),
          .disk = part(m.disk_mixed_beside_update_bytes_per_s, m.disk_mixed_bytes_per_s)};
}

StepPrediction Prediction::Of(absl::Span<const PlacedChunk> chunks) {
  const MachineProfile& m = *shape_.machine;
  std::vector<ChunkWork> work;
  work.reserve(chunks.size());
  for (const PlacedChunk& chunk : chunks) {
    if (!IsFrozen(chunk.form)) work.push_back(WorkOf(chunk));  // no step updates the others
    CountPulls(chunk);
  }
  CountDisk(work, logged_);
  const uint64_t slots = slot_bytes_ == 0 ? 1 : shape_.staging_bytes / slot_bytes_;
  const StepTimes times = PlayStep(work, slots, kReadBackSlots, logged_, Disk(), BothBusy());
  if (shape_.durable && shape_.logged) out_.sync = kSyncsPerStep * 1e-6 * static_cast<double>(m.disk_append_p50_us);
  out_.disk_idle = times.disk_idle;
  out_.total = times.total + out_.sync;
  return std::move(out_);
}

}  // namespace

const char* StepPrediction::binds() const {
  if (disk_least > compute + gpu_link) return "the disk";
  return gpu_link > compute ? "the GPU's link" : "compute";
}

std::string StepPrediction::Explain() const {
  std::string text = absl::StrFormat(
      "A step should take %.3f s on this server, bound by %s, which alone takes %.3f s (the step is %.0f "
      "%% above that): compute %.3f s",
      total, binds(), bound(), bound() > 0 ? 100 * (total / bound() - 1) : 0, compute);
  if (gpu_link > 0) absl::StrAppendFormat(&text, ", GPU link %.3f s", gpu_link);
  if (disk > 0) {
    absl::StrAppendFormat(&text, "; the disk %.3f s, of which alone reads would take %.3f, writes %.3f, the log %.3f",
                          disk, disk_read, disk_write, log_write);
  }
  if (disk_idle > 0) absl::StrAppendFormat(&text, "; it waits for work for %.3f s", disk_idle);
  if (sync > 0) absl::StrAppendFormat(&text, "; syncs %.3f s", sync);
  absl::StrAppend(&text, ".");
  if (pulls > 0) absl::StrAppendFormat(&text, " Pulls need the disk and the processors for another %.3f s.", pulls);
  if (!unmeasured.empty()) {
    absl::StrAppend(&text, " Not counted, since the profile has no figure: ", absl::StrJoin(unmeasured, ", "), ".");
  }
  return text;
}

StepPrediction PredictStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks) {
  return Prediction(shape, layout).Of(chunks);
}

}  // namespace ballast::storage
