// A set of bytes of a file, as ranges.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace ballast::storage {

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t bytes() const { return end - begin; }
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

// Threads: the caller's lock.
class ByteRanges {
 public:
  void Add(ByteRange added);
  void Remove(ByteRange removed);
  // The set's parts inside `within`, ascending. Neighbours are one range.
  std::vector<ByteRange> In(ByteRange within) const;
  std::vector<ByteRange> All() const { return In({0, ~uint64_t{0}}); }
  // Number of the set's bytes inside `within`.
  uint64_t BytesIn(ByteRange within) const;

 private:
  std::map<uint64_t, uint64_t> ranges_;  // begin -> end; no two touch
};

}  // namespace ballast::storage
