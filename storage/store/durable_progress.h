// How far a durable store's chunk is on the disk: which version its extent holds, and from where on the log is needed.
#pragma once

#include <cstdint>
#include <optional>

#include "ballast/storage/store/extent_label.h"

namespace ballast::storage {

// Threads: the store's thread.
class DurableProgress {
 public:
  // `newest`: the state that an earlier run left in the extent, if any.
  explicit DurableProgress(const std::optional<DurableChunk>& newest)
      : newest_(newest.has_value() ? *newest : DurableChunk()) {}

  // Updated since the state was last written to its extent.
  bool dirty() const { return dirty_; }
  // If dirty: the version before the first of these updates.
  int64_t needed_from() const { return needed_from_; }
  // The extent's content; version -1: nothing yet.
  const DurableChunk& newest() const { return newest_; }
  bool written() const { return newest_.version >= 0; }
  // A chunk that was never updated has no state, and perhaps no place in the job.
  bool has_state() const { return dirty_ || written(); }
  // As ChunkStore::recoverable_from.
  std::optional<int64_t> recoverable_from() const;

  // The chunk has `version` now, in memory alone.
  void Update(int64_t version);
  // The chunk has `version` now, which goes to its extent. True unless an earlier version waits for its record, too.
  bool Store(int64_t version);
  // The version of `entry` is in its extent, or on the way there.
  void Write(const DurableChunk& entry) { newest_ = entry; }
  // What memory has counts no more: nothing leads from the extent to it.
  void Void();
  // What was written is recorded.
  void Record() { unrecorded_from_.reset(); }

 private:
  void NeedFrom(int64_t version);

  bool dirty_ = false;
  int64_t needed_from_ = -1;
  DurableChunk newest_;
  // `needed_from` before the oldest version that is not recorded yet: a crash would fall back to the version before.
  std::optional<int64_t> unrecorded_from_;
};

}  // namespace ballast::storage
