// The memory and the file behind ballast.torch.stash: bytes that a trainer's forward pass puts aside and its backward
// pass takes back. Knows neither tensors nor Python.
//
// A part is what one call puts aside, at most kPartBytesMax bytes. Parts go to DRAM until the budget is spent, then to
// the file. On its way to and from the file a part lies in staging memory:
//
//   Put: DRAM, or staging -> the disk's thread writes -> the staging memory stays with the part, *clean*, until another
//   part needs the memory. Take of part n: memory of the part, or a read into staging; at the same time the parts put
//   aside before n are read ahead, the newest first, as far as staging goes: backward runs against the order of
//   forward. Take returns the part's staging memory.
//
// Clean memory is taken from the oldest part first, since backward needs the oldest last; a part is never read ahead in
// place of a newer one. So the end of a forward pass is still in staging when backward begins. A wrong guess costs a
// wait, never a wrong byte: each Take of a part from the file compares its CRC-32C.
//
// The file has no name: its space goes to the disk with the process, however the process ends. Nothing is synced.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/client/python/native/stash/disk_thread.h"
#include "ballast/client/python/native/stash/stash_space.h"
#include "ballast/storage/memory/slabs.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::stash {

// A transfer of 4 MiB runs at the speed of an NVMe device, and staging for several is small.
inline constexpr uint64_t kPartBytesMax = uint64_t{4} << 20;

struct StashOptions {
  storage::TierBytes budget;  // dram and nvme; hbm is not used
  std::string path;           // of a file that does not exist, in a folder that does; not used without nvme
  // DRAM beside the budget, for parts on their way to and from the file; at least 2 x kPartBytesMax. Not taken without
  // nvme.
  uint64_t staging_bytes = uint64_t{32} << 20;
  std::optional<int> gpu;         // page-locks all memory for this device
  storage::Disk* disk = nullptr;  // null: the system's
};

// Bytes; all but the first two since the Stash was opened.
struct StashCounters {
  uint64_t dram = 0;  // parts that lie there now
  uint64_t nvme = 0;
  uint64_t written = 0;  // to the file
  uint64_t read = 0;
  double waited_seconds = 0;  // of all callers, for staging memory and for reads
};

class Stash;

