#include "ballast/storage/placement/step_events.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <vector>

namespace ballast::storage {
namespace {

// State reads that are in flight together (UpdatePipeline).
constexpr double kLoadingMax = 24 << 20;

struct Transfer {
  size_t chunk = 0;
  double left = 0;
};

// Transfers of one kind that begin in the order of the update and go on side by side.
struct Stream {
  std::vector<Transfer> active;
  size_t next = 0;  // chunk of the next transfer to begin
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
        waits_for_(work.size(), 0),
        log_(log_bytes) {
    disk_left_ = log_bytes;
    for (size_t i = 0; i < work.size(); ++i) {
      const ChunkWork& w = work[i];
      disk_left_ += w.gradient_read + w.state_read + w.stored + w.flushed + w.spilled;
      waits_for_[i] = static_cast<char>((w.gradient_read > 0) + (w.state_read > 0));
    }
  }
  StepTimes Run();

 private:
  // Starts all that can be started. Every start may make room for another one.
  void Start();
  void StartReads();
  bool StartWorker();
  bool Done() const { return worker_ == work_.size() && stores_.active.empty() && log_ <= 0 && flush_ <= 0; }
  // What goes on, and how fast: seconds of the worker's work, and bytes of each transfer, per second.
  struct Pace {
    bool computes = false;
    std::array<bool, 3> writing = {};  // the log, flushes, the spill
    size_t reads = 0, writes = 0;      // side by side
    double worker = 1, read = 0, write = 0;
  };
  Pace PaceNow() const;
  // Seconds until the first of them ends.
  double UntilNextEnd(const Pace& now) const;
  void Advance();
  // Takes `amount` bytes from each transfer; `ended` is called with the chunks of those that end.
  template <typename Ended>
  void Go(Stream* stream, double amount, Ended ended);

  const absl::Span<const ChunkWork> work_;
  const DiskSpeeds disk_;
  const SideBySide side_by_side_;
  uint64_t slots_, gradient_slots_;  // free ones
  std::vector<char> waits_for_;      // by chunk: reads that have not ended
  Stream states_, gradients_, stores_;
  double loading_ = 0;          // bytes of the state reads in flight
  double log_ = 0, flush_ = 0;  // bytes that may be written
  double disk_left_;            // bytes that are not read or written yet
  size_t worker_ = 0;           // the chunk being updated
  double busy_ = 0;             // seconds left of it
  double spill_ = 0;            // bytes left that the worker waits for
  bool begun_ = false;          // the worker has begun chunk `worker_`
  StepTimes times_;
};

void Playing::StartReads() {
  for (; states_.next < work_.size(); ++states_.next) {
    const double bytes = work_[states_.next].state_read;
    if (bytes <= 0) continue;
    if (slots_ == 0 || loading_ >= kLoadingMax) break;
    --slots_;
    loading_ += bytes;
    states_.active.push_back({states_.next, bytes});
  }
  for (; gradients_.next < work_.size(); ++gradients_.next) {
    const double bytes = work_[gradients_.next].gradient_read;
    if (bytes <= 0) continue;
    if (gradient_slots_ == 0) break;
    --gradient_slots_;
    gradients_.active.push_back({gradients_.next, bytes});
  }
}

bool Playing::StartWorker() {
  if (worker_ == work_.size()) return false;
  const ChunkWork& chunk = work_[worker_];
  if (!begun_) {
    if (waits_for_[worker_] > 0) return false;
    begun_ = true;
    busy_ = chunk.busy;
    spill_ = chunk.spilled;
  }
  if (busy_ > 0 || spill_ > 0) return false;
  begun_ = false;
  if (chunk.gradient_read > 0) ++gradient_slots_;
  if (chunk.stored > 0) stores_.active.push_back({worker_, chunk.stored});
  flush_ += chunk.flushed;
  ++worker_;
  return true;
}

void Playing::Start() {
  do {
    StartReads();
  } while (StartWorker());
}

// Work that ends now ends exactly: rounding must not leave a crumb behind.
void Take(double* from, double amount) { *from = *from <= amount * (1 + 1e-12) ? 0 : *from - amount; }

template <typename Ended>
void Playing::Go(Stream* stream, double amount, Ended ended) {
  std::erase_if(stream->active, [&](Transfer& transfer) {
    const double before = transfer.left;
    Take(&transfer.left, amount);
    disk_left_ -= before - transfer.left;
    if (transfer.left > 0) return false;
    ended(transfer.chunk);
    return true;
  });
}

Playing::Pace Playing::PaceNow() const {
  Pace now;
  now.computes = begun_ && busy_ > 0;
  now.writing = {log_ > 0, flush_ > 0, begun_ && busy_ <= 0 && spill_ > 0};
  now.reads = states_.active.size() + gradients_.active.size();
  now.writes = stores_.active.size() + now.writing[0] + now.writing[1] + now.writing[2];
  const bool both = now.reads > 0 && now.writes > 0, disturbed = now.computes && now.reads + now.writes > 0;
  const double speed = disturbed ? side_by_side_.disk : 1;
  now.worker = disturbed ? side_by_side_.worker : 1;
  now.read = speed * (both ? disk_.BesideWrites() : disk_.read) / static_cast<double>(std::max<size_t>(now.reads, 1));
  now.write = speed * (both ? disk_.BesideReads() : disk_.write) / static_cast<double>(std::max<size_t>(now.writes, 1));
  return now;
}

double Playing::UntilNextEnd(const Pace& now) const {
  double seconds = std::numeric_limits<double>::max();
  if (now.computes) seconds = busy_ / now.worker;
  for (const Stream* stream : {&states_, &gradients_, &stores_}) {
    for (const Transfer& transfer : stream->active) {
      seconds = std::min(seconds, transfer.left / (stream == &stores_ ? now.write : now.read));
    }
  }
  const double left[] = {log_, flush_, spill_};
  for (size_t i = 0; i < std::size(left); ++i) {
    if (now.writing[i]) seconds = std::min(seconds, left[i] / now.write);
  }
  return seconds;
}

void Playing::Advance() {
  const Pace now = PaceNow();
  const double seconds = UntilNextEnd(now);
  if (now.reads + now.writes == 0 && disk_left_ > 0.5) times_.disk_idle += seconds;
  times_.total += seconds;
  if (now.computes) Take(&busy_, seconds * now.worker);
  double* const left[] = {&log_, &flush_, &spill_};
  for (size_t i = 0; i < std::size(left); ++i) {
    if (!now.writing[i]) continue;
    const double before = *left[i];
    Take(left[i], seconds * now.write);
    disk_left_ -= before - *left[i];
  }
  Go(&states_, seconds * now.read, [&](size_t chunk) {
    --waits_for_[chunk];
    loading_ -= work_[chunk].state_read;
  });
  Go(&gradients_, seconds * now.read, [&](size_t chunk) { --waits_for_[chunk]; });
  Go(&stores_, seconds * now.write, [&](size_t) { ++slots_; });
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
