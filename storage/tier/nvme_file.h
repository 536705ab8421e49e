// A file of extents, on one disk. At start the file keeps the extents with state of durable jobs; all other space is
// free.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/file_space.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

class NvmeFile;

// Promised space of one file, with its share of the budget: an extent made from a room finds its blocks on the disk.
class FileRoom {
 public:
  FileRoom() = default;
  FileRoom(NvmeFile* file, BudgetLease lease) : file_(file), lease_(std::move(lease)) {}
  FileRoom(FileRoom&& other) noexcept { *this = std::move(other); }
  FileRoom& operator=(FileRoom&& other) noexcept;
  ~FileRoom() { Release(FileSpace::Blocks::kGiveBack); }
  NvmeFile* file() const { return file_; }
  uint64_t bytes() const { return lease_.bytes(); }
  TierPart part() const { return lease_.part(); }
  const std::shared_ptr<Account>& account() const { return lease_.account(); }
  void Mark(TierPart part) { lease_.Mark(part); }
  void Charge(const std::shared_ptr<Account>& account) { lease_.Charge(account); }
  // Splits `bytes` off into a room of their own. REQUIRES: bytes <= bytes().
  FileRoom Split(uint64_t bytes) { return {file_, lease_.Split(bytes)}; }
  // Adds a room of the same file. Its bytes take this room's part and account.
  void Join(FileRoom other);
  // Ends the promise, and leaves the blocks to the next run of the server, which then finds them on a full disk too.
  void Leave() { Release(FileSpace::Blocks::kStay); }

 private:
  friend class NvmeFile;
  void Release(FileSpace::Blocks blocks);
  NvmeFile* file_ = nullptr;
  BudgetLease lease_;
};

// A part of the file that has its blocks, with its share of the budget. Its initial content is undefined.
class NvmeExtent {
 public:
  NvmeExtent() = default;
  NvmeExtent(NvmeFile* file, uint64_t offset, BudgetLease lease)
      : file_(file), offset_(offset), lease_(std::move(lease)) {}
  NvmeExtent(NvmeExtent&& other) noexcept { *this = std::move(other); }
  NvmeExtent& operator=(NvmeExtent&& other) noexcept;
  ~NvmeExtent() { Release(); }
  // Null if the extent is empty.
  NvmeFile* home() const { return file_; }
  // The file to read and write. REQUIRES: the extent is not empty.
  const BlockFile& file() const;
  // Id of the file; 0 if the extent is empty.
  NvmeFileId file_id() const;
  uint64_t offset() const { return offset_; }
  uint64_t bytes() const { return lease_.bytes(); }
  void Mark(TierPart part) { lease_.Mark(part); }
  void Charge(const std::shared_ptr<Account>& account) { lease_.Charge(account); }
  // Frees the extent, and promises its space (blocks and budget) to the caller.
  FileRoom TakeRoom();
  // Returns the extent to its file as a kept extent: the content stays, for the next run of the server.
  void Leave();

 private:
  friend class NvmeFile;
  ByteRange range() const { return {offset_, offset_ + bytes()}; }
  void Release();
  NvmeFile* file_ = nullptr;
  uint64_t offset_ = 0;
  BudgetLease lease_;
};

// Threads: any.
class NvmeFile {
 public:
  struct Options {
    NvmeFileId id = 0;
    size_t share = 0;  // of the ledger
    uint64_t header_bytes = 0;
    uint64_t bytes_max = kNvmeFileBytesMax;
  };
  NvmeFile(std::unique_ptr<BlockFile> file, Ledger* ledger, const Options& options);
  ~NvmeFile();  // kept extents without an owner stay on the disk
  NvmeFileId id() const { return options_.id; }
  size_t share() const { return options_.share; }
  const BlockFile& file() const { return *file_; }

