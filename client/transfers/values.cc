#include "ballast/client/transfers/values.h"

#include <algorithm>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {

std::vector<float> Values::Buffers::Take() {
  absl::MutexLock lock(&mutex);
  const auto available = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return !free.empty() || made < kBuffers; };
  mutex.Await(absl::Condition(&available));
  if (free.empty()) {
    ++made;
    return {};
  }
  std::vector<float> buffer = std::move(free.back());
  free.pop_back();
  return buffer;
}

void Values::Buffers::Return(std::vector<float> buffer) {
  absl::MutexLock lock(&mutex);
  free.push_back(std::move(buffer));
}

void Values::ReleaseBuffers() {
  absl::MutexLock lock(&buffers_->mutex);
  buffers_->made -= buffers_->free.size();
  buffers_->free.clear();
}

void Values::Write(uint32_t tensor, absl::Span<const float> values, absl::Span<const model::BoxRun> runs) {
  std::vector<float>& mine = written_[tensor];
  mine.clear();
  const uint32_t unit = seat_->units->layout().tensors()[tensor].unit;
  for (const OwnedSegment& segment : seat_->units->unit(unit).segments) {
    if (segment.tensor != tensor) continue;
    model::VisitRuns(runs, segment.first, segment.count, [&](uint64_t in_box, uint64_t, uint64_t count) {
      const auto part = values.subspan(in_box, count);
      mine.insert(mine.end(), part.begin(), part.end());
    });
  }
}

void Values::Forget(const std::string& presence) {
  for (auto it = written_.begin(); it != written_.end();) {
    const auto next = std::next(it);
    if (model::HasBit(presence, it->first)) {
      auto gone = written_.extract(it);
      if (lent_) forgotten_.insert(std::move(gone));
    }
    it = next;
  }
}

std::map<uint32_t, const float*> Values::Lend() {
  lent_ = true;
  std::map<uint32_t, const float*> all;
  for (const auto& [tensor, values] : written_) all[tensor] = values.data();
  return all;
}

void Values::EndLoan() {
  lent_ = false;
  forgotten_.clear();
}

std::string Values::presence() const {
  std::vector<uint32_t> tensors;
  for (const auto& [tensor, values] : written_) tensors.push_back(tensor);
  return model::MakeBitmap(static_cast<uint32_t>(seat_->units->layout().tensors().size()), tensors);
}

Values::Source Values::written() const {
  return [this](uint32_t tensor, uint64_t first, absl::Span<float> to) {
    const uint32_t unit = seat_->units->layout().tensors()[tensor].unit;
    uint64_t before = 0;  // of the segments seen, in the written values
    for (const OwnedSegment& segment : seat_->units->unit(unit).segments) {
      if (segment.tensor != tensor) continue;
      if (first >= segment.first && first < segment.first + segment.count) {
        const std::vector<float>& from = written_.at(tensor);
        std::copy_n(from.begin() + before + (first - segment.first), to.size(), to.begin());
        return;
      }
      before += segment.count;
    }
  };
}

void Values::Resend(const OwnedSlice& owned, const std::string& presence, const Source& source) {
  if (lent_ || buffers_->tally.failed()) return;  // after a failure each would wait for the same server as long again
  // Shared, so that the bytes do not move although the owner of the vector is a copyable callback. The deleter returns
  // the buffer even if `source`, a caller's function, throws.
  std::shared_ptr<std::vector<float>> held(new std::vector<float>(buffers_->Take()),
                                           [buffers = buffers_](std::vector<float>* taken) {
                                             buffers->Return(std::move(*taken));
                                             delete taken;
                                           });
  std::vector<float>& buffer = *held;
  const model::Range range = owned.slice.range;
  buffer.assign(range.size(), 0.0f);
  const model::Chunk& chunk = seat_->units->layout().chunks()[owned.slice.chunk];
  for (const model::Segment& segment : chunk.segments) {
    if (!model::HasBit(presence, segment.tensor)) continue;
    const model::Range in_unit{chunk.range.begin + segment.in_chunk.begin, chunk.range.begin + segment.in_chunk.end};
    const model::Range part = model::Intersect(in_unit, range);
    if (part.size() == 0) continue;
    const uint64_t first = part.begin - seat_->units->layout().tensors()[segment.tensor].range.begin;
    source(segment.tensor, first, absl::MakeSpan(buffer).subspan(part.begin - range.begin, part.size()));
  }
  const auto bytes =
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(held->data()), held->size() * sizeof(float));
  buffers_->tally.Start();
  seat_->PushSlice(v1::SLICE_KIND_VALUE, owned, bytes, [buffers = buffers_, held](const absl::Status& status) mutable {
    held.reset();
    buffers->tally.Finish(status);
  });
}

absl::Status Values::Push(const std::string& presence, const Source& source) {
  if (lent_) return absl::OkStatus();
  for (uint32_t unit = 0; unit < seat_->units->unit_count(); ++unit) {
    for (const OwnedSlice& owned : seat_->units->unit(unit).slices) {
      if (seat_->units->plan().Touches(owned.slice, presence)) Resend(owned, presence, source);
    }
  }
  return Wait();
}

}  // namespace ballast::client
