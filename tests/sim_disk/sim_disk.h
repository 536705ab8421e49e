// A disk in memory that keeps no promise a real one may break: it reorders, tears and loses what was not synced when it
// crashes, and it suffers the faults a test asks for. Everything it does follows from its seed and the order of the
// calls: the same calls from one thread give the same bytes.
//
// An operation is one call to Open, Remove, Read, Write, Sync, Reserve, Discard or Truncate, or one request of a queue,
// whatever its size. Those on a dead handle, and those refused for misalignment, are none.
//
// Kinder than a real disk in three things: creation and removal of files, truncation and reservation are durable at
// once; there are no directories; and a removed file's space is free at once, though it may still be open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/io/disk.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_content.h"
#include "ballast/tests/sim_disk/sim_faults.h"

namespace ballast::storage {

// Outlives its files and queues. Threads: any; a Queue's as IoQueue says. Blocks for its own lock only.
class SimDisk : public Disk {
 public:
  explicit SimDisk(uint64_t seed) : random_(seed) {}
  ~SimDisk() override;

  absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode) override;
  absl::Status Remove(const std::string& path) override;
  // Requests are performed inside Reap, in random order, some of them each time; what is left when the queue is
  // destroyed is performed then. Chooses nothing by `options`; named "sim".
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions& options) override;

  // The machine loses power and starts again: open files are dead (INTERNAL (IO) from all they do), locks are free,
  // requests in flight have ended and their buffers are not touched any more. Each write not covered by a sync, those
  // in flight too, was applied, lost or torn into sectors. Ends a CrashAfter.
  void Crash() ABSL_LOCKS_EXCLUDED(mutex_);
  // The n-th operation from now, from 1, fails, done or not, and the machine crashes and stays off: all operations,
  // Open too, are INTERNAL (IO) until Crash() starts it again. 0: never.
  void CrashAfter(uint64_t operations) ABSL_LOCKS_EXCLUDED(mutex_);
  // CrashAfter came true, and no Crash() since.
  bool off() const ABSL_LOCKS_EXCLUDED(mutex_);

  // 1 GiB unless told. What is more is refused with RESOURCE_EXHAUSTED (IO); of a write, the blocks that fit are there.
  void set_capacity_bytes(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

  // As SimFaultPlan's; end the program if the operation cannot suffer that.
  void FailNext(SimOperation operation, uint64_t k, SimFault fault) ABSL_LOCKS_EXCLUDED(mutex_);
  void SetFaultProbability(SimOperation operation, SimFault fault, double probability) ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t operations() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t operations(SimOperation operation) const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t suffered(SimFault fault) const ABSL_LOCKS_EXCLUDED(mutex_);

  // The medium as another machine would find it. These are no operations: nothing is counted, refused or fails. A file
  // that is missing is empty, and is made by what changes it.
  std::vector<std::string> List() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::byte> DurableContent(const std::string& path) const ABSL_LOCKS_EXCLUDED(mutex_);
  void SetContent(const std::string& path, absl::Span<const std::byte> bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void TruncateTo(const std::string& path, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Every byte of the range that is inside the durable file becomes another one. Writes that were not synced hide it
  // until they are lost, and mend it when they are synced.
  void Corrupt(const std::string& path, uint64_t offset, uint64_t length) ABSL_LOCKS_EXCLUDED(mutex_);
  void FlipBit(const std::string& path, uint64_t bit) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class File;
  class Queue;
  struct Inode {
    SimContent content;
    bool locked = false;
  };
  // What an operation is about.
  struct Target {
    std::string path;
    std::shared_ptr<Inode> inode;  // null before it is open
    uint64_t life = 0;             // of the machine, which the handle does not survive
  };
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // Begin counts the operation, and is an error if it is over already: then it is not done. Every Begin that is OK is
  // followed by its End, which says how the operation went.
  absl::StatusOr<std::optional<SimFault>> Begin(SimOperation operation, const Target& target, Extent extent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status End(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LosePower() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status Read(const Target& target, uint64_t offset, absl::Span<std::byte> buffer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(const Target& target, uint64_t offset, absl::Span<const std::byte> buffer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Sync(const Target& target, uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // What Read, Write and Sync do between Begin and End.
  absl::Status DoRead(const Target& target, uint64_t offset, absl::Span<std::byte> buffer,
                      std::optional<SimFault> fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DoWrite(const Target& target, uint64_t offset, absl::Span<const std::byte> buffer,
                       std::optional<SimFault> fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DoSync(const Target& target, uint64_t sequence, std::optional<SimFault> fault)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DoOpen(Mode mode, Target& target, std::optional<SimFault> fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  uint64_t UsedBlocks() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t FreeBlocks() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first blocks of the range, as many as there is space for.
  uint64_t BlocksThatFit(const Inode& inode, uint64_t first, uint64_t count) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where a write of these blocks may land instead.
  std::optional<uint64_t> Elsewhere(const Inode& inode, uint64_t first, uint64_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Rot(Inode& inode, Extent extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Inode& At(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  sim::Random random_ ABSL_GUARDED_BY(mutex_);
  SimFaultPlan faults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Inode>> files_ ABSL_GUARDED_BY(mutex_);
  std::vector<Queue*> queues_ ABSL_GUARDED_BY(mutex_);  // in the order they were made
  // Grows with every write: what a sync covers.
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t capacity_bytes_ ABSL_GUARDED_BY(mutex_) = uint64_t{1} << 30;
  uint64_t life_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t operations_to_crash_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none planned
  bool crash_is_due_ ABSL_GUARDED_BY(mutex_) = false;         // at the End of what began
  bool off_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::storage
