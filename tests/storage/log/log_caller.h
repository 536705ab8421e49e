// A caller of the gradient log. Keeps the log's protocol and remembers every record written.
//
// Every segment begins with a snapshot record. Records are numbered without gaps. The caller forgets records lost in a
// crash and uses their numbers again for different content, because this is the harder case.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::storage {

inline constexpr uint32_t kSnapshotRecord = 1;
inline constexpr uint32_t kOtherRecord = 2;

struct WrittenRecord {
  uint32_t type = 0;
  std::string body;
  uint64_t payload_bytes = 0;
  uint64_t seed = 0;  // of the payload
  int64_t keep_for = -1;
  bool operator==(const WrittenRecord&) const = default;
};

struct RecordShape {
  uint64_t body_bytes = 0;
  uint64_t payload_bytes = 0;
  int64_t keep_for = -1;
  bool aligned = true;  // the payload's address
};

// Bytes unique to this seed.
std::vector<std::byte> Content(uint64_t seed, uint64_t bytes);

class LogCaller {
 public:
  explicit LogCaller(uint64_t seed) : seed_(seed) {}

  // From now on the caller writes to `log`. After a recovery, call Check first.
  void Use(std::unique_ptr<GradientLog> log) { log_ = std::move(log); }
  GradientLog& log() { return *log_; }
  void Drop() { log_.reset(); }

  // Starts a new segment and appends its snapshot. False if no segment is free.
  bool Roll();
  // Appends a record; rolls first if the segment has no room. False if no segment is free or the new segment is too
  // small: the record is not appended.
  bool Append(const RecordShape& shape);
  // Appends to the segment in use. REQUIRES: HasRoom.
  void AppendHere(uint32_t type, const RecordShape& shape);
  void Cut(int64_t step);
  // False if pumping never ends, as with a sync retried for ever.
  bool PumpAll() {
    for (int rounds = 0; rounds < 100000; ++rounds) {
      if (!log_->Pump(/*wait=*/true)) return true;
    }
    return false;
  }
  // Makes all records durable and returns the log's status.
  absl::Status SyncAll();

  uint64_t last_lsn() const { return next_lsn_ - 1; }
  int64_t cut_step() const { return cut_step_; }
  uint64_t payloads_borrowed() const { return *borrowed_; }

  // Checks a scan, where `durable_lsn` is the last record known to be durable. Reads every payload. INTERNAL names the
  // first wrong record; DATA_LOSS comes from ReadPayload.
  absl::Status Check(const ScannedLog& scanned, const BlockFile& file, uint64_t durable_lsn) const;
  // Continues after the last record of `scanned`, and tells `log` for which step to keep each segment.
  void Resume(const ScannedLog& scanned, std::unique_ptr<GradientLog> log);

 private:
  absl::Status CheckRecord(const ReadRecord& record, const BlockFile& file) const;

  uint64_t seed_;
  std::unique_ptr<GradientLog> log_;
  std::map<uint64_t, WrittenRecord> written_;  // by lsn
  uint64_t next_lsn_ = 1;
  int64_t cut_step_ = -1;
  // Shared with the callbacks, because callbacks outlive a dropped log.
  std::shared_ptr<std::atomic<uint64_t>> borrowed_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace ballast::storage
