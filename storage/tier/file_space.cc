#include "ballast/storage/tier/file_space.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {

void FileSpace::Keep(ByteRange range, Between before) {
  if (before == Between::kFree && range.begin > end_) MarkFree({end_, range.begin});
  blocks_.Add(range);
  end_ = range.end;
}

void FileSpace::KeepUpTo(uint64_t end) { end_ = std::max(end_, end); }

absl::Status Reservation::Run(BlockFile* file) const {
  for (size_t i = 0; i < ranges.size(); ++i) {
    const absl::Status status = file->Reserve(ranges[i].begin, ranges[i].bytes());
    if (status.ok()) continue;
    for (size_t undone = 0; undone <= i; ++undone) file->Discard(ranges[undone].begin, ranges[undone].bytes());
    return status;
  }
  return absl::OkStatus();
}

Reservation FileSpace::StartPromise(uint64_t bytes, Shape shape, uint64_t unused_max) {
  Reservation reservation{.bytes = bytes, .covered = std::min(bytes, Unused(promised_)), .ranges = {}};
  if (shape == Shape::kOnePiece) {
    const uint64_t place = PlaceToReserve(bytes);
    reservation.ranges = Holes({place, place + bytes});
    reservation.covered = bytes;
    for (const ByteRange& range : reservation.ranges) reservation.covered -= range.bytes();
    SetApart(reservation.ranges);
  }
  // Blocks that an earlier promise lost to another program are reserved along.
  const uint64_t lost = promised_ > ready_.bytes() ? promised_ - ready_.bytes() : 0;
  const std::vector<ByteRange> more = Missing((shape == Shape::kOnePiece ? 0 : bytes - reservation.covered) + lost);
  SetApart(more);
  reservation.ranges.insert(reservation.ranges.end(), more.begin(), more.end());
  promised_ += reservation.covered;
  ++in_the_making_;
  const uint64_t unused = Unused(promised_);
  if (!reservation.ranges.empty() && unused > unused_max) GiveBack(unused - unused_max);
  return reservation;
}

absl::Status FileSpace::FinishPromise(const Reservation& reservation, absl::Status ran) {
  for (const ByteRange& range : reservation.ranges) {
    if (ran.ok()) blocks_.Add(range);
    MarkFree(range);
  }
  promised_ += reservation.bytes - reservation.covered;
  --in_the_making_;
  if (ran.ok() && ready_.bytes() < promised_) {
    // A place gave promised blocks back to the disk, to get as many elsewhere, and this promise got them.
    for (const ByteRange& range : reservation.ranges) GiveBackRange(range);
    ran = model::Error(absl::StatusCode::kResourceExhausted, model::kDiskFull,
                       absl::StrCat("the disk of ", file_->path(), " has no space left for ", reservation.bytes,
                                    " bytes more than it has promised already"));
  }
  if (!ran.ok()) promised_ -= reservation.bytes;
  // A failed reservation may have made the file longer.
  if (!ran.ok() || (cut_later_ && in_the_making_ == 0)) GiveBackEnd();
  return ran;
}

void FileSpace::SetApart(absl::Span<const ByteRange> ranges) {
  for (const ByteRange& range : ranges) {
    free_.Remove(range);
    end_ = std::max(end_, range.end);
  }
}

void FileSpace::GiveBackUnused(uint64_t promised) {
  GiveBack(Unused(promised));
  // After a restart free ranges may have blocks that nobody knows of.
  for (const ByteRange& free : free_.All()) {
    for (const ByteRange& hole : Holes(free)) file_->Discard(hole.begin, hole.bytes());
  }
}

void FileSpace::EndPromise(uint64_t bytes, Blocks blocks) {
  promised_ -= bytes;
  if (blocks == Blocks::kGiveBack) GiveBackEnd();
}

absl::StatusOr<uint64_t> FileSpace::TakePromised(uint64_t bytes, uint64_t unused_max) {
  const uint64_t offset = Place(bytes);
  const ByteRange place = {offset, offset + bytes};
  end_ = std::max(end_, place.end);
  MarkUsed(place);
  const absl::Status status = GetBlocks(place, promised_ - bytes, unused_max);
  if (!status.ok()) {
    Free(place);
    return status;
  }
  promised_ -= bytes;
  return offset;
}

