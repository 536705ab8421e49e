// A disk in memory that keeps no promise a real disk may break. A crash reorders, tears and loses unsynced writes, and
// a test can ask for faults. The seed and the order of the calls decide everything: the same calls from a single thread
// give the same bytes.
//
// An operation is a call to Open, Remove, Read, Write, Sync, Reserve, Discard or Truncate, or a request of a queue, of
// any size. Calls on a dead handle, calls while the machine is off, and misaligned calls do not count.
//
// The disk is kinder than a real disk in three ways. Creating, removing, truncating and reserving files is durable at
// once. There are no directories. A removed file's space is free at once, even while the file is still open.
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

// Must outlive its files and queues. Threads: any; a Queue's as IoQueue says. Blocks for its own lock only.
class SimDisk : public Disk {
 public:
  explicit SimDisk(uint64_t seed) : random_(seed) {}
  ~SimDisk() override;

  absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode) override;
  bool Exists(const std::string& path) const override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Remove(const std::string& path) override;
  // Reap performs some of the requests each time, in random order; the destructor performs the rest. The queue is named
  // "sim" and ignores `options`.
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions& options) override;

  // The machine loses power and starts again. Open files are dead (every call is INTERNAL (IO)), locks are free,
  // requests in flight have ended and their buffers are no longer touched. Each write not covered by a sync, in flight
  // or not, was applied, lost or torn into sectors. Cancels a CrashAfter.
  void Crash() ABSL_LOCKS_EXCLUDED(mutex_);
  // The n-th operation from now (counted from 1) fails, whether done or not. The machine then crashes and stays off:
  // all operations, Open included, are INTERNAL (IO) until Crash() starts the machine again. 0: never.
  void CrashAfter(uint64_t operations) ABSL_LOCKS_EXCLUDED(mutex_);
  // True after a CrashAfter has struck, until Crash().
  bool off() const ABSL_LOCKS_EXCLUDED(mutex_);

  // 1 GiB by default. Larger writes and reservations fail with RESOURCE_EXHAUSTED (DISK_FULL); a write still stores the
  // blocks that fit.
  void set_capacity_bytes(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

  // As in SimFaultPlan. Abort the program if the operation cannot suffer the fault.
  void FailNext(SimOperation operation, uint64_t k, SimFault fault) ABSL_LOCKS_EXCLUDED(mutex_);
  void SetFaultProbability(SimOperation operation, SimFault fault, double probability) ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t operations() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t operations(SimOperation operation) const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t suffered(SimFault fault) const ABSL_LOCKS_EXCLUDED(mutex_);

  // The following calls access the medium directly, as on a second machine. They are no operations: nothing is counted,
  // refused or fails. A missing file reads as empty, and a change creates the file.
  std::vector<std::string> List() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::byte> DurableContent(const std::string& path) const ABSL_LOCKS_EXCLUDED(mutex_);
  void SetContent(const std::string& path, absl::Span<const std::byte> bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void TruncateTo(const std::string& path, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Changes every byte of the range inside the durable file. Unsynced writes hide the damage until they are lost, and
  // mend the damage when they are synced.
  void Corrupt(const std::string& path, uint64_t offset, uint64_t length) ABSL_LOCKS_EXCLUDED(mutex_);
  void FlipBit(const std::string& path, uint64_t bit) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class File;
  class Queue;
  struct Inode {
    SimContent content;
    bool locked = false;
  };
  // The object of an operation.
  struct Target {
    std::string path;
    std::shared_ptr<Inode> inode;  // null until Open has found the file
    uint64_t life = 0;             // of the machine; a crash starts a new life and ends the handle
  };
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // Begin counts the operation and returns its fault, if any. If Begin returns an error, the operation has already
  // failed: do nothing. Otherwise perform the operation and return its status through End.
  absl::StatusOr<std::optional<SimFault>> Begin(SimOperation operation, const Target& target, Extent extent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status End(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LosePower() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status Read(const Target& target, uint64_t offset, absl::Span<std::byte> buffer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(const Target& target, uint64_t offset, absl::Span<const std::byte> buffer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Sync(const Target& target, uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The part of Read, Write, Sync and Open between Begin and End.
  absl::Status DoRead(const Target& target, uint64_t offset, absl::Span<std::byte> buffer,
                      std::optional<SimFault> fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DoWrite(const Target& target, uint64_t offset, absl::Span<const std::byte> buffer,
                       std::optional<SimFault> fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DoSync(const Target& target, uint64_t sequence, std::optional<SimFault> fault)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DoOpen(Mode mode, Target& target, std::optional<SimFault> fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  uint64_t UsedBlocks() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t FreeBlocks() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Number of blocks, from the first of the range on, that find space.
  uint64_t BlocksThatFit(const Inode& inode, uint64_t first, uint64_t count) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A different place in the file for a write of these blocks; nullopt if there is none.
  std::optional<uint64_t> Elsewhere(const Inode& inode, uint64_t first, uint64_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Rot(Inode& inode, Extent extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Inode& At(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  sim::Random random_ ABSL_GUARDED_BY(mutex_);
  SimFaultPlan faults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Inode>> files_ ABSL_GUARDED_BY(mutex_);
  std::vector<Queue*> queues_ ABSL_GUARDED_BY(mutex_);  // in order of creation
  // Grows with every write. A sync covers the writes up to its value at that time.
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t capacity_bytes_ ABSL_GUARDED_BY(mutex_) = uint64_t{1} << 30;
  uint64_t life_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t operations_to_crash_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none planned
  bool crash_is_due_ ABSL_GUARDED_BY(mutex_) = false;         // at the End of the current operation
  bool off_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::storage
