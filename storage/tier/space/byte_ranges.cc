#include "ballast/storage/tier/space/byte_ranges.h"

#include <algorithm>
#include <iterator>

namespace ballast::storage {

void ByteRanges::Add(ByteRange added) {
  if (added.begin >= added.end) return;
  auto next = ranges_.upper_bound(added.begin);
  if (next != ranges_.begin() && std::prev(next)->second >= added.begin) added.begin = (--next)->first;
  while (next != ranges_.end() && next->first <= added.end) {
    added.end = std::max(added.end, next->second);
    next = ranges_.erase(next);
  }
  ranges_[added.begin] = added.end;
}

void ByteRanges::Remove(ByteRange removed) {
  auto next = ranges_.upper_bound(removed.begin);
  if (next != ranges_.begin() && std::prev(next)->second > removed.begin) --next;
  while (next != ranges_.end() && next->first < removed.end) {
    const auto [begin, end] = *next;
    next = ranges_.erase(next);
    if (begin < removed.begin) ranges_[begin] = removed.begin;
    if (end > removed.end) ranges_[removed.end] = end;
  }
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
