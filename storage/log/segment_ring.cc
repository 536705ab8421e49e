#include "ballast/storage/log/segment_ring.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace ballast::storage {

SegmentRing::SegmentRing(const ScannedLog& scanned)
    : segment_bytes_(scanned.segment_bytes),
      segments_(scanned.segment_count),
      last_incarnation_(scanned.last_incarnation) {
  for (const ScannedLog::Segment& live : scanned.live) {
    segments_[live.index] = {live.incarnation, std::numeric_limits<int64_t>::max()};
    live_.push_back(live.index);
    held_incarnation_ = live.incarnation;
  }
  for (uint64_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].incarnation == 0) free_.insert(i);
  }
}

uint64_t SegmentRing::oldest() const {
  return live_.empty() ? std::numeric_limits<uint64_t>::max() : segments_[live_.front()].incarnation;
}

void SegmentRing::Add(uint64_t segments) {
  for (uint64_t i = 0; i < segments; ++i) free_.insert(segments_.size() + i);
  segments_.resize(segments_.size() + segments);
}

std::optional<SegmentRing::Beginning> SegmentRing::Roll() {
  if (free_.empty()) return std::nullopt;
  const uint64_t segment = *free_.begin();
  free_.erase(free_.begin());
  segments_[segment] = {++last_incarnation_, -1};
  live_.push_back(segment);
  rolled_ = true;
  room_ = RecordBytesMax(segment_bytes_) + kCutBatchBytes;
  if (std::exchange(cut_lacks_room_, false)) cut_wants_batch_ = true;
  has_cut_room_ = !cut_wants_batch_;  // the batch of a waiting cut comes after all queued records
  return Beginning{last_incarnation_, segment, oldest()};
}

void SegmentRing::Take(uint64_t cost, int64_t keep_for) {
  room_ -= cost;
  Segment& current = segments_[live_.back()];
  current.keep_for = std::max(current.keep_for, keep_for);
}

void SegmentRing::Release(int64_t step) {
  for (const uint64_t segment : live_) segments_[segment].keep_for = std::min(segments_[segment].keep_for, step);
}

void SegmentRing::Keep(uint64_t incarnation, int64_t step) {
  const auto found =
      std::lower_bound(live_.begin(), live_.end(), incarnation,
                       [this](uint64_t segment, uint64_t wanted) { return segments_[segment].incarnation < wanted; });
  if (found != live_.end() && segments_[*found].incarnation == incarnation) segments_[*found].keep_for = step;
}

void SegmentRing::Cut(int64_t step) {
  cut_step_ = std::max(cut_step_, step);
  if (!rolled_) return;
  const bool cut = CutOldest();
  cut_waits_ =
      oldest() >= held_incarnation_ && oldest() < last_incarnation_ && segments_[live_.front()].keep_for <= cut_step_;
  if (cut || cut_waits_) WantCutBatch();
}

bool SegmentRing::CutOldest() {
  // Cuts the oldest segments, up to the first needed segment: a log is read from its oldest segment on. The batch that
  // tells of a cut may survive a crash in which earlier batches are lost, so the snapshot that replaces the segment
  // must be durable already.
  for (bool cut = false;; cut = true) {
    if (!rolled_ || oldest() >= held_incarnation_) return cut;
    const uint64_t segment = live_.front();
    if (segments_[segment].keep_for > cut_step_) return cut;
    live_.pop_front();
    cut_.push_back(segment);
  }
}

void SegmentRing::WantCutBatch() {
  // Each segment keeps room for one empty batch that tells of a cut; a second batch uses the room for records.
  if (cut_wants_batch_) return;
  if (!std::exchange(has_cut_room_, false)) {
    cut_lacks_room_ = room_ < kCutBatchBytes;
    if (cut_lacks_room_) return;
    room_ -= kCutBatchBytes;
  }
  cut_wants_batch_ = true;
}

void SegmentRing::Synced(uint64_t told, uint64_t held) {
  while (!cut_.empty() && segments_[cut_.front()].incarnation < told) {
    Free(cut_.front());
    cut_.pop_front();
  }
  held_incarnation_ = std::max(held_incarnation_, held);
  if (cut_waits_ && CutOldest()) {
    cut_waits_ = false;
    WantCutBatch();
  }
}

void SegmentRing::Free(uint64_t segment) {
  segments_[segment] = {};
  free_.insert(segment);
}

}  // namespace ballast::storage
