// What a simulated file holds: what the medium has for sure, what was written since, and how a crash mixes the two.
//
// All writes are of whole blocks, so versions of a file share the blocks that do not differ; a block that is shared is
// never changed in place. Threads: the owner's lock.
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

// What a disk writes whole or not at all; smaller than kIoAlignment, as NVMe without atomic writes promises no more.
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
  void Allocate(uint64_t first, uint64_t count);  // zeros where there was nothing
  void Free(uint64_t first, uint64_t count);
  void Grow(uint64_t bytes);  // to at least
  void Truncate(uint64_t bytes);
  // What was never written, and what lies past the end, reads as zero.
  void Read(uint64_t offset, absl::Span<std::byte> buffer) const;

 private:
  std::map<uint64_t, SimBlockPtr> blocks_;  // by number: offset / kIoAlignment
  uint64_t size_ = 0;
};

// A change that a crash may lose or tear.
struct SimWrite {
  uint64_t sequence = 0;  // a sync covers those up to one
  uint64_t first = 0;     // number of a block
  std::vector<SimBlockPtr> blocks;
  uint64_t end = 0;   // the file is at least this long afterwards
  bool hole = false;  // gives the blocks' space back
};

class SimContent {
 public:
  // What a read returns: all writes, durable or not.
  const SimVersion& newest() const { return newest_; }
  const SimVersion& durable() const { return durable_; }

  void Write(SimWrite write);
  // Writes up to `sequence` are durable now.
  void Sync(uint64_t sequence);
  // A sync that reported an error: some of what it covered is durable, the rest was dropped from the cache as if it
  // were clean, which no later sync repairs (fsyncgate, https://lwn.net/Articles/752063/).
  void FailSync(uint64_t sequence, sim::Random& random);
  // Each write that no sync covered is kept, lost or torn into sectors, in any order.
  void Crash(sim::Random& random);

  // Durable at once.
  void Reserve(uint64_t offset, uint64_t bytes);
  void Truncate(uint64_t bytes);
  void Set(absl::Span<const std::byte> bytes);
  // XORs `mask` into the medium at `offset`; seen by reads only where no write since hides it.
  void Damage(uint64_t offset, absl::Span<const std::byte> mask);

 private:
  void Tear(const SimWrite& write, sim::Random& random);

  SimVersion durable_;
  SimVersion newest_;
  std::vector<SimWrite> volatile_;  // by sequence
};

// The bytes as blocks of their own. REQUIRES: a multiple of kIoAlignment.
std::vector<SimBlockPtr> SimBlocks(absl::Span<const std::byte> bytes);

}  // namespace ballast::storage
