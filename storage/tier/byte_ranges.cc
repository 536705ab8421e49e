#include "ballast/storage/tier/byte_ranges.h"

#include <algorithm>
#include <iterator>

namespace ballast::storage {

void ByteRanges::Add(ByteRange added) {
  if (added.begin >= added.end) return;
  auto next = ranges_.upper_bound(added.begin);
  if (next != ranges_.begin() && std::prev(next)->second >= added.begin) added.begin = (--next)->first;
  while (next != ranges_.end() && next->first <= added.end) {
    added.end = std::max(added.end, next->second);
    next = Take(next);
  }
  Put(added.begin, added.end);
}

void ByteRanges::Remove(ByteRange removed) {
  auto next = ranges_.upper_bound(removed.begin);
  if (next != ranges_.begin() && std::prev(next)->second > removed.begin) --next;
  while (next != ranges_.end() && next->first < removed.end) {
    const auto [begin, end] = *next;
    next = Take(next);
    if (begin < removed.begin) Put(begin, removed.begin);
    if (end > removed.end) Put(removed.end, end);
  }
}

void ByteRanges::Put(uint64_t begin, uint64_t end) {
  ranges_[begin] = end;
  by_size_.emplace(end - begin, begin);
  bytes_ += end - begin;
}

ByteRanges::Ranges::iterator ByteRanges::Take(Ranges::iterator range) {
  const uint64_t bytes = range->second - range->first;
  by_size_.erase({bytes, range->first});
  bytes_ -= bytes;
  return ranges_.erase(range);
}

std::optional<ByteRange> ByteRanges::Fit(uint64_t bytes) const {
  if (by_size_.empty() || by_size_.rbegin()->first < bytes) return std::nullopt;
  for (const auto& [begin, end] : ranges_) {
    if (end - begin >= bytes) return ByteRange{begin, end};
  }
  return std::nullopt;
}

std::optional<ByteRange> ByteRanges::last() const {
  if (ranges_.empty()) return std::nullopt;
  return ByteRange{ranges_.rbegin()->first, ranges_.rbegin()->second};
}

std::vector<ByteRange> ByteRanges::In(ByteRange within) const {
  std::vector<ByteRange> parts;
  auto next = ranges_.upper_bound(within.begin);
  if (next != ranges_.begin() && std::prev(next)->second > within.begin) --next;
  for (; next != ranges_.end() && next->first < within.end; ++next) {
    parts.push_back({std::max(next->first, within.begin), std::min(next->second, within.end)});
  }
  return parts;
}

uint64_t ByteRanges::BytesIn(ByteRange within) const {
  uint64_t bytes = 0;
  for (const ByteRange& part : In(within)) bytes += part.bytes();
  return bytes;
}

}  // namespace ballast::storage
