#include "ballast/tests/storage/placement/step_simulation.h"

#include <algorithm>
#include <list>

namespace ballast::storage {
namespace {

enum class Kind { kState, kGradient, kStore, kFlush, kSpill, kLog };
bool Reads(Kind kind) { return kind == Kind::kState || kind == Kind::kGradient; }

struct Transfer {
  Kind kind;
  size_t chunk = 0;
  double left = 0;
};

constexpr double kPart = 4 << 20, kLoadingMax = 24 << 20;

class Simulation {
 public:
  Simulation(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks)
      : shape_(shape), layout_(layout), chunks_(chunks), read_(chunks.size()), gradient_(chunks.size()) {
    for (const PlacedChunk& chunk : chunks) {
      const double gradient = Gradient(chunk);
      log_ += shape.durable && shape.logged ? gradient : gradient * shape.read_back_share;
      const bool reads = chunk.placement.state == TierKind::kNvme;
      if (reads) slot_ = std::max(slot_, layout.StateBytes(chunk.elements));
    }
    free_ = slot_ == 0 ? 0 : std::max<uint64_t>(shape.staging_bytes / slot_, 1);
  }
  double Run();

 private:
  double State(size_t i) const { return static_cast<double>(layout_.StateBytes(chunks_[i].elements)); }
  double Gradient(const PlacedChunk& chunk) const {
    return static_cast<double>(chunk.elements * layout_.gradient_element_bytes());
  }
  double Flushed(size_t i) const { return shape_.durable ? shape_.flushed_share * State(i) : 0; }
  double BusySeconds(size_t i) const;
  bool InFlight(Kind kind) const {
    return std::any_of(requests_.begin(), requests_.end(), [&](const Transfer& r) { return r.kind == kind; });
  }
  void Submit();
  void Finish(const Transfer& request);
  void Tick();

