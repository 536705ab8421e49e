// Shared by the sources of storage_bench: its options, the rows of its result, and how work is timed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {

struct StorageBenchOptions {
  std::string json, directory = ".", filter;
  int rounds = 9;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  uint64_t bytes = uint64_t{2} << 30;
  uint64_t staging_bytes = storage::DefaultStagingBytes(~uint64_t{0});
  uint64_t dram_bytes = uint64_t{4} << 30;
  uint64_t start_bytes = uint64_t{4} << 30;  // of the state of the job that starts again
  std::string start_data;                    // its directory, which stays; empty: one that goes away
  uint64_t server_chunks = 192;              // of the job on a state server; 2^20 parameters each
  StreamShape stream;
};

struct Row {
  std::string name;
  double bytes_per_element = 0, gb_per_s = 0;
  std::string reference;
  double ratio = 0, bar = 0;
  std::vector<std::pair<std::string, double>> more;
};

// Each measures a group of rows. `directory` is empty and lies on the disk to measure. After an error, ignore `rows`.
using MeasureRows = absl::Status(const StorageBenchOptions& options, const std::string& directory,
                                 std::vector<Row>* rows);
MeasureRows MeasureStreams, MeasureSyncs, MeasureUpdates, MeasureThreads, MeasureSteps, MeasureRemainders,
    MeasureDevices, MeasurePlans, MeasureParams, MeasureLog, MeasureRecovery, MeasureStart, MeasureCounts;
// Body of the process killed by MeasureRecovery. Prints "ready" and its process id once `directory` holds a job to
// recover.
absl::Status TrainUntilKilled(const StorageBenchOptions& options, const std::string& directory);

using Work = std::function<absl::Status()>;

absl::StatusOr<double> Seconds(const Work& work);
// Seconds of each work, one entry per round. The order of the works rotates from round to round, and the first round of
// all is not kept. `what` names the measurement in the progress lines on stderr.
absl::StatusOr<std::vector<std::vector<double>>> Measure(const char* what, const std::vector<Work>& works, int rounds);

void Print(const Row& row);
void WriteJson(const std::string& path, const std::vector<Row>& rows);

}  // namespace ballast::bench
