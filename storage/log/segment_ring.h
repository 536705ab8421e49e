// The log segments of a gradient log as a ring: which segment takes records, what each one is still needed for, how
// much room is left, and when a cut may be told. No file and no thread: the caller does the I/O and holds the lock.
//
// A segment is free, or live, or cut. Roll makes a free segment live and gives it the next incarnation. A live segment
// is cut, oldest first, when no transaction needs its payloads any more and a newer segment's first record is durable.
// A cut is told by a batch, whose head names the oldest incarnation that is not cut; once that batch is durable, cut
// segments are free again.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <vector>

#include "ballast/storage/log/log_format.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::storage {

// Threads: the caller's lock.
class SegmentRing {
 public:
  explicit SegmentRing(uint64_t segment_bytes) : segment_bytes_(segment_bytes) {}
  // The ring of an earlier run. Every live segment stays until Keep says what it is needed for.
  explicit SegmentRing(const ScannedLog& scanned);

  uint64_t count() const { return segments_.size(); }
  uint64_t free_count() const { return free_.size(); }
  bool is_free(uint64_t segment) const { return free_.contains(segment); }
  // A segment's room for records, as RecordCostMax counts.
  static uint64_t RecordBytesMax(uint64_t segment_bytes) {
    return segment_bytes - kSegmentHeadBytes - 2 * kCutBatchBytes;
  }
  uint64_t room() const { return room_; }
  // Does a record of this cost fit into the current segment?
  bool HasRoom(uint64_t cost) const { return cost + kCutBatchBytes <= room_; }
  // The lowest incarnation that is live; the highest number if none is.
  uint64_t oldest() const;

  // Adds free segments behind the others.
  void Add(uint64_t segments);
  // A segment that begins: its head is to be written before its first batch.
  struct Beginning {
    uint64_t incarnation = 0;
    uint64_t segment = 0;  // index
    uint64_t oldest = 0;   // as oldest(), this one included
  };
  // Goes on with the lowest free segment; none if no segment is free.
  std::optional<Beginning> Roll();
  // Takes room for a record. REQUIRES: cost <= room().
  void Take(uint64_t cost, int64_t keep_for);

  // As GradientLog's functions of these names.
  void Release(int64_t step);
  void Keep(uint64_t incarnation, int64_t step);
  void Cut(int64_t step);
  // The current segment has no room for the batch that tells of a cut: only Roll makes room.
  bool cut_lacks_room() const { return cut_lacks_room_; }
  // A batch must tell of a cut.
  bool cut_wants_batch() const { return cut_wants_batch_; }
  // That batch is being written.
  void BeginCutBatch() { cut_wants_batch_ = false; }
  // Batches became durable. `told`: the highest oldest incarnation that their heads name; cut segments below are free
  // now. `held`: the newest segment whose first record is among them, 0 if there is none.
  void Synced(uint64_t told, uint64_t held);

 private:
  // Size of the empty batch that tells of a cut. Every segment has room for one such batch, and HasRoom leaves room for
  // a second, since the pumping thread may want to write one at any time.
  static constexpr uint64_t kCutBatchBytes = 2 * kLogBlock;

  struct Segment {
    uint64_t incarnation = 0;  // 0: free
    int64_t keep_for = -1;     // highest keep_for of its records
  };
  void Free(uint64_t segment);
  // Cuts what may be cut. True if a segment was cut.
  bool CutOldest();
  void WantCutBatch();

  const uint64_t segment_bytes_;
  std::vector<Segment> segments_;
  // Indices into segments_. Each segment is in exactly one of the three.
  std::set<uint64_t> free_;
  std::deque<uint64_t> live_;  // by incarnation; the last one takes records once Roll was called
  std::deque<uint64_t> cut_;   // by incarnation; free once a durable batch tells of the cut
  bool rolled_ = false;        // Roll was called: live_.back() is the current segment
  uint64_t room_ = 0;          // of the current segment, counted as if each record were a batch
  uint64_t last_incarnation_ = 0;
  uint64_t held_incarnation_ = 0;  // newest segment with a durable first record: older ones hold needed payloads only
  int64_t cut_step_ = -1;
  bool cut_waits_ = false;        // a cut waits for the newest segment's first record
  bool cut_wants_batch_ = false;  // the batch that tells of the cut is still to be written
  bool cut_lacks_room_ = false;   // that batch has to wait for the next segment
  bool has_cut_room_ = false;     // the current segment's room for that batch is not taken
};

}  // namespace ballast::storage
