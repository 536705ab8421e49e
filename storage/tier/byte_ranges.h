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

// A file may have as many ranges as a server has chunks. Each call costs time logarithmic in their number, and in
// addition: In and BytesIn, the number of ranges inside `within`; Add and Remove, the number of ranges that they join
// or cut; All, the number of ranges; Fit, the number of ranges before its answer. Threads: the caller's lock.
class ByteRanges {
 public:
  void Add(ByteRange added);
  void Remove(ByteRange removed);
  // The set's parts inside `within`, ascending. Ranges that touch are joined to one.
  std::vector<ByteRange> In(ByteRange within) const;
  std::vector<ByteRange> All() const { return In({0, ~uint64_t{0}}); }
  // The number of the set's bytes: inside `within`, and in total.
  uint64_t BytesIn(ByteRange within) const;
  uint64_t bytes() const { return bytes_; }
  // The first range of at least `bytes`; none if all are smaller.
  std::optional<ByteRange> Fit(uint64_t bytes) const;
  // The last range; none if the set is empty.
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
