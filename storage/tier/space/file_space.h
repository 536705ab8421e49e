// The space of the NVMe tier's file: which ranges are in use, which ranges have blocks on the disk, and how much space
// is promised without a place yet.
//
// Invariant: every range in use has blocks, and free ranges have at least as many blocks as are promised. So promised
// space is counted once, and nobody else's: it has its blocks before it has its place, and a full disk refuses the
// promise, never the place.
//
// If promised blocks lie in fragments that are too small for an extent, the extent gets blocks elsewhere, and as many
// blocks of fragments go back to the disk: the file's blocks stay the same in number. A disk without a free block gets
// the fragments' blocks back first. In between another program may take these blocks, if the disk has none besides:
// the only case in which a place for promised space is refused. The next promise then reserves the lost blocks along.
// If a promise in the making took the blocks, that promise fails as it ends, and gives them back; the caller tries the
// place again once no promise is in the making.
//
// A reservation may wait for every transfer of the file that is in flight, so a promise reserves its blocks without the
// caller's lock: StartPromise counts the part of the promise that unused blocks cover, and takes the ranges of the rest
// out of the free ranges; Reservation::Run gets their blocks; FinishPromise makes the ranges free again and counts the
// rest. A range between the two is neither free nor in use, so nobody else gives it away, discards it or cuts it off.
// Promises of several callers may be in the making at the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/tier/space/byte_ranges.h"

namespace ballast::storage {

// A promise in the making: ranges of the file that get blocks.
struct Reservation {
  // Reserves all ranges. After an error none has blocks. Errors: BlockFile::Reserve's. Threads: any, without the lock
  // of the FileSpace.
  absl::Status Run(BlockFile* file) const;

  uint64_t bytes = 0;    // of the promise
  uint64_t covered = 0;  // of them, those that unused blocks cover, which are counted already
  std::vector<ByteRange> ranges;
};

// Threads: the caller's lock. All sizes are multiples of kIoAlignment. `unused_max`: bytes of blocks that may stay
// in free ranges beyond the promised bytes. Beyond this bound blocks go back to the disk before the file gets others.
// Errors: BlockFile::Reserve's; then nothing has changed, but that unused blocks may have gone back to the disk.
class FileSpace {
 public:
  // Borrows `file`.
  explicit FileSpace(BlockFile* file) : file_(file) {}

  // At start, in ascending order: a range in use that has blocks. `before`: what lies between it and the range before.
  enum class Between { kFree, kUnknown };
  void Keep(ByteRange range, Between before);
  // At start: what lies behind the last range, up to `end`, stays.
  void KeepUpTo(uint64_t end);

  // Begins a promise of `bytes`, which FinishPromise ends. kOnePiece: reserves blocks where an extent of `bytes` fits,
  // if there are not enough in one piece.
  enum class Shape { kAnyPieces, kOnePiece };
  Reservation StartPromise(uint64_t bytes, Shape shape, uint64_t unused_max);
  // `ran`: the result of Run, which is returned unless the promise got blocks of an earlier promise: DISK_FULL. After
  // an error nothing is promised.
  absl::Status FinishPromise(const Reservation& reservation, absl::Status ran);
  int in_the_making() const { return in_the_making_; }
  // Returns to the disk all blocks that nobody was promised, also those in free ranges that nobody knows of.
  void GiveBackUnused() { GiveBackUnused(promised_); }
  // The promised blocks are nobody's. kStay: they stay in the file for the next run, which wants as many.
  enum class Blocks { kGiveBack, kStay };
  void EndPromise(uint64_t bytes, Blocks blocks);
  // The offset of a range of `bytes`, a part of the promised bytes, from now on in use. Reserves blocks only where no
  // free range has enough of them in one piece. DISK_FULL while a promise is in the making: try again afterwards.
  absl::StatusOr<uint64_t> TakePromised(uint64_t bytes, uint64_t unused_max);
  // The range is free. FreeIntoPromise: as many bytes are promised.
  void Free(ByteRange range);
  void FreeIntoPromise(ByteRange range);
  // Ends the file behind the last range that is in use or promised.
  absl::Status Trim() { return file_->Truncate(end_); }

 private:
  // Where an extent of promised bytes goes.
  uint64_t Place(uint64_t bytes) const;
  // Where an extent would fit if all of its place had blocks; contains at most as many blocks as nobody was promised.
  uint64_t PlaceToReserve(uint64_t bytes) const;
  void MarkFree(ByteRange range);
  void MarkUsed(ByteRange range);
  // Makes sure that a range in use has blocks.
  absl::Status GetBlocks(ByteRange range, uint64_t promised_after, uint64_t unused_max);
  // Free ranges without blocks, then the file's end: together `bytes`.
  std::vector<ByteRange> Missing(uint64_t bytes) const;
  // The ranges get blocks: until then they are neither free nor in use.
  void SetApart(absl::Span<const ByteRange> ranges);
  // The parts of a free range without known blocks.
  std::vector<ByteRange> Holes(ByteRange range) const;
  // Returns `bytes` of blocks in free ranges to the disk, from the smallest fragment on.
  void GiveBack(uint64_t bytes);
  void GiveBackRange(ByteRange range);
  void GiveBackUnused(uint64_t promised);
  // Shortens the file by free ranges at its end, and no further than the promise allows. Waits for the end of promises
  // in the making: a disk that is slow to reserve would hold up the call, and so everybody who needs the lock.
  void GiveBackEnd();
  uint64_t Unused(uint64_t promised) const { return ready_.bytes() > promised ? ready_.bytes() - promised : 0; }

  BlockFile* const file_;
  ByteRanges free_;
  ByteRanges blocks_;  // has blocks, free or in use. At start blocks of free ranges are not known
  ByteRanges ready_;   // free, with blocks
  uint64_t promised_ = 0;
  int in_the_making_ = 0;  // promises between StartPromise and FinishPromise
  bool cut_later_ = false;
  uint64_t end_ = 0;  // of the last range in use, free or being reserved
};

}  // namespace ballast::storage
