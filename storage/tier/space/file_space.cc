#include "ballast/storage/tier/space/file_space.h"

#include <algorithm>
#include <vector>

#include "ballast/proto/model/status.h"

namespace ballast::storage {

void FileSpace::Keep(ByteRange range, Between before) {
  if (before == Between::kFree && range.begin > end_) MarkFree({end_, range.begin});
  blocks_.Add(range);
  end_ = range.end;
}

void FileSpace::KeepUpTo(uint64_t end) { end_ = std::max(end_, end); }

absl::Status FileSpace::Promise(uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(CoverPromise(promised_ + bytes));
  promised_ += bytes;
  return absl::OkStatus();
}

void FileSpace::EndPromise(uint64_t bytes, Blocks blocks) {
  promised_ -= bytes;
  if (blocks == Blocks::kGiveBack) GiveBackEnd();
}

absl::StatusOr<uint64_t> FileSpace::TakePromised(uint64_t bytes, uint64_t unused_max) {
  return Take(bytes, promised_ - bytes, unused_max);
}

absl::StatusOr<uint64_t> FileSpace::Take(uint64_t bytes, uint64_t promised_after, uint64_t unused_max) {
  const uint64_t offset = Place(bytes);
  const ByteRange place = {offset, offset + bytes};
  end_ = std::max(end_, place.end);
  MarkUsed(place);
  absl::Status status = GetBlocks(place, promised_after, unused_max);
  // A place that ordinary space took may have had promised blocks.
  if (status.ok() && promised_after == promised_) status = CoverPromise(promised_after);
  if (!status.ok()) {
    Free(place);
    return status;
  }
  promised_ = promised_after;
  return offset;
}

// A range with blocks, if there is one: reserving waits for all transfers of the file that are in flight.
uint64_t FileSpace::Place(uint64_t bytes) {
  const std::vector<ByteRange> all = free_.All();
  for (const ByteRange& range : all) {
    if (range.bytes() < bytes) continue;
    for (const ByteRange& part : blocks_.In(range)) {
      if (part.bytes() >= bytes) return part.begin;
    }
  }
  for (const ByteRange& range : all) {
    if (range.bytes() >= bytes) return range.begin;
  }
  return !all.empty() && all.back().end == end_ ? all.back().begin : end_;
}

void FileSpace::MarkFree(ByteRange range) {
  free_.Add(range);
  free_with_blocks_ += blocks_.BytesIn(range);
}

void FileSpace::MarkUsed(ByteRange range) {
  for (const ByteRange& part : free_.In(range)) free_with_blocks_ -= blocks_.BytesIn(part);
  free_.Remove(range);
}

absl::Status FileSpace::GetBlocks(ByteRange range, uint64_t promised_after, uint64_t unused_max) {
  if (blocks_.BytesIn(range) == range.bytes()) return absl::OkStatus();
  if (const uint64_t unused = Unused(promised_after); unused > unused_max) GiveBack(unused - unused_max);
  absl::Status status = file_->Reserve(range.begin, range.bytes());
  if (model::ReasonOf(status) == model::kDiskFull) {
    GiveBack(Unused(promised_after));
    // After a restart free ranges may have blocks that nobody knows of.
    for (const ByteRange& free : free_.All()) {
      for (const ByteRange& hole : Holes(free)) file_->Discard(hole.begin, hole.bytes());
    }
    status = file_->Reserve(range.begin, range.bytes());
  }
  if (status.ok()) blocks_.Add(range);
  return status;
}

absl::Status FileSpace::CoverPromise(uint64_t promised_after) {
  if (free_with_blocks_ >= promised_after) return absl::OkStatus();
  uint64_t missing = promised_after - free_with_blocks_;
  // Free ranges come first: after a restart they may have blocks already.
  std::vector<ByteRange> wanted;
  for (const ByteRange& range : free_.All()) {
    for (const ByteRange& part : Holes(range)) {
      if (missing == 0) break;
      wanted.push_back({part.begin, part.begin + std::min(part.bytes(), missing)});
      missing -= wanted.back().bytes();
    }
  }
  const uint64_t end = end_;
  if (missing > 0) wanted.push_back({end, end + missing});
  for (size_t i = 0; i < wanted.size(); ++i) {
    const absl::Status status = file_->Reserve(wanted[i].begin, wanted[i].bytes());
    if (!status.ok()) {
      for (size_t undone = 0; undone <= i; ++undone) file_->Discard(wanted[undone].begin, wanted[undone].bytes());
      if (wanted[i].begin == end) (void)file_->Truncate(end);  // a failed reservation may have made the file longer
      return status;
    }
  }
  for (const ByteRange& range : wanted) {
    free_.Remove(range);
    blocks_.Add(range);
    MarkFree(range);
    end_ = std::max(end_, range.end);
  }
  return absl::OkStatus();
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
  std::vector<ByteRange> parts;
  for (const ByteRange& range : free_.All()) {
    for (const ByteRange& part : blocks_.In(range)) parts.push_back(part);
  }
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.bytes() < b.bytes(); });
  for (const ByteRange& part : parts) {
    if (bytes == 0) return;
    const uint64_t given = std::min(bytes, part.bytes());
    GiveBackRange({part.end - given, part.end});
    bytes -= given;
  }
}

void FileSpace::GiveBackRange(ByteRange range) {
  free_with_blocks_ -= blocks_.BytesIn(range);
  blocks_.Remove(range);
  file_->Discard(range.begin, range.bytes());
}

void FileSpace::GiveBackEnd() {
  const std::vector<ByteRange> all = free_.All();
  if (all.empty() || all.back().end != end_) return;
  uint64_t cut = all.back().begin, unused = Unused(promised_);
  const std::vector<ByteRange> parts = blocks_.In(all.back());
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
