// The row of recovery: see storage_bench.cc.
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/promise_log.h"
#include "ballast/services/journal/journal.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/logged_records.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/bench/disk_alone.h"
#include "ballast/tests/bench/server_job.h"
#include "ballast/tests/bench/storage_rows.h"

namespace ballast::bench {
namespace {

// Until flushes have settled to what the log's size asks for.
constexpr int kStepsBeforeKill = 24;

// That a server touches: fp32 master and two moments, a working copy, and a slice of the step that is not decided.
constexpr uint64_t kBytesPerParameter = 16;

// A hypervisor gives a virtual machine its memory when that is touched first, at a tenth of a disk's speed, and takes
// back what was freed after some seconds: then it would be the host's memory that is measured.
absl::Status HaveMemory(uint64_t bytes) { return storage::Arena::Map(bytes).status(); }

// The data that a restart on a directory must read: the newest durable version of each chunk, and all slices in the log
// newer than their chunk's version.
struct MustRead {
  std::vector<std::unique_ptr<storage::BlockFile>> files;
  std::vector<FileExtent> extents;  // by file and offset
  uint64_t chunk_bytes = 0, slice_bytes = 0;
  int64_t committed = -1;
  int64_t steps = 0;  // that are replayed
};

absl::StatusOr<MustRead> FindMustRead(const std::string& directory, uint64_t chunks) {
  MustRead must;
  for (const std::string name : {"/nvme.tier", "/log-bench"}) {
    BALLAST_ASSIGN_OR_RETURN(must.files.emplace_back(),
                             storage::SystemDisk()->Open(directory + name, storage::Disk::Mode::kShared));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto catalog, storage::Catalog::Open(directory));
  BALLAST_ASSIGN_OR_RETURN(const services::JobEntry entry, services::ReadJobEntry(*catalog, ServerJob::kName));
  if (entry.chunks.empty()) return absl::InternalError("no chunk has a durable version yet");
  std::vector<int64_t> versions(chunks, -1);  // without an extent, a chunk is made from its first values on
  for (const storage::DurableChunk& chunk : entry.chunks) {
    versions[chunk.id] = chunk.version;
    must.extents.push_back({must.files[0].get(), chunk.offset, chunk.bytes});
    must.chunk_bytes += chunk.bytes;
  }
  BALLAST_ASSIGN_OR_RETURN(const storage::ScannedLog log, storage::ScanLog(*must.files[1]));
  storage::LoggedRecords records(must.files[1].get(), &log);
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(const storage::ReadRecord* const read, records.Next());
    if (read == nullptr) break;
    BALLAST_ASSIGN_OR_RETURN(const services::StepRecord record, services::DecodeRecord(*read));
    if (const auto* decision = std::get_if<services::DecisionRecord>(&record)) {
      must.committed = std::max(must.committed, decision->decision.step());
    }
    const auto* slice = std::get_if<services::SliceRecord>(&record);
    if (slice == nullptr || slice->header.step() <= versions[slice->header.begin() / ServerJob::kChunkElements]) {
      continue;
    }
    const uint64_t bytes = storage::AlignUp(read->payload.bytes);
    must.extents.push_back({must.files[1].get(), read->payload.offset, bytes});
    must.slice_bytes += bytes;
  }
  must.steps = must.committed - *std::min_element(versions.begin(), versions.end());
  std::sort(must.extents.begin(), must.extents.end(), [&](const FileExtent& a, const FileExtent& b) {
    return std::tuple(a.file == must.files[1].get(), a.offset) < std::tuple(b.file == must.files[1].get(), b.offset);
  });
  return must;
}

// A server and its trainer in another process, killed in the middle of a step's pushes.
absl::Status TrainAndKill(const StorageBenchOptions& options, const std::string& directory) {
  const std::string command = absl::StrCat("exec ", "/proc/", getpid(), "/exe --train-until-killed '", directory,
                                           "' --server-chunks ", options.server_chunks, " --threads ", options.threads);
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return absl::UnavailableError(absl::StrCat("cannot run: ", command));
  int child = 0;
  const bool ready = fscanf(pipe, "ready %d", &child) == 1;
  if (ready) kill(child, SIGKILL);
  pclose(pipe);
  return ready ? absl::OkStatus() : absl::UnavailableError("the process to be killed has ended by itself");
}

}  // namespace

