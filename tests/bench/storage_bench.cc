// The storage layer against the disk itself, as ratios within one run: a ratio of 1 is what the disk, or else the
// kernel, allows. Usage: storage_bench [--json FILE] [--rounds N] [--bytes SIZE] [--directory DIR] ...; see --help.
//
//   stream/read, stream/write  our queue against fio: same file, blocks, depth and kind of pages
//   update/dram         ChunkStore::Run over state in DRAM against a run for each chunk, which joins the threads behind
//                       each chunk
//   update/digests      ChunkStore::Run where one chunk of 64 tells digests of its new state, as in a job with copies,
//                       against the same without digests
//   threads/64          the same on 64 threads, each piece of work replaced by a wait of 4 ms, against 64 times one
//                       thread; `us_of_a_chunk` is the time of the run's own thread for a chunk without its pieces
//   sync/eight_jobs     eight threads that write to one file and sync it, sharing syncs, against a sync for each call
//   step/nvme           ChunkStore::Run over state on NVMe (AdamW, bf16 gradients and working copies, fp32 moments)
//                       against max(its reads and writes alone, its compute alone)
//   step/nvme_balanced  the same when compute takes as long as the I/O: the run also updates enough chunks in DRAM,
//                       spread evenly between the chunks on NVMe
//   step/nvme_8bit      parameters per second with 8-bit moments against those with fp32 moments
//   remainder/*         parameters per second of a step from NVMe by a job that keeps remainders, against the same with
//                       fp32 masters; with fp32 and with 8-bit moments, and with state in DRAM
//   two_devices         the step over two disks that are held to equal speeds against the step over one of them; needs
//                       root, and says so where it cannot be measured
//   plan/*              steps by the chosen plan against steps by first fit, for five splits of the budgets
//   params/nvme         pulls of two ranks, forward and backward, of chunks without working copies, by one thread that
//                       reads, against fio; read_threads_N: by so many threads
//   step/log            a step of a job with durability `step` on a state server, its state in DRAM, against
//                       max(the log's bytes written and synced alone, the same step with durability `none`)
//   recovery            the start of a server where another was killed, against a sequential read of the data it needs
//   start               the start of a server on NVMe state that needs no replay, against a sequential read of the
//                       state
//   counts/*            microseconds per record of a log of 10^3, 10^4 and 10^5 segments, and per chunk of a store of
//                       as many chunks, in each phase of their lives; on a disk in memory, whose own time is taken
//                       off; the ratio is that of 10^4 to 10^5
//
// "I/O alone" reads every extent into a staging slot and writes the extent back from there, with the same queue, slots
// and window as the step, but without kernels. "Compute alone" is the step's computation on as many states in memory as
// staging has slots: updates, with the digests of each state before and after; `without_digests` is the ratio if
// digests count as overhead of the step. `side_by_side` is the rate of two threads that do I/O alone and compute alone
// at once and share nothing: less than 1 where the machine's disk needs its processors or its memory.
//
// A server's job is pushed at in steady state: pushes of step N + 1 overlap the update of N, and each step flushes so
// many chunks to the disk that the log can be cut and never fills. "The log alone" leaves out these writes;
// `with_flushes` is the ratio if they count. In this row, `side_by_side` is the rate of the step without the log while
// another thread writes and syncs the log's bytes.
//
// All variants of a round run one after another, the variants without a server in an order that rotates. Ratios are
// medians.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ballast/proto/base/mutexes.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::bench {
namespace {

struct RowGroup {
  const char* name;
  MeasureRows* measure;
};
constexpr RowGroup kGroups[] = {
    {"stream", MeasureStreams},  {"update", MeasureUpdates},    {"threads", MeasureThreads},
    {"sync", MeasureSyncs},      {"step", MeasureSteps},        {"remainder", MeasureRemainders},
    {"devices", MeasureDevices}, {"plan", MeasurePlans},        {"params", MeasureParams},
    {"log", MeasureLog},         {"recovery", MeasureRecovery}, {"start", MeasureStart},
    {"counts", MeasureCounts}};

int Main(int argc, char** argv) {
  StorageBenchOptions options;
  std::set<std::string> names = {""};
  for (const RowGroup& group : kGroups) names.insert(group.name);
  CLI::App app("The storage layer against the disk, as ratios within one run");
  app.add_option("--json", options.json, "Also write the rows to this file");
  app.add_option("--filter", options.filter, "One group of rows alone")->check(CLI::IsMember(names));
  app.add_option("--rounds", options.rounds, "Of each row")->capture_default_str()->check(CLI::Range(1, 1001));
  app.add_option("--directory", options.directory, "On the disk to measure; the files are gone afterwards")
      ->capture_default_str()
      ->check(CLI::ExistingDirectory);
  const CLI::AsSizeValue size(/*kb_is_1000=*/false);
  app.add_option("--bytes", options.bytes, "Of the streams' file, and of the step's state with fp32 moments (2 GiB)")
      ->transform(size);
  app.add_option("--staging", options.staging_bytes, "Of a store, as `staging` of a server (100 MiB)")->transform(size);
  app.add_option("--dram", options.dram_bytes, "At most, for the chunks that balance compute and I/O (4 GiB)")
      ->transform(size);
  app.add_option("--threads", options.threads, "That compute a step")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--block", options.stream.block_bytes, "Of a stream's transfers (1 MiB)")->transform(size);
  app.add_option("--depth", options.stream.depth, "Of a stream's transfers, in flight")
      ->capture_default_str()
      ->check(CLI::Range(1u, storage::kIoRequestsMax));
  app.add_option("--server-chunks", options.server_chunks,
                 "Of 2^20 parameters, of the job on a state server (rows log and recovery)")
      ->capture_default_str()
      ->check(CLI::Range(8, 4096));
  app.add_option("--start-bytes", options.start_bytes, "Of the state of the job that starts again (4 GiB)")
      ->transform(size);
  app.add_option("--start-data", options.start_data,
                 "Its directory, made where there is none, which stays: to measure several builds on the same data");
  std::string until_killed;
  app.add_option("--train-until-killed", until_killed)->group("");
  CLI11_PARSE(app, argc, argv);
  model::StopDeadlockSearch();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("storage_bench", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::warn);
  if (!until_killed.empty()) {
    const absl::Status status = TrainUntilKilled(options, until_killed);
    std::fprintf(stderr, "storage_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  setenv("TMPDIR", options.directory.c_str(), /*overwrite=*/1);  // where a ScratchDirectory lies
  const ScratchDirectory directory;
  std::vector<Row> rows;
  bool complete = true;
  for (const RowGroup& group : kGroups) {
    if (!options.filter.empty() && options.filter != group.name) continue;
    std::vector<Row> added;
    const absl::Status status = group.measure(options, directory.path(), &added);
    if (!status.ok()) {
      std::fprintf(stderr, "\nstorage_bench: %s left out: %s\n", group.name, std::string(status.message()).c_str());
      complete = false;
      continue;
    }
    rows.insert(rows.end(), added.begin(), added.end());
  }
  for (const Row& row : rows) Print(row);
  if (!options.json.empty()) WriteJson(options.json, rows);
  return complete ? 0 : 1;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