// A part, owned. Destroying it frees its space; a forked child's copy does nothing. Threads: any, one at a time.
class StashedPart {
 public:
  StashedPart(StashedPart&& other) noexcept = default;
  StashedPart& operator=(StashedPart&& other) noexcept {
    std::swap(stash_, other.stash_);
    std::swap(number_, other.number_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~StashedPart();

  uint64_t bytes() const { return bytes_; }
  // Between Stash::Begin and Finish: memory to fill.
  absl::Span<std::byte> memory() const;
  // The memory is filled: from now on the part may be taken.
  void Finish();

  // Copies the part to `to`, which has bytes(), and reads ahead. May wait for the disk. After an error `to` is
  // undefined. DATA_LOSS: (CHECKSUM) the file did not return what was written, (IO) the disk cannot read the part.
  // INTERNAL (IO): the part could not be written. UNIMPLEMENTED (UNSUPPORTED): in a forked child.
  absl::Status Take(absl::Span<std::byte> to);
  // As Take, without a copy: the part's own memory, which stays until Release. A caller must hold few parts: Take and
  // Put wait for staging memory that others hold.
  absl::StatusOr<absl::Span<const std::byte>> Hold();
  void Release();
  // False: Take and Hold would wait for the disk.
  bool ready() const;

 private:
  friend class Stash;
  StashedPart(std::shared_ptr<Stash> stash, uint64_t number, uint64_t bytes)
      : stash_(std::move(stash)), number_(number), bytes_(bytes) {}
  std::shared_ptr<Stash> stash_;  // null: moved from
  uint64_t number_;
  uint64_t bytes_;
};

// Threads: any. Lives as long as one of its parts. After a failed write every later Put that needs the file fails.
class Stash : public std::enable_shared_from_this<Stash> {
 public:
  // Allocates staging; DRAM is allocated as parts come. INVALID_ARGUMENT (BAD_CONFIG) for staging that is too small;
  // errors of Disk::Open and Arena::Map.
  static absl::StatusOr<std::shared_ptr<Stash>> Open(const StashOptions& options);
  // Use LeaveToParent in a forked child.
  ~Stash() = default;

  // Puts a copy of `bytes` aside, 1 to kPartBytesMax bytes. Waits while all staging memory is on its way to the disk.
  // RESOURCE_EXHAUSTED: (BUDGET) says how many bytes are short, (DISK_FULL); INTERNAL (IO): the disk failed.
  // UNIMPLEMENTED (UNSUPPORTED): in a forked child.
  absl::StatusOr<StashedPart> Put(absl::Span<const std::byte> bytes);
  // The same, for a caller that fills the part's memory, and then calls Finish.
  absl::StatusOr<StashedPart> Begin(uint64_t bytes);

  StashCounters counters() const;
  // Empty, or why transfers go through the page cache.
  std::string buffered_because() const { return space_.file() == nullptr ? "" : space_.file()->buffered_because(); }
  // True in the process that opened the Stash. A forked child has neither its memory nor its thread.
  bool own() const;

 private:
  friend class StashedPart;
  struct Part {
    enum class Where {
      kFilling,  // between Begin and Finish
      kDram,
      kWriting,  // from staging; the memory can be taken
      kReading,  // into staging
      kFile,     // and in staging, if there is memory
    };
    Where where = Where::kFilling;
    uint64_t bytes = 0;
    absl::Span<std::byte> memory;  // rounded up to kIoAlignment; empty: none
    storage::NvmeExtent extent;    // empty: in DRAM
    uint32_t crc32c = 0;           // of a part in the file
    int holders = 0;               // callers that use `memory`, or wait for the read
    bool taken = false;            // since the last read, or at all: the caller has its copy
    bool dropped = false;          // to be erased by the last holder or transfer
    absl::Status failed;           // of the last transfer
    bool in_transfer() const { return where == Where::kWriting || where == Where::kReading; }
  };
  using Parts = std::map<uint64_t, Part>;

  explicit Stash(const StashOptions& options);
  absl::Status OpenFile(const StashOptions& options);
  // Staging memory; takes clean memory of parts below `before`. Empty if there is none.
  absl::Span<std::byte> TryStaging(uint64_t bytes, uint64_t before) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Span<std::byte> AwaitStaging(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wait() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Afterwards the part is in the file alone, if it was written.
  void GiveStagingBack(Parts::iterator part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartRead(Parts::iterator part, absl::Span<std::byte> memory, DiskThread::Turn turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadAhead(uint64_t before) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A holder or a transfer ended, or the part was dropped. Once nobody uses the part: erases a dropped part and returns
  // its extent, which goes to `space_` without the lock. Staging memory of a part in the file becomes clean, or goes if
  // the part was taken.
  storage::NvmeExtent Settle(Parts::iterator part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  storage::NvmeExtent Erase(Parts::iterator part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Finish(uint64_t number, uint32_t crc32c) ABSL_LOCKS_EXCLUDED(mutex_);
  void Transferred(const storage::IoCompletion& completion) ABSL_LOCKS_EXCLUDED(mutex_);
  // A part whose memory holds its bytes until Release. `crc32c`: to be compared; none for a part in DRAM.
  struct Held {
    absl::Span<const std::byte> bytes;
    std::optional<uint32_t> crc32c;
  };
  absl::StatusOr<Held> Hold(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // OK, or DATA_LOSS (CHECKSUM).
  absl::Status Compare(uint64_t number, const Held& held, uint32_t came) const ABSL_LOCKS_EXCLUDED(mutex_);
  void Drop(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Span<std::byte> MemoryOf(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  bool Ready(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckProcess() const;

  const pid_t pid_;
  StashSpace space_;
  storage::Slabs staging_;

  mutable absl::Mutex mutex_;
  absl::CondVar changed_;                // a transfer or a holder ended
  Parts parts_ ABSL_GUARDED_BY(mutex_);  // by number, in the order of Put
  // Numbers of parts that are in the file and nowhere else: to be read ahead, or taken before.
  std::set<uint64_t> in_file_ ABSL_GUARDED_BY(mutex_), taken_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> clean_ ABSL_GUARDED_BY(mutex_);  // in the file and in staging, without holders
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  // Parts below are read ahead as staging memory comes free: backward's place. 0: forward goes on.
  uint64_t ahead_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status write_failed_ ABSL_GUARDED_BY(mutex_);
  StashCounters counters_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<DiskThread> disk_;  // null without a budget for NVMe; ends before all that its transfers use
};

}  // namespace ballast::stash
