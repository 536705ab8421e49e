// The row of jobs that sync one file: see storage_bench.cc.
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kJobs = 8, kWrites = 16, kWriteBytes = uint64_t{1} << 20;

// Each job writes and syncs, in turn, on a thread of its own.
absl::Status WriteAndSync(const storage::BlockFile& file, absl::Span<const std::byte> bytes, const Work& sync) {
  std::vector<absl::Status> statuses(kJobs);
  std::vector<std::thread> jobs;
  for (uint64_t job = 0; job < kJobs; ++job) {
    jobs.emplace_back([&, job] {
      for (uint64_t i = 0; i < kWrites && statuses[job].ok(); ++i) {
        statuses[job] = file.Write((job * kWrites + i) * kWriteBytes, bytes);
        if (statuses[job].ok()) statuses[job] = sync();
      }
    });
  }
  for (std::thread& job : jobs) job.join();
  for (const absl::Status& status : statuses) BALLAST_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

}  // namespace

absl::Status MeasureSyncs(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(const auto file,
                           storage::SystemDisk()->Open(directory + "/synced", storage::Disk::Mode::kEmptied));
  BALLAST_ASSIGN_OR_RETURN(const storage::Arena memory, storage::Arena::Map(kWriteBytes));
  storage::SharedSync shared(file.get());
  std::mutex mutex;
  const Work share = [&] { return shared.Sync(); };
  const Work in_turn = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return file->Sync();
  };
  BALLAST_ASSIGN_OR_RETURN(const auto times, Measure("syncs of eight jobs",
                                                     {[&] { return WriteAndSync(*file, memory.bytes(), share); },
                                                      [&] { return WriteAndSync(*file, memory.bytes(), in_turn); }},
                                                     options.rounds));
  std::vector<double> ratios;
  for (size_t i = 0; i < times[0].size(); ++i) ratios.push_back(times[1][i] / times[0][i]);
  const double seconds = Median(times[0]);
  rows->push_back({.name = "sync/eight_jobs",
                   .gb_per_s = static_cast<double>(kJobs * kWrites * kWriteBytes) / seconds / 1e9,
                   .reference = "a sync for each",
                   .ratio = Median(ratios),
                   .bar = 1,
                   .more = {{"seconds", seconds}}});
  return absl::OkStatus();
}

}  // namespace ballast::bench
