// Reads of chunk state from any tier, beside a running step.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Compares the digest of one array of the chunk, as `layout` has it, with what was written. DATA_LOSS (CHECKSUM) names
// the chunk, the array, the file and the offset.
absl::Status CompareDigest(const WrittenState& written, const StoredChunk& chunk, const StateLayout& layout,
                           StateArray array, uint32_t found);

// The same of all arrays: the first difference.
absl::Status CompareDigests(const WrittenState& written, const StoredChunk& chunk, const ArrayDigests& found);

// Threads: any. A read from disk uses one of few small buffers, and waits for one where all are in use.
class ChunkReader {
 public:
  static constexpr uint64_t kStagingBytes = uint64_t{1} << 20;
  // Receives bytes [at, at + bytes.size()) of the requested range, in order and in pieces of whole fp32. If the read
  // then fails, the bytes received so far are void.
  using Sink = absl::FunctionRef<void(uint64_t at, absl::Span<const std::byte> bytes)>;

  explicit ChunkReader(Tiers* tiers, std::shared_ptr<Account> account = nullptr)
      : tiers_(tiers), account_(std::move(account)) {}

  // Takes the buffer for NVMe, once. RESOURCE_EXHAUSTED (BUDGET). Once prepared, neither call waits for a read: callers
  // hold locks that other jobs need.
  absl::Status Prepare(DramTier::Limit limit = DramTier::Limit::kBudget);
  bool prepared() const { return prepared_; }
  // Gives all buffers back. REQUIRES: nobody reads from disk.
  void Release();
  // More buffers for reads from disk: whole multiples of kStagingBytes. Borrows the memory. REQUIRES: prepared().
  void AddBuffers(absl::Span<std::byte> memory);

  // Bytes [begin, begin + count) of an array, within UsedBytes; of the fp32 master, where the chunk keeps its
  // remainder. The chunk's lock is not held during a read from disk.
  absl::Status Read(const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count, Sink sink)
      ABSL_SHARED_LOCKS_REQUIRED(chunk.reading) ABSL_LOCKS_EXCLUDED(chunk.mutex);
  // As Read, as the array is stored: bytes within ArrayBytes.
  absl::Status ReadStored(const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count, Sink sink)
      ABSL_SHARED_LOCKS_REQUIRED(chunk.reading) ABSL_LOCKS_EXCLUDED(chunk.mutex);
  absl::Status ReadCopy(const StoredChunk& chunk, const PinnedCopy& copy, StateArray array, uint64_t begin,
                        uint64_t count, Sink sink) ABSL_SHARED_LOCKS_REQUIRED(chunk.reading);
  // Copies the chunk's arrays from device memory to `state_at` of the file.
  absl::StatusOr<ArrayDigests> Spill(const StoredChunk& chunk, NvmeFile* to, uint64_t state_at);

 private:
  // As Read, of a master whose remainder is stored: reads the whole remainder, into memory of its own.
  absl::Status ReadJoined(const StoredChunk& chunk, uint64_t begin, uint64_t count, Sink sink)
      ABSL_SHARED_LOCKS_REQUIRED(chunk.reading) ABSL_LOCKS_EXCLUDED(chunk.mutex);
  absl::Status ReadExtent(const WrittenState& written, const StoredChunk& chunk, const StateLayout& layout,
                          StateArray array, uint64_t begin, uint64_t count, Sink sink);
  absl::Status ReadDevice(const std::byte* from, uint64_t count, Sink sink);
  // Takes a buffer for the life of the object.
  class Buffer;

  Tiers* const tiers_;
  const std::shared_ptr<Account> account_;
  absl::Mutex mutex_;
  DramBlock staging_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::byte*> buffers_ ABSL_GUARDED_BY(mutex_);  // that no read uses
  std::atomic<bool> prepared_{false};
};

}  // namespace ballast::storage
