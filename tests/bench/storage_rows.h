// What the files of storage_bench share: its options, a row of its answer, and how works are timed.
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
  uint64_t server_chunks = 192;  // of the job on a state server, 2^20 parameters each
  StreamShape stream;
};

struct Row {
  std::string name;
  double bytes_per_element = 0, gb_per_s = 0;
  std::string reference;
  double ratio = 0, bar = 0;
  std::vector<std::pair<std::string, double>> more;
};

// Groups of rows. `directory`: empty, on the disk to measure. What is added to `rows` after an error does not count.
using MeasureRows = absl::Status(const StorageBenchOptions& options, const std::string& directory,
                                 std::vector<Row>* rows);
MeasureRows MeasureStreams, MeasureSteps, MeasurePlans, MeasureLog, MeasureRecovery;
// What MeasureRecovery kills: prints "ready" and its process once there is something to recover in `directory`.
absl::Status TrainUntilKilled(const StorageBenchOptions& options, const std::string& directory);

using Work = std::function<absl::Status()>;

absl::StatusOr<double> Seconds(const Work& work);
// Seconds of each work, one entry per round, in an order that rotates; the first round of all is not kept. `what`: for
// the lines of progress on stderr.
absl::StatusOr<std::vector<std::vector<double>>> Measure(const char* what, const std::vector<Work>& works, int rounds);

void Print(const Row& row);
void WriteJson(const std::string& path, const std::vector<Row>& rows);

}  // namespace ballast::bench