absl::Status TrainUntilKilled(const StorageBenchOptions& options, const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const auto gradients, ChunkGradients::Make());
  BALLAST_ASSIGN_OR_RETURN(const auto job, ServerJob::Make({.directory = directory,
                                                            .durability = v1::DURABILITY_STEP,
                                                            .chunks = options.server_chunks,
                                                            .threads = options.threads,
                                                            .gradients = gradients}));
  for (int i = 0; i < kStepsBeforeKill; ++i) BALLAST_RETURN_IF_ERROR(job->Step());
  BALLAST_RETURN_IF_ERROR(job->Push(options.server_chunks / 2));
  std::printf("ready %d\n", getpid());
  std::fflush(stdout);
  for (;;) pause();
}

absl::Status MeasureRecovery(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  const std::string data = directory + "/recovery";
  std::fprintf(stderr, "storage_bench: a server with %lu chunks of 2^20 parameters takes %d steps and is killed\n",
               options.server_chunks, kStepsBeforeKill);
  BALLAST_RETURN_IF_ERROR(TrainAndKill(options, data));
  const services::StateServerOptions server_options =
      ServerJob::ServerOptions({.directory = data, .chunks = options.server_chunks, .threads = options.threads});
  BALLAST_ASSIGN_OR_RETURN(DiskAlone alone, DiskAlone::Make());
  std::vector<double> recovery, reading, ratios;
  MustRead must;
  for (int round = 0; round <= options.rounds; ++round) {
    std::fprintf(stderr, "\rstorage_bench: recovery, round %d of %d", round, options.rounds);
    must = MustRead();
    BALLAST_ASSIGN_OR_RETURN(must, FindMustRead(data, options.server_chunks));
    std::unique_ptr<services::StateServer> server;
    const auto recover = [&] {
      BALLAST_ASSIGN_OR_RETURN(server, services::StateServer::Start(server_options));
      return absl::OkStatus();
    };
    const auto read = [&] { return alone.Read(must.extents); };
    BALLAST_ASSIGN_OR_RETURN(const double read_seconds, Seconds(read));
    BALLAST_RETURN_IF_ERROR(HaveMemory(options.server_chunks * ServerJob::kChunkElements * kBytesPerParameter));
    BALLAST_ASSIGN_OR_RETURN(const double seconds, Seconds(recover));
    const v1::GetServerStatusResponse status = server->Status();
    if (status.jobs_size() != 1 || status.jobs(0).oldest_chunk_version() != must.committed) {
      return absl::InternalError(absl::StrCat("not recovered to step ", must.committed, ": ", status.DebugString()));
    }
    server.reset();
    if (round == 0) continue;
    recovery.push_back(seconds);
    reading.push_back(read_seconds);
    ratios.push_back(read_seconds / seconds);
  }
  std::fprintf(stderr, "\n");
  const double bytes = static_cast<double>(must.chunk_bytes + must.slice_bytes);
  rows->push_back({.name = "recovery",
                   .bytes_per_element = bytes / static_cast<double>(options.server_chunks * ServerJob::kChunkElements),
                   .gb_per_s = bytes / Median(recovery) / 1e9,
                   .reference = "one sequential read of what it must read",
                   .ratio = Median(ratios),
                   .bar = 0.5,
                   .more = {{"seconds", Median(recovery)},
                            {"read_seconds", Median(reading)},
                            {"chunk_bytes", static_cast<double>(must.chunk_bytes)},
                            {"slice_bytes", static_cast<double>(must.slice_bytes)},
                            {"steps_replayed", static_cast<double>(must.steps)}}});
  return absl::OkStatus();
}

}  // namespace ballast::bench
