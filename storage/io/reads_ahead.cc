#include "ballast/storage/io/reads_ahead.h"

#include <algorithm>
#include <vector>

namespace ballast::storage {
namespace {

constexpr uint64_t kBytesMax = uint64_t{48} << 20;

class Reads {
 public:
  Reads(IoQueue* queue, absl::Span<const ReadAhead> reads, const ReadSlots& slots)
      : queue_(queue), reads_(reads), slots_(slots), arrived_(reads.size()) {
    const uint64_t count = slots.slot_bytes == 0 ? 0 : slots.memory.size() / slots.slot_bytes;
    for (uint64_t i = 0; i < count; ++i) free_.push_back(slots.memory.data() + i * slots.slot_bytes);
    places_.resize(reads.size(), nullptr);
  }
  ~Reads() {
    while (queue_->in_flight() > 0) Reap(/*wait=*/true);
  }

  // The bytes of read i. REQUIRES: called once for each read.
  absl::StatusOr<std::byte*> Get(size_t i) {
    Start();
    while (!arrived_[i] && failed_.ok()) {
      Reap(/*wait=*/true);
      Start();
    }
    if (!failed_.ok()) return failed_;
    return places_[i];
  }
  void Release(size_t i) {
    if (reads_[i].to == nullptr) free_.push_back(places_[i]);
    --held_;
  }
  void Poll() {
    Reap(/*wait=*/false);
    Start();
  }

 private:
  void Start() {
    for (; next_ < reads_.size() && failed_.ok(); ++next_) {
      const ReadAhead& read = reads_[next_];
      if (held_ == kReadsAheadMax || (in_flight_bytes_ > 0 && in_flight_bytes_ + read.bytes > kBytesMax)) return;
      if (read.to == nullptr && free_.empty()) return;
      std::byte* place = read.to;
      if (place == nullptr) {
        place = free_.back();
        free_.pop_back();
      }
      places_[next_] = place;
      failed_ = queue_->Submit({.kind = IoRequest::Kind::kRead,
                                .file = read.file,
                                .offset = read.offset,
                                .buffer = {place, read.bytes},
                                .tag = next_});
      if (!failed_.ok()) return;
      ++held_;
      in_flight_bytes_ += read.bytes;
    }
  }

  void Reap(bool wait) {
    completions_.clear();
    queue_->Reap(wait, &completions_);
    for (const IoCompletion& completion : completions_) {
      failed_.Update(completion.status);
      arrived_[completion.tag] = true;
      in_flight_bytes_ -= reads_[completion.tag].bytes;
    }
  }

  IoQueue* const queue_;
  const absl::Span<const ReadAhead> reads_;
  const ReadSlots slots_;
  std::vector<std::byte*> free_;    // slots
  std::vector<std::byte*> places_;  // by read
  std::vector<bool> arrived_;       // by read
  size_t next_ = 0;
  size_t held_ = 0;  // started and not released
  uint64_t in_flight_bytes_ = 0;
  absl::Status failed_;
  std::vector<IoCompletion> completions_;
};

}  // namespace

absl::Status ForEachRead(IoQueue* queue, absl::Span<const ReadAhead> reads, const ReadSlots& slots,
                         absl::FunctionRef<absl::Status(size_t, std::byte*, absl::FunctionRef<void()>)> look) {
  Reads ahead(queue, reads, slots);
  for (size_t i = 0; i < reads.size(); ++i) {
    absl::StatusOr<std::byte*> data = ahead.Get(i);
    if (!data.ok()) return data.status();
    const absl::Status status = look(i, *data, [&] { ahead.Poll(); });
    if (!status.ok()) return status;
    ahead.Release(i);
  }
  return absl::OkStatus();
}

}  // namespace ballast::storage