  const StepShape& shape_;
  const StateLayout& layout_;
  const absl::Span<const PlacedChunk> chunks_;
  std::vector<char> read_, gradient_;  // has arrived
  std::list<Transfer> requests_;
  double loading_ = 0, log_ = 0, flush_ = 0, now_ = 0, busy_ = 0;
  uint64_t slot_ = 0, free_ = 0, gradients_ = 0;  // free slots; gradients in memory or on their way
  size_t next_state_ = 0, next_gradient_ = 0, at_ = 0;
  enum class Worker { kWaits, kComputes, kSpills } worker_ = Worker::kWaits;
};

double Simulation::BusySeconds(size_t i) const {
  const MachineProfile& m = *shape_.machine;
  const PlacedChunk& chunk = chunks_[i];
  const auto elements = static_cast<double>(chunk.elements);
  // All threads: the tests' machines have as many as their servers.
  double digested = shape_.read_back_share * Gradient(chunk);
  double seconds = 0;
  if (chunk.placement.state == TierKind::kHbm) {
    seconds += Gradient(chunk) / static_cast<double>(m.gpu_in_bytes_per_s);
    const double out = Flushed(i) + (chunk.placement.working == TierKind::kHbm ? 0 : 2 * elements);
    seconds += out / static_cast<double>(m.gpu_out_bytes_per_s);
    digested += Flushed(i);
  } else {
    seconds += elements / static_cast<double>(m.update_f32_elements_per_s.all_threads);
    digested += chunk.placement.state == TierKind::kNvme ? 2 * State(i) : Flushed(i);
  }
  return seconds + digested / static_cast<double>(m.digest_bytes_per_s.all_threads);
}

void Simulation::Submit() {
  for (; next_state_ < chunks_.size(); ++next_state_) {
    if (chunks_[next_state_].placement.state != TierKind::kNvme) continue;
    if (free_ == 0 || loading_ >= kLoadingMax) break;
    --free_;
    loading_ += State(next_state_);
    requests_.push_back({Kind::kState, next_state_, State(next_state_)});
  }
  for (; shape_.read_back_share > 0 && next_gradient_ < chunks_.size() && gradients_ < 8; ++next_gradient_) {
    ++gradients_;
    requests_.push_back({Kind::kGradient, next_gradient_, shape_.read_back_share * Gradient(chunks_[next_gradient_])});
  }
  const auto part = [&](Kind kind, double* left) {
    if (*left <= 0 || InFlight(kind)) return;
    const double bytes = std::min(*left, kPart);
    *left -= bytes;
    requests_.push_back({kind, 0, bytes});
  };
  part(Kind::kFlush, &flush_);
  part(Kind::kLog, &log_);
  if (worker_ != Worker::kWaits || at_ == chunks_.size()) return;
  if (chunks_[at_].placement.state == TierKind::kNvme && !read_[at_]) return;
  if (shape_.read_back_share > 0 && !gradient_[at_]) return;
  worker_ = Worker::kComputes;
  busy_ = BusySeconds(at_);
}

void Simulation::Finish(const Transfer& request) {
  switch (request.kind) {
    case Kind::kState:
      read_[request.chunk] = 1;
      loading_ -= State(request.chunk);
      break;
    case Kind::kGradient:
      gradient_[request.chunk] = 1;
      break;
    case Kind::kStore:
      ++free_;
      break;
    case Kind::kSpill:
      worker_ = Worker::kWaits;
      ++at_;
      break;
    case Kind::kFlush:
    case Kind::kLog:
      break;
  }
}

void Simulation::Tick() {
  const MachineProfile& m = *shape_.machine;
  double reads = 0, writes = 0;
  for (const Transfer& r : requests_) ++(Reads(r.kind) ? reads : writes);
  double read = static_cast<double>(m.disk_read_bytes_per_s), write = static_cast<double>(m.disk_write_bytes_per_s);
  if (reads > 0 && writes > 0) {
    read = std::min(read, static_cast<double>(m.disk_mixed_bytes_per_s) / 2);
    write = std::min(write, static_cast<double>(m.disk_mixed_bytes_per_s) / 2);
  }
  double worker = 1;
  if (worker_ == Worker::kComputes && !requests_.empty() && m.update_f32_beside_disk_elements_per_s > 0) {
    worker = static_cast<double>(m.update_f32_beside_disk_elements_per_s) /
             static_cast<double>(m.update_f32_elements_per_s.all_threads);
    const double disk =
        static_cast<double>(m.disk_mixed_beside_update_bytes_per_s) / static_cast<double>(m.disk_mixed_bytes_per_s);
    read *= disk;
    write *= disk;
  }
  double seconds = worker_ == Worker::kComputes ? busy_ / worker : 1e9;
  for (const Transfer& r : requests_)
    seconds = std::min(seconds, r.left / (Reads(r.kind) ? read / reads : write / writes));
  now_ += seconds;
  busy_ -= seconds * worker;
  std::vector<Transfer> finished;
  for (auto r = requests_.begin(); r != requests_.end();) {
    r->left -= seconds * (Reads(r->kind) ? read / reads : write / writes);
    if (r->left <= 0.01) {
      finished.push_back(*r);
      r = requests_.erase(r);
    } else {
      ++r;
    }
  }
  for (const Transfer& r : finished) Finish(r);
  if (worker_ != Worker::kComputes || busy_ > 1e-12) return;
  worker_ = Worker::kWaits;
  if (shape_.read_back_share > 0) --gradients_;
  const TierKind tier = chunks_[at_].placement.state;
  if (tier == TierKind::kHbm && Flushed(at_) > 0) {
    worker_ = Worker::kSpills;
    requests_.push_back({Kind::kSpill, at_, Flushed(at_)});
    return;
  }
  if (tier == TierKind::kNvme) requests_.push_back({Kind::kStore, at_, State(at_)});
  if (tier == TierKind::kDram) flush_ += Flushed(at_);
  ++at_;
}

double Simulation::Run() {
  for (;;) {
    Submit();
    if (at_ == chunks_.size() && requests_.empty()) return now_;
    Tick();
  }
}

}  // namespace

double SimulateStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks) {
  return Simulation(shape, layout, chunks).Run();
}

}  // namespace ballast::storage
