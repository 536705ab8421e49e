// A set of bytes of a file, as ranges.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace ballast::storage {

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t bytes() const { return end - begin; }
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

// A file may have as many ranges as a server has chunks: calls take the logarithm of their number. Besides, In and
// BytesIn take the length of their answer, Add and Remove the number of merged ranges, All the length of the set, and
// Fit the number of smaller ranges before the found range. Threads: the caller's lock.
class ByteRanges {
 public:
  void Add(ByteRange added);
  void Remove(ByteRange removed);
  // The set's parts inside `within`, ascending. Neighbours are one range.
  std::vector<ByteRange> In(ByteRange within) const;
  std::vector<ByteRange> All() const { return In({0, ~uint64_t{0}}); }
  // Number of the set's bytes inside `within`, and in all.
  uint64_t BytesIn(ByteRange within) const;
  uint64_t bytes() const { return bytes_; }
  // The first range of at least `bytes`; none if all are smaller. Passes over smaller ranges before it.
  std::optional<ByteRange> Fit(uint64_t bytes) const;
  // The last range; none of an empty set.
  std::optional<ByteRange> last() const;

 private:
  using Ranges = std::map<uint64_t, uint64_t>;
  void Put(uint64_t begin, uint64_t end);
  Ranges::iterator Take(Ranges::iterator range);  // returns the next

  Ranges ranges_;                                    // begin -> end; no two touch
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // bytes and begin of each
  uint64_t bytes_ = 0;
};

}  // namespace ballast::storage
