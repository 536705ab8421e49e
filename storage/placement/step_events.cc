#include "ballast/storage/placement/step_events.h"

#include <algorithm>
#include <array>
#include <limits>

namespace ballast::storage {
namespace {

// Transfers of one kind, one after the other in the order of the update.
struct Stream {
  double left = 0;  // of the transfer under way
  size_t next = 0;  // chunk of the next transfer, or of the one under way
  bool active() const { return left > 0; }
};

class Playing {
 public:
  Playing(absl::Span<const ChunkWork> work, uint64_t slots, uint64_t gradient_slots, double log_bytes,
          const DiskSpeeds& disk, const SideBySide& side_by_side)
      : work_(work),
        disk_(disk),
        side_by_side_(side_by_side),
        slots_(slots),
        gradient_slots_(gradient_slots),
        background_(log_bytes) {
    disk_left_ = log_bytes;
    for (const ChunkWork& w : work) disk_left_ += w.gradient_read + w.state_read + w.stored + w.flushed + w.spilled;
  }
  StepTimes Run();

 private:
  // Starts all that can be started. Every start may make room for another one.
  void Start();
  bool StartRead(Stream* stream, double ChunkWork::*bytes, uint64_t* slots);
  bool StartStore();
  bool StartWorker();
  bool Done() const {
    return worker_ == work_.size() && !stores_.active() && stores_.next == work_.size() && background_ <= 0;
  }
  void Advance();

  const absl::Span<const ChunkWork> work_;
  const DiskSpeeds disk_;
  const SideBySide side_by_side_;
  uint64_t slots_, gradient_slots_;  // free ones
  Stream states_, gradients_, stores_;
  double background_;   // bytes of the log and of flushes that may be written
  double disk_left_;    // bytes that are not read or written yet
  size_t worker_ = 0;   // the chunk being updated
  double busy_ = 0;     // seconds left of it
  double spill_ = 0;    // bytes left that the worker waits for
  bool begun_ = false;  // the worker has begun chunk `worker_`
  StepTimes times_;
};

bool Playing::StartRead(Stream* stream, double ChunkWork::*bytes, uint64_t* slots) {
  if (stream->active()) return false;
  while (stream->next < work_.size() && work_[stream->next].*bytes <= 0) ++stream->next;
  if (stream->next == work_.size() || *slots == 0) return false;
  --*slots;
  stream->left = work_[stream->next].*bytes;
  return true;
}

bool Playing::StartStore() {
  if (stores_.active()) return false;
  while (stores_.next < worker_ && work_[stores_.next].stored <= 0) ++stores_.next;
  if (stores_.next >= worker_) return false;
  stores_.left = work_[stores_.next].stored;
  return true;
}

bool Playing::StartWorker() {
  if (worker_ == work_.size()) return false;
  const ChunkWork& chunk = work_[worker_];
  if (!begun_) {
    // A stream's `next` is behind the chunk once its read has ended.
    if (chunk.state_read > 0 && states_.next <= worker_) return false;
    if (chunk.gradient_read > 0 && gradients_.next <= worker_) return false;
    begun_ = true;
    busy_ = chunk.busy;
    spill_ = chunk.spilled;
  }
  if (busy_ > 0 || spill_ > 0) return false;
  begun_ = false;
  if (chunk.gradient_read > 0) ++gradient_slots_;
  background_ += chunk.flushed;
  ++worker_;
  return true;
}

void Playing::Start() {
  bool started = true;
  while (started) {
    started = StartRead(&states_, &ChunkWork::state_read, &slots_);
    started = StartRead(&gradients_, &ChunkWork::gradient_read, &gradient_slots_) || started;
    started = StartWorker() || started;
    started = StartStore() || started;
  }
}

void Playing::Advance() {
  const bool spills = begun_ && busy_ <= 0 && spill_ > 0;
  const std::array<double*, 5> left = {&states_.left, &gradients_.left, &stores_.left, &background_, &spill_};
  const std::array<bool, 5> active = {states_.active(), gradients_.active(), stores_.active(), background_ > 0, spills};
  const int reads = active[0] + active[1], writes = active[2] + active[3] + active[4];
  const bool both = reads > 0 && writes > 0;
  const bool computes = begun_ && busy_ > 0, disturbed = computes && reads + writes > 0;
  const double worker = disturbed ? side_by_side_.worker : 1, speed = disturbed ? side_by_side_.disk : 1;
  const double read = speed * (both ? disk_.BesideWrites() : disk_.read) / std::max(reads, 1);
  const double write = speed * (both ? disk_.BesideReads() : disk_.write) / std::max(writes, 1);
  double seconds = std::numeric_limits<double>::max();
  if (computes) seconds = busy_ / worker;
  for (size_t i = 0; i < left.size(); ++i) {
    if (active[i]) seconds = std::min(seconds, *left[i] / (i < 2 ? read : write));
  }
  if (reads + writes == 0 && disk_left_ > 0.5) times_.disk_idle += seconds;
  times_.total += seconds;
  // Work that ends now ends exactly: rounding must not leave a crumb behind.
  const auto take = [](double* from, double amount) { *from = *from <= amount * (1 + 1e-12) ? 0 : *from - amount; };
  if (computes) take(&busy_, seconds * worker);
  for (size_t i = 0; i < left.size(); ++i) {
    if (!active[i]) continue;
    const double before = *left[i];
    take(left[i], seconds * (i < 2 ? read : write));
    disk_left_ -= before - *left[i];
  }
  if (active[0] && !states_.active()) ++states_.next;
  if (active[1] && !gradients_.active()) ++gradients_.next;
  if (active[2] && !stores_.active()) {
    ++stores_.next;
    ++slots_;
  }
}

StepTimes Playing::Run() {
  Start();
  while (!Done()) {
    Advance();
    Start();
  }
  return times_;
}

}  // namespace

StepTimes PlayStep(absl::Span<const ChunkWork> work, uint64_t slots, uint64_t gradient_slots, double log_bytes,
                   const DiskSpeeds& disk, const SideBySide& side_by_side) {
  return Playing(work, std::max<uint64_t>(slots, 1), std::max<uint64_t>(gradient_slots, 1), log_bytes, disk,
                 side_by_side)
      .Run();
}

}  // namespace ballast::storage
