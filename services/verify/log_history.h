// What a job's log tells, and what replaying it would need: the steps of services/recovery.cc without tiers and
// kernels.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/verify/finding.h"
#include "ballast/services/verify/progress.h"
#include "ballast/storage/extent_label.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::services {

// A log, read and decoded.
struct ReadLog {
  std::string job;
  storage::ScannedLog scanned;
  std::vector<StepRecord> records;  // of scanned.records, same order

  // The newest that it tells.
  std::optional<v1::OpenRequest> open;
  std::optional<v1::Epoch> promised;
};
// Errors: ScanLog's and DecodeRecord's; DATA_LOSS (IO) if it is another job's log.
absl::StatusOr<ReadLog> ReadJobLog(const storage::BlockFile& file, const std::string& job);

// The one member of `open` whom all of these chunks belong to. NOT_FOUND if no member fits, or more than one.
absl::StatusOr<std::string> FindOwner(const v1::OpenRequest& open, const std::set<uint64_t>& chunks);
// The chunks that slices in the log are of.
std::set<uint64_t> ChunksInLog(const ReadLog& log);

struct LogReplay {
  int64_t first = -1;      // version that the log begins from
  int64_t committed = -1;  // that it ends with
  bool prepared = false;   // and step committed + 1 is prepared
  struct Payload {
    storage::PayloadPlace place;
    int64_t step = 0;
    uint64_t chunk = 0;
    bool needed = false;
  };
  std::vector<Payload> payloads;
};
// What the disk holds of a job's chunks, by their ids.
struct DurableStates {
  std::map<uint64_t, int64_t> versions;
  std::set<int64_t> pinned;  // the catalog has a pin whole or not at all
};
// Replays onto these states. Findings: records that are missing or do not fit together, chunks whose state and the log
// have a gap between them, steps whose slices are not there, restores whose pinned version is not.
LogReplay Replay(const ReadLog& log, const std::string& server_id, const DurableStates& durable,
                 const std::string& path, std::vector<Finding>* findings);
// The log alone, whatever the chunks' states may be: findings are of records that do not fit together.
LogReplay ReplayAlone(const ReadLog& log, const std::string& server_id, std::vector<Finding>* findings);

// Reads every payload that is needed.
void CheckPayloads(const storage::BlockFile& file, const std::string& job, const LogReplay& replay, Progress* progress,
                   ScrubReport* report);

}  // namespace ballast::services
