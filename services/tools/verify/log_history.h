// The history in a job's log, and what a replay would need: it follows services/job, without tiers and kernels.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/services/journal/log_walk.h"
#include "ballast/services/tools/verify/finding.h"
#include "ballast/services/tools/verify/progress.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/logged_records.h"
#include "ballast/storage/store/extent_label.h"

namespace ballast::services {

// A log, read; all of its records can be decoded.
struct ReadLog {
  std::string job;
  std::shared_ptr<const storage::BlockFile> file;  // replays read the records again
  storage::ScannedLog scanned;
  LoggedSteps steps;
  std::set<std::tuple<uint32_t, uint64_t, uint64_t>> pushed;  // slices: unit, begin, end
  // The newest in the log.
  std::optional<v1::OpenRequest> open;
  std::optional<v1::Epoch> promised;
};
// Errors: as ScanLog and DecodeRecord; DATA_LOSS (IO) if the log is of a different job.
absl::StatusOr<ReadLog> ReadJobLog(std::shared_ptr<const storage::BlockFile> file, const std::string& job);

// The only member of `open` to whom all of these chunks belong. NOT_FOUND if no member fits, or several do.
absl::StatusOr<std::string> FindOwner(const v1::OpenRequest& open, const std::set<uint64_t>& chunks);
// The chunks of which the log has slices.
std::set<uint64_t> ChunksInLog(const ReadLog& log);

struct LogReplay {
  int64_t first = -1;      // version from which the log begins
  int64_t committed = -1;  // version with which the log ends
  bool prepared = false;   // is step committed + 1 prepared?
  struct Payload {
    storage::PayloadPlace place;
    int64_t step = 0;
    uint64_t chunk = 0;
    bool needed = false;
  };
  std::vector<Payload> payloads;
};
// The disk's versions of a job's chunks, by id.
struct DurableStates {
  std::map<uint64_t, int64_t> versions;
  std::set<int64_t> pinned;  // the catalog has a pin as a whole, or not at all
};
// Replays onto these states. Findings: missing records, records that do not fit together, a gap between a chunk's state
// and the log, steps without their slices, restores without their pin.
LogReplay Replay(const ReadLog& log, const std::string& server_id, const DurableStates& durable,
                 const std::string& path, std::vector<Finding>* findings);
// Replays only the log, without the chunks' states. Findings: records that contradict each other.
LogReplay ReplayAlone(const ReadLog& log, const std::string& server_id, std::vector<Finding>* findings);

// Reads every payload that a replay needs.
void CheckPayloads(const storage::BlockFile& file, const std::string& job, const LogReplay& replay, Progress* progress,
                   ScrubReport* report);

}  // namespace ballast::services
