// A caller of the gradient log that keeps its protocol, and remembers all that it wrote.
//
// Every segment begins with a snapshot record. Records are numbered without gaps; what a crash took is forgotten, and
// its numbers are used again for other content, which is the harder case.
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

// Bytes that only this seed has.
std::vector<std::byte> Content(uint64_t seed, uint64_t bytes);

class LogCaller {
 public:
  explicit LogCaller(uint64_t seed) : seed_(seed) {}

  // From now on it writes to this log. After a recovery: Check first.
  void Use(std::unique_ptr<GradientLog> log) { log_ = std::move(log); }
  GradientLog& log() { return *log_; }
  void Drop() { log_.reset(); }

  // A new segment and its snapshot. False if none is free.
  bool Roll();
  // Rolls if there is no room. False if that failed: then nothing was appended.
  bool Append(const RecordShape& shape);
  // Into the segment in use. REQUIRES: HasRoom.
  void AppendHere(uint32_t type, const RecordShape& shape);
  void Cut(int64_t step);
  // False if there is no end of it, as with a sync that is tried again for ever.
  bool PumpAll() {
    for (int rounds = 0; rounds < 100000; ++rounds) {
      if (!log_->Pump(/*wait=*/true)) return true;
    }
    return false;
  }
  // Makes all of it durable; what the log's status says then.
  absl::Status SyncAll();

  uint64_t last_lsn() const { return next_lsn_ - 1; }
  int64_t cut_step() const { return cut_step_; }
  uint64_t payloads_borrowed() const { return *borrowed_; }

  // Is this what must be there if `durable_lsn` was the last known to be durable? Says what is wrong; reads every
  // payload. DATA_LOSS is what ReadPayload said.
  absl::Status Check(const ScannedLog& scanned, const BlockFile& file, uint64_t durable_lsn) const;
  // Goes on behind `scanned`; tells `log` what its segments are kept for.
  void Resume(const ScannedLog& scanned, std::unique_ptr<GradientLog> log);

 private:
  absl::Status CheckRecord(const ReadRecord& record, const BlockFile& file) const;

  uint64_t seed_;
  std::unique_ptr<GradientLog> log_;
  std::map<uint64_t, WrittenRecord> written_;  // by lsn
  uint64_t next_lsn_ = 1;
  int64_t cut_step_ = -1;
  // Shared with the callbacks, which outlive a log that is dropped.
  std::shared_ptr<std::atomic<uint64_t>> borrowed_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace ballast::storage
