// The row of starting again with state on NVMe: see storage_bench.cc.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/bench/disk_alone.h"
#include "ballast/tests/bench/server_job.h"
#include "ballast/tests/bench/storage_rows.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kStateBytesPerChunk = 12 * ServerJob::kChunkElements;
// With the values: as many runs as share a sync and a record, so that nothing is left to replay.
constexpr int kSteps = 3;

ServerJob::Options JobOf(const StorageBenchOptions& options, const std::string& data, uint64_t chunks) {
  // Working copies, staging, and buffers for slices: no room is left for a state.
  const uint64_t copies = chunks * 2 * ServerJob::kChunkElements, buffers = uint64_t{96} << 20;
  const uint64_t dram = copies + storage::DefaultStagingBytes(~uint64_t{0}) + buffers;
  return {.directory = data,
          .durability = v1::DURABILITY_STEP,
          .chunks = chunks,
          .threads = options.threads,
          .gradients = nullptr,
          .dram_bytes = dram};
}

absl::Status Train(ServerJob::Options options) {
  BALLAST_ASSIGN_OR_RETURN(options.gradients, ChunkGradients::Make());
  BALLAST_ASSIGN_OR_RETURN(const auto job, ServerJob::Make(options));
  for (int i = 0; i < kSteps; ++i) {
    BALLAST_RETURN_IF_ERROR(job->Step());
    BALLAST_RETURN_IF_ERROR(job->Settle());
  }
  return absl::OkStatus();
}

// The state that a restart takes back, in the order of the file.
absl::StatusOr<std::vector<FileExtent>> StateOf(const std::string& data, const storage::BlockFile* file) {
  BALLAST_ASSIGN_OR_RETURN(const auto catalog, storage::Catalog::Open(data));
  BALLAST_ASSIGN_OR_RETURN(const services::JobEntry entry, services::ReadJobEntry(*catalog, ServerJob::kName));
  std::vector<FileExtent> extents;
  for (const storage::DurableChunk& chunk : entry.chunks) extents.push_back({file, chunk.offset, chunk.bytes});
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  return extents;
}

// The first chunk's parameters, as a trainer pulls them.
absl::Status PullFirst(services::StateServer* server) {
  v1::PullRequest request;
  request.set_job(ServerJob::kName);
  request.set_version(kSteps);
  request.set_content(v1::CONTENT_WORKING);
  request.set_end(ServerJob::kChunkElements);
  std::vector<std::byte> memory(ServerJob::kChunkElements * sizeof(uint16_t));
  absl::Notification answered;
  absl::Status status;
  server->Pull(
      request, absl::Now() + absl::Minutes(1),
      [&](uint64_t bytes, auto) { return absl::MakeSpan(memory).first(std::min<uint64_t>(bytes, memory.size())); },
      [&](const absl::StatusOr<uint32_t>& crc) {
        status = crc.status();
        answered.Notify();
      });
  answered.WaitForNotification();
  return status;
}

}  // namespace

absl::Status MeasureStart(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  const std::string data = options.start_data.empty() ? directory + "/start" : options.start_data;
  const uint64_t chunks = options.start_bytes / kStateBytesPerChunk;
  const ServerJob::Options job = JobOf(options, data, chunks);
  if (!std::filesystem::exists(data + "/nvme.tier")) {
    std::fprintf(stderr, "storage_bench: a server with %lu chunks on NVMe takes %d steps and ends\n", chunks, kSteps);
    BALLAST_RETURN_IF_ERROR(Train(job));
  }
  BALLAST_ASSIGN_OR_RETURN(DiskAlone alone, DiskAlone::Make());
  BALLAST_ASSIGN_OR_RETURN(const auto file,
                           storage::SystemDisk()->Open(data + "/nvme.tier", storage::Disk::Mode::kShared));
  std::vector<double> ready, pulled, reading, ratios;
  double state_bytes = 0, read_bytes = 0;
  for (int round = 0; round <= options.rounds; ++round) {
    std::fprintf(stderr, "\rstorage_bench: start, round %d of %d", round, options.rounds);
    BALLAST_ASSIGN_OR_RETURN(const auto extents, StateOf(data, file.get()));
    state_bytes = 0;
    for (const FileExtent& extent : extents) state_bytes += static_cast<double>(extent.bytes);
    BALLAST_ASSIGN_OR_RETURN(const double read_seconds, Seconds([&] { return alone.Read(extents); }));
    // Memory that the host has to give first would be measured otherwise, see the row of recovery.
    BALLAST_RETURN_IF_ERROR(storage::Arena::Map(job.dram_bytes).status());
    std::unique_ptr<services::StateServer> server;
    BALLAST_ASSIGN_OR_RETURN(const double ready_seconds, Seconds([&] {
                               BALLAST_ASSIGN_OR_RETURN(server,
                                                        services::StateServer::Start(ServerJob::ServerOptions(job)));
                               return absl::OkStatus();
                             }));
    BALLAST_ASSIGN_OR_RETURN(const double pull_seconds, Seconds([&] { return PullFirst(server.get()); }));
    read_bytes = static_cast<double>(server->traffic().read.nvme);
    if (round == 0) continue;
    ready.push_back(ready_seconds);
    pulled.push_back(ready_seconds + pull_seconds);
    reading.push_back(read_seconds);
    ratios.push_back(read_seconds / ready_seconds);
  }
  std::fprintf(stderr, "\n");
  rows->push_back({.name = "start",
                   .bytes_per_element = read_bytes / static_cast<double>(chunks * ServerJob::kChunkElements),
                   .gb_per_s = state_bytes / Median(ready) / 1e9,
                   .reference = "one sequential read of the whole state",
                   .ratio = Median(ratios),
                   .bar = 1,
                   .more = {{"seconds_to_ready", Median(ready)},
                            {"seconds_to_first_pull", Median(pulled)},
                            {"read_seconds", Median(reading)},
                            {"state_bytes", state_bytes},
                            {"read_bytes", read_bytes}}});
  return absl::OkStatus();
}

}  // namespace ballast::bench
