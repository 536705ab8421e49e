// The space of the NVMe tier's file: which ranges are in use, which ranges have blocks on the disk, and how much space
// is promised without a place yet.
//
//   state                        in free_  in blocks_    counts toward promised_
//   in use                       no        yes           no
//   free                         yes       no            no
//   free with blocks             yes       yes           no, but covers what is promised
//   being reserved               no        not yet       from FinishPromise on
//   promised, without a place    a number of bytes only  yes
//
// Invariant: every range in use has blocks, and free ranges have at least as many blocks as are promised. So promised
// space has its blocks before it has its place, and these blocks are promised only once. A full disk refuses the
// promise, never the place later (one exception below).
//
// Promised blocks may lie in fragments that are too small for an extent. The extent then gets blocks elsewhere, and as
// many blocks of fragments go back to the disk, so the file has as many blocks as before. If the disk is full, it gets
// the fragments' blocks back first. Another program may take them before the extent does. Only then does a full disk
// refuse a place for promised space. The next promise reserves the lost blocks too.
// A promise in the making may take them as well. It then fails when it ends, and gives the blocks back. So the caller
// tries the place again once no promise is in the making.
//
// Reserving blocks may wait for every transfer of the file that is in flight, so a promise does it without the caller's
// lock, in three steps. StartPromise counts the bytes that unused blocks cover, and takes ranges for the rest out of
// the free ranges. Reservation::Run gets the blocks of these ranges. FinishPromise makes them free again, and counts
// the rest. In between, the ranges are neither free nor in use, so no other call gives them away, discards them or cuts
// them off. Promises of several callers may be in the making at the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/tier/byte_ranges.h"

namespace ballast::storage {

// A promise in the making: ranges of the file that get blocks.
struct Reservation {
  // Reserves all ranges. After an error none has blocks. Errors: BlockFile::Reserve's. Threads: any, without the lock
  // of the FileSpace.
  absl::Status Run(BlockFile* file) const;

  uint64_t bytes = 0;    // of the promise
  uint64_t covered = 0;  // of these, the bytes that unused blocks cover; StartPromise has counted them
  std::vector<ByteRange> ranges;
};

// Threads: the caller's lock. All sizes are multiples of kIoAlignment. `unused_max`: bytes of blocks that may stay
// in free ranges beyond the promised bytes. Blocks beyond this bound go back to the disk before the file gets others.
// Errors: BlockFile::Reserve's. After an error nothing has changed, except that blocks of free ranges may have gone
// back to the disk.
class FileSpace {
 public:
  // Borrows `file`.
  explicit FileSpace(BlockFile* file) : file_(file) {}

  // Call at start for each range in use, in ascending order; each has blocks. `before`: whether the gap before it is
  // free or unknown. An unknown gap is neither free nor in use.
  enum class Between { kFree, kUnknown };
  void Keep(ByteRange range, Between before);
  // Call at start after the last Keep: the rest of the file, up to `end`, is an unknown gap too.
  void KeepUpTo(uint64_t end);

  // Begins a promise of `bytes`, which FinishPromise completes. kOnePiece: makes sure that `bytes` of blocks lie in one
  // piece.
  enum class Shape { kAnyPieces, kOnePiece };
  Reservation StartPromise(uint64_t bytes, Shape shape, uint64_t unused_max);
  // `ran`: the result of Run. Returns it, or DISK_FULL if Run got blocks that an earlier promise needs. After an error
  // the bytes are not promised.
  absl::Status FinishPromise(const Reservation& reservation, absl::Status ran);
  int in_the_making() const { return in_the_making_; }
  // Returns to the disk all free blocks beyond what is promised, and any that an earlier run left in free ranges.
  void GiveBackUnused() { GiveBackUnused(promised_); }
  // Ends the promise of `bytes`. kGiveBack: free space at the file's end may go back. kStay: the blocks stay for the
  // server's next run, which promises as many.
  enum class Blocks { kGiveBack, kStay };
  void EndPromise(uint64_t bytes, Blocks blocks);
  // Gives `bytes` of the promised bytes a place, which is in use from now on, and returns its offset. Reserves blocks
  // only if no free range has enough of them in one piece. DISK_FULL while a promise is in the making: try again once
  // there is none.
  absl::StatusOr<uint64_t> TakePromised(uint64_t bytes, uint64_t unused_max);
  // Makes the range free. FreeIntoPromise also promises as many bytes.
  void Free(ByteRange range);
  void FreeIntoPromise(ByteRange range);
  // Cuts the file behind the last range: in use, free, being reserved, or an unknown gap.
  absl::Status Trim() { return file_->Truncate(end_); }

 private:
  // The place for an extent of promised bytes.
  uint64_t Place(uint64_t bytes) const;
  // A place for an extent, parts of which may lack blocks. It has no more blocks than are free and unpromised.
  uint64_t PlaceToReserve(uint64_t bytes) const;
  void MarkFree(ByteRange range);
  void MarkUsed(ByteRange range);
  // Makes sure that a range in use has blocks.
  absl::Status GetBlocks(ByteRange range, uint64_t promised_after, uint64_t unused_max);
  // Ranges without blocks of `bytes` together: free ranges first, then behind the file's end.
  std::vector<ByteRange> Missing(uint64_t bytes) const;
  // Takes the ranges out of the free ranges until they have blocks.
  void SetApart(absl::Span<const ByteRange> ranges);
  // The parts of a free range without known blocks.
  std::vector<ByteRange> Holes(ByteRange range) const;
  // Returns `bytes` of blocks in free ranges to the disk, from the smallest fragment on.
  void GiveBack(uint64_t bytes);
  void GiveBackRange(ByteRange range);
  void GiveBackUnused(uint64_t promised);
  // Cuts free space off the file's end, but keeps the blocks that are promised. While promises are in the making, the
  // last of them does the cut: the cut would wait for their reservations, and all callers that need the lock would wait
  // for the cut.
  void GiveBackEnd();
  uint64_t Unused(uint64_t promised) const { return ready_.bytes() > promised ? ready_.bytes() - promised : 0; }

  BlockFile* const file_;
  ByteRanges free_;
  ByteRanges blocks_;  // has blocks, free or in use. Not known: what an earlier run left in free ranges
  ByteRanges ready_;   // free, with blocks
  uint64_t promised_ = 0;
  int in_the_making_ = 0;  // promises between StartPromise and FinishPromise
  bool cut_later_ = false;
  uint64_t end_ = 0;  // of the last range in use, free or being reserved
};

}  // namespace ballast::storage
