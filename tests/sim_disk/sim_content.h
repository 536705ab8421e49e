// Content of a simulated file: the durable bytes, the writes since, and the mix of the two after a crash.
//
// Writes cover whole blocks, so versions of a file share equal blocks. A shared block is never changed in place.
// Threads: the caller holds the owner's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/tests/sim/random.h"

namespace ballast::storage {

// A disk writes a sector whole or not at all. Smaller than kIoAlignment, because NVMe without atomic writes promises no
// more.
inline constexpr uint64_t kSimSectorBytes = 512;

using SimBlock = std::array<std::byte, kIoAlignment>;
using SimBlockPtr = std::shared_ptr<const SimBlock>;  // null: zeros

// The bytes of a file at one moment, sparse.
class SimVersion {
 public:
  uint64_t size() const { return size_; }
  uint64_t allocated_blocks() const { return blocks_.size(); }
  uint64_t AllocatedIn(uint64_t first, uint64_t count) const;
  SimBlockPtr Get(uint64_t block) const;
  void Put(uint64_t block, SimBlockPtr content) { blocks_[block] = std::move(content); }
  void Allocate(uint64_t first, uint64_t count);  // new blocks hold zeros
  void Free(uint64_t first, uint64_t count);
  void Grow(uint64_t bytes);  // to at least
  void Truncate(uint64_t bytes);
  // Bytes never written, and bytes past the end, read as zero.
  void Read(uint64_t offset, absl::Span<std::byte> buffer) const;

 private:
  std::map<uint64_t, SimBlockPtr> blocks_;  // by number: offset / kIoAlignment
  uint64_t size_ = 0;
};

// A change that a crash may lose or tear.
struct SimWrite {
  uint64_t sequence = 0;  // a sync covers all writes up to some sequence
  uint64_t first = 0;     // number of a block
  std::vector<SimBlockPtr> blocks;
  uint64_t end = 0;   // the file is at least this long afterwards
  bool hole = false;  // frees the blocks instead of writing them
};

class SimContent {
 public:
  // The version that reads return: all writes, durable or not.
  const SimVersion& newest() const { return newest_; }
  const SimVersion& durable() const { return durable_; }

  void Write(SimWrite write);
  // Makes all writes up to `sequence` durable.
  void Sync(uint64_t sequence);
  // A sync that reported an error: some of the covered writes are durable. The cache drops the rest as if they were
  // clean, and no later sync repairs the loss (fsyncgate, https://lwn.net/Articles/752063/).
  void FailSync(uint64_t sequence, sim::Random& random);
  // Keeps, loses or tears into sectors each write not covered by a sync, in any order.
  void Crash(sim::Random& random);

  // The next three are durable at once.
  void Reserve(uint64_t offset, uint64_t bytes);
  void Truncate(uint64_t bytes);
  void Set(absl::Span<const std::byte> bytes);
  // XORs `mask` into the medium at `offset`. Reads see the damage only where no later write hides it.
  void Damage(uint64_t offset, absl::Span<const std::byte> mask);

 private:
  void Tear(const SimWrite& write, sim::Random& random);

  SimVersion durable_;
  SimVersion newest_;
  std::vector<SimWrite> volatile_;  // by sequence
};

// Copies the bytes into new blocks. REQUIRES: a multiple of kIoAlignment.
std::vector<SimBlockPtr> SimBlocks(absl::Span<const std::byte> bytes);

}  // namespace ballast::storage
