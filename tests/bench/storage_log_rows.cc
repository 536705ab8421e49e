// The row of the gradient log: see storage_bench.cc.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/tests/bench/disk_alone.h"
#include "ballast/tests/bench/server_job.h"
#include "ballast/tests/bench/storage_rows.h"

namespace ballast::bench {
namespace {

// As many as a log holds, so that a round flushes every chunk about once.
constexpr int kStepsPerRound = 8;
// Until flushes have settled to what the log's size asks for.
constexpr int kWarmUpSteps = 24;

// Bytes written to disks by this process.
absl::StatusOr<uint64_t> BytesWritten() {
  std::ifstream io("/proc/self/io");
  std::string word;
  while (io >> word) {
    uint64_t bytes = 0;
    if (word == "write_bytes:" && io >> bytes) return bytes;
  }
  return absl::UnavailableError("/proc/self/io does not say what was written");
}

// CPU time of all threads of this process, user and system.
double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// A round of kStepsPerRound steps, timed from the decision of the step before the first to the decision of the last. So
// it contains as many updates, each overlapped by the pushes of the next step.
struct Round {
  double seconds = 0;        // per step
  double cpu_seconds = 0;    // per step
  double flushed_bytes = 0;  // per step: chunks, so that the log can be cut
  double written_bytes = 0;  // per step: flushed and log
};

absl::StatusOr<Round> RunRound(ServerJob* job) {
  BALLAST_RETURN_IF_ERROR(job->Step());
  BALLAST_ASSIGN_OR_RETURN(const uint64_t written, BytesWritten());
  const uint64_t flushed = job->server().traffic().written.nvme;
  const double cpu = CpuSeconds();
  BALLAST_ASSIGN_OR_RETURN(const double seconds, Seconds([&] {
                             for (int i = 0; i < kStepsPerRound; ++i) BALLAST_RETURN_IF_ERROR(job->Step());
                             return absl::OkStatus();
                           }));
  Round round = {.seconds = seconds / kStepsPerRound, .cpu_seconds = (CpuSeconds() - cpu) / kStepsPerRound};
  BALLAST_ASSIGN_OR_RETURN(const uint64_t written_now, BytesWritten());
  round.written_bytes = static_cast<double>(written_now - written) / kStepsPerRound;
  round.flushed_bytes = static_cast<double>(job->server().traffic().written.nvme - flushed) / kStepsPerRound;
  BALLAST_RETURN_IF_ERROR(job->Settle());
  return round;
}

// A round of steps of a job without a log, beside a thread that writes and syncs `log_bytes` once per step and shares
// nothing with the job. This is the machine's limit for a log that costs only its disk. Returns seconds per step until
// both have ended.
absl::StatusOr<double> SideBySide(ServerJob* without, DiskAlone* alone, const storage::BlockFile& file,
                                  uint64_t log_bytes) {
  BALLAST_RETURN_IF_ERROR(without->Step());
  BALLAST_ASSIGN_OR_RETURN(const double seconds, Seconds([&] {
                             absl::Status stepped, written;
                             std::thread trainer([&] {
                               for (int i = 0; i < kStepsPerRound; ++i) stepped.Update(without->Step());
                             });
                             for (int i = 0; i < kStepsPerRound; ++i) {
                               written.Update(alone->WriteAndSync(file, log_bytes));
                             }
                             trainer.join();
                             stepped.Update(written);
                             return stepped;
                           }));
  BALLAST_RETURN_IF_ERROR(without->Settle());
  return seconds / kStepsPerRound;
}

uint64_t WholeBlocks(double bytes) { return storage::AlignUp(static_cast<uint64_t>(bytes)); }

}  // namespace

absl::Status MeasureLog(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(const auto gradients, ChunkGradients::Make());
  const uint64_t chunks = options.server_chunks;
  const auto make = [&](v1::Durability durability, const char* name) {
    return ServerJob::Make({.directory = absl::StrCat(directory, "/", name),
                            .durability = durability,
                            .chunks = chunks,
                            .threads = options.threads,
                            .gradients = gradients});
  };
  std::fprintf(stderr, "storage_bench: a log for %lu chunks of 2^20 parameters\n", chunks);
  BALLAST_ASSIGN_OR_RETURN(const auto without, make(v1::DURABILITY_NONE, "without"));
  BALLAST_ASSIGN_OR_RETURN(const auto with, make(v1::DURABILITY_STEP, "with"));
  for (int i = 0; i < kWarmUpSteps; ++i) BALLAST_RETURN_IF_ERROR(with->Step());
  BALLAST_RETURN_IF_ERROR(with->Settle());
  BALLAST_ASSIGN_OR_RETURN(DiskAlone alone, DiskAlone::Make());
  BALLAST_ASSIGN_OR_RETURN(const auto file,
                           storage::SystemDisk()->Open(directory + "/alone", storage::Disk::Mode::kEmptied));

  std::vector<double> step, none, log_alone, disk_alone, ratios, with_flushes, side_by_side, log_bytes, flushed_bytes;
  std::vector<double> step_cpu, none_cpu;
  for (int i = 0; i <= options.rounds; ++i) {
    std::fprintf(stderr, "\rstorage_bench: log, round %d of %d", i, options.rounds);
    BALLAST_ASSIGN_OR_RETURN(const Round reference, RunRound(without.get()));
    BALLAST_ASSIGN_OR_RETURN(const Round round, RunRound(with.get()));
    const double logged = round.written_bytes - round.flushed_bytes;
    if (i == 0) BALLAST_RETURN_IF_ERROR(alone.WriteAndSync(*file, WholeBlocks(2 * round.written_bytes)));
    const auto write = [&](double bytes) {
      return Seconds([&] { return alone.WriteAndSync(*file, WholeBlocks(bytes)); });
    };
    BALLAST_ASSIGN_OR_RETURN(const double log_seconds, write(logged));
    BALLAST_ASSIGN_OR_RETURN(const double disk_seconds, write(round.written_bytes));
    BALLAST_ASSIGN_OR_RETURN(const double side_seconds, SideBySide(without.get(), &alone, *file, WholeBlocks(logged)));
    if (i == 0) continue;
    side_by_side.push_back(std::max(log_seconds, reference.seconds) / side_seconds);
    step_cpu.push_back(round.cpu_seconds);
    none_cpu.push_back(reference.cpu_seconds);
    step.push_back(round.seconds);
    none.push_back(reference.seconds);
    log_alone.push_back(log_seconds);
    disk_alone.push_back(disk_seconds);
    log_bytes.push_back(logged);
    flushed_bytes.push_back(round.flushed_bytes);
    ratios.push_back(std::max(log_seconds, reference.seconds) / round.seconds);
    with_flushes.push_back(std::max(disk_seconds, reference.seconds) / round.seconds);
  }
  std::fprintf(stderr, "\n");
  const double parameters = static_cast<double>(chunks * ServerJob::kChunkElements);
  rows->push_back({.name = "step/log",
                   .bytes_per_element = Median(log_bytes) / parameters,
                   .gb_per_s = Median(log_bytes) / Median(step) / 1e9,
                   .reference = "max(log alone, step without log)",
                   .ratio = Median(ratios),
                   .bar = 1 / 1.05,
                   .more = {{"seconds", Median(step)},
                            {"without_log_seconds", Median(none)},
                            {"log_alone_seconds", Median(log_alone)},
                            {"log_and_flushes_alone_seconds", Median(disk_alone)},
                            {"log_bytes_per_step", Median(log_bytes)},
                            {"flushed_bytes_per_step", Median(flushed_bytes)},
                            {"cpu_seconds", Median(step_cpu)},
                            {"without_log_cpu_seconds", Median(none_cpu)},
                            {"with_flushes", Median(with_flushes)},
                            {"side_by_side", Median(side_by_side)}}});
  return absl::OkStatus();
}

}  // namespace ballast::bench