// A range with blocks, if there is one: reserving waits for all transfers of the file that are in flight.
uint64_t FileSpace::Place(uint64_t bytes) const {
  if (const auto range = ready_.Fit(bytes); range.has_value()) return range->begin;
  if (const auto range = free_.Fit(bytes); range.has_value()) return range->begin;
  const auto last = free_.last();
  return last.has_value() && last->end == end_ ? last->begin : end_;
}

uint64_t FileSpace::PlaceToReserve(uint64_t bytes) const {
  const uint64_t unused = Unused(promised_);
  const auto fits = [&](ByteRange place) { return blocks_.BytesIn(place) <= unused; };
  if (const uint64_t place = Place(bytes); fits({place, place + bytes})) return place;
  const std::vector<ByteRange> all = free_.All();
  for (const ByteRange& range : all) {
    if (range.bytes() < bytes) continue;
    if (fits({range.begin, range.begin + bytes})) return range.begin;
    for (const ByteRange& hole : Holes(range)) {
      if (hole.bytes() >= bytes) return hole.begin;
    }
  }
  return end_;
}

void FileSpace::MarkFree(ByteRange range) {
  free_.Add(range);
  for (const ByteRange& part : blocks_.In(range)) ready_.Add(part);
}

void FileSpace::MarkUsed(ByteRange range) {
  ready_.Remove(range);
  free_.Remove(range);
}

absl::Status FileSpace::GetBlocks(ByteRange range, uint64_t promised_after, uint64_t unused_max) {
  if (blocks_.BytesIn(range) == range.bytes()) return absl::OkStatus();
  if (const uint64_t unused = Unused(promised_after); unused > unused_max) GiveBack(unused - unused_max);
  absl::Status status = file_->Reserve(range.begin, range.bytes());
  if (model::ReasonOf(status) == model::kDiskFull) {
    GiveBackUnused(promised_after);
    status = file_->Reserve(range.begin, range.bytes());
  }
  if (status.ok()) blocks_.Add(range);
  return status;
}

std::vector<ByteRange> FileSpace::Missing(uint64_t bytes) const {
  std::vector<ByteRange> ranges;
  if (bytes == 0) return ranges;
  // Free ranges come first: after a restart they may have blocks already.
  for (const ByteRange& range : free_.All()) {
    for (const ByteRange& part : Holes(range)) {
      if (bytes == 0) return ranges;
      ranges.push_back({part.begin, part.begin + std::min(part.bytes(), bytes)});
      bytes -= ranges.back().bytes();
    }
  }
  if (bytes > 0) ranges.push_back({end_, end_ + bytes});
  return ranges;
}

std::vector<ByteRange> FileSpace::Holes(ByteRange range) const {
  ByteRanges holes;
  holes.Add(range);
  for (const ByteRange& part : blocks_.In(range)) holes.Remove(part);
  return holes.All();
}

void FileSpace::Free(ByteRange range) {
  MarkFree(range);
  GiveBackEnd();
}

void FileSpace::FreeIntoPromise(ByteRange range) {
  promised_ += range.bytes();
  MarkFree(range);
}

void FileSpace::GiveBack(uint64_t bytes) {
  std::vector<ByteRange> parts = ready_.All();
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.bytes() < b.bytes(); });
  for (const ByteRange& part : parts) {
    if (bytes == 0) return;
    const uint64_t given = std::min(bytes, part.bytes());
    GiveBackRange({part.end - given, part.end});
    bytes -= given;
  }
}

void FileSpace::GiveBackRange(ByteRange range) {
  ready_.Remove(range);
  blocks_.Remove(range);
  file_->Discard(range.begin, range.bytes());
}

void FileSpace::GiveBackEnd() {
  cut_later_ = in_the_making_ > 0;
  if (cut_later_) return;
  const auto last = free_.last();
  if (!last.has_value() || last->end != end_) return;
  uint64_t cut = last->begin, unused = Unused(promised_);
  const std::vector<ByteRange> parts = blocks_.In(*last);
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    if (part->bytes() > unused) {
      cut = part->end - unused;
      break;
    }
    unused -= part->bytes();
  }
  if (cut == end_) return;
  const ByteRange gone = {cut, end_};
  MarkUsed(gone);
  blocks_.Remove({cut, ~uint64_t{0}});
  end_ = cut;
  (void)file_->Truncate(end_);  // a failure costs space only
}

}  // namespace ballast::storage