  // Call at start. `kept`: the extents of this file whose content must stay. TakeKept hands them out, but refuses those
  // outside the file and those that overlap; the bytes of the latter still stay. `unnamed_stays`: as in TiersOptions.
  // Any refused extent has the same effect, because its entry is wrong and its state may lie where no entry says.
  // RESOURCE_EXHAUSTED (BUDGET) if the kept extents exceed the budget.
  absl::Status Keep(std::vector<ExtentPlace> kept, bool unnamed_stays);
  // Returns the space behind the last extent to the disk. Call only after all wanted state was found: state that no
  // entry names may lie there.
  absl::Status Trim();
  // DATA_LOSS (IO) unless the extent was kept and has not been taken since.
  absl::StatusOr<NvmeExtent> TakeKept(uint64_t offset);

  // Promises `bytes`, a multiple of 4096. RESOURCE_EXHAUSTED: (BUDGET), (DISK_FULL) if the disk itself is full, (IO) if
  // the file would become longer than it may be. May wait for the disk, and holds up no other call while it reserves
  // blocks. The bytes count as TierPart::kSpare until extents are made of them.
  absl::StatusOr<FileRoom> Promise(uint64_t bytes, absl::string_view what, FileSpace::Shape shape)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes an extent of a part of `room`. REQUIRES: `bytes` <= room->bytes(), a multiple of 4096. After an error `room`
  // is unchanged. If the room's blocks lie in fragments, the call reserves others, and all calls of the file wait
  // meanwhile. On a full disk it waits for promises in the making. It fails with DISK_FULL only if another program took
  // blocks that FileSpace had just given back (file_space.h).
  absl::StatusOr<NvmeExtent> AllocateFrom(FileRoom* room, uint64_t bytes, absl::string_view what);
  // As SharedSync, for any of the jobs that share the file.
  absl::Status Sync() { return Noted(sync_.Sync()); }

  // A write on the caller's thread, between BeginWrite and EndWrite. Errors: BlockFile's.
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> bytes);
  // Around each write of an extent: new versions go where little is being written.
  void BeginWrite(uint64_t bytes) { writing_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  // Returns `written`. After an error of the device, which the message names, new extents go to other devices.
  absl::Status EndWrite(uint64_t bytes, const absl::Status& written);
  uint64_t writing_bytes() const { return writing_bytes_.load(std::memory_order_relaxed); }
  // Bytes of all extents that were made of rooms so far.
  uint64_t given_bytes() const { return given_bytes_.load(std::memory_order_relaxed); }
  // A write or a sync has failed.
  bool failing() const { return failing_.load(std::memory_order_relaxed); }

 private:
  bool IsPlace(const ExtentPlace& place, uint64_t file_bytes) const;
  friend class NvmeExtent;
  friend class FileRoom;
  void KeepAgain(NvmeExtent extent);
  absl::Status Noted(const absl::Status& status);
  // Promises `bytes`, and gets their blocks.
  absl::Status Reserve(uint64_t bytes, FileSpace::Shape shape) ABSL_LOCKS_EXCLUDED(mutex_);
  // Bytes of unused blocks that may stay on the disk within the budget.
  uint64_t UnusedMax() const { return ledger_->NvmeFree(options_.share); }

  const std::unique_ptr<BlockFile> file_;
  Ledger* const ledger_;
  const Options options_;
  std::atomic<uint64_t> writing_bytes_ = 0, given_bytes_ = 0;
  std::atomic<bool> failing_ = false;
  SharedSync sync_;
  absl::Mutex mutex_;
  FileSpace space_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, NvmeExtent> kept_ ABSL_GUARDED_BY(mutex_);
  std::vector<NvmeExtent> disputed_ ABSL_GUARDED_BY(mutex_);
};

inline const BlockFile& NvmeExtent::file() const { return file_->file(); }
inline NvmeFileId NvmeExtent::file_id() const { return file_ == nullptr ? 0 : file_->id(); }

}  // namespace ballast::storage
