// The storage layer against the disk itself, as ratios within one run: a ratio of 1 is what the disk, or else the
// kernel, allows. Usage: storage_bench [--json FILE] [--rounds N] [--bytes SIZE] [--directory DIR] ...; see --help.
//
//   stream/read, stream/write  our queue against fio: same file, blocks, depth and kind of pages
//   step/nvme           ChunkStore::Run over state on NVMe (AdamW, bf16 gradients and working copies, fp32 moments)
//                       against max(its reads and writes alone, its compute alone)
//   step/nvme_balanced  the same when compute takes as long as the I/O: chunks whose state is in DRAM are updated in
//   the
//                       same run, spread evenly between those on NVMe, as many as it takes
//   step/nvme_8bit      parameters per second with 8-bit moments against those with fp32 moments
//
// "I/O alone" reads every extent into a staging slot and writes it back from there, through a queue, slots and a window
// as the step's, without a kernel. "Compute alone" is as many updates of chunks in DRAM, of which there are as many as
// staging has slots. Checksums of state count as the step's own overhead; `with_checksums` is the ratio if they are
// counted as compute. All variants of a round run one after another, in an order that rotates; ratios are medians.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_streams.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::bench {
namespace {

using kernels::MomentFormat;
using storage::IoRequest;
using storage::TierKind;

constexpr uint64_t kChunk = uint64_t{1} << 20;  // elements

struct Options {
  std::string json, directory = ".", filter;
  int rounds = 9;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  uint64_t bytes = uint64_t{2} << 30;
  uint64_t staging_bytes = storage::TiersOptions().staging_bytes;
  uint64_t dram_bytes = uint64_t{4} << 30;
  StreamShape stream;
};

struct Row {
  std::string name;
  double bytes_per_element = 0, gb_per_s = 0;
  std::string reference;
  double ratio = 0, bar = 0;
  std::vector<std::pair<std::string, double>> more;
};

using Work = std::function<absl::Status()>;

absl::StatusOr<double> Seconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  BALLAST_RETURN_IF_ERROR(work());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Seconds of each work, one entry per round; the first round of all is not kept.
absl::StatusOr<std::vector<std::vector<double>>> Measure(const char* what, const std::vector<Work>& works, int rounds) {
  std::vector<std::vector<double>> seconds(works.size());
  for (int round = 0; round <= rounds; ++round) {
    std::fprintf(stderr, "\rstorage_bench: %s, round %d of %d", what, round, rounds);
    for (size_t i = 0; i < works.size(); ++i) {
      const size_t which = (i + static_cast<size_t>(round)) % works.size();
      BALLAST_ASSIGN_OR_RETURN(const double taken, Seconds(works[which]));
      if (round > 0) seconds[which].push_back(taken);
    }
  }
  std::fprintf(stderr, "\n");
  return seconds;
}

absl::Status MeasureStreams(const Options& options, const std::string& directory, std::vector<Row>* rows) {
  StreamShape shape = options.stream;
  shape.bytes = options.bytes / shape.block_bytes * shape.block_bytes;
  BALLAST_ASSIGN_OR_RETURN(StreamComparison streams, StreamComparison::Make(shape, directory + "/stream"));
  for (const auto& [name, kind] :
       {std::pair{"stream/read", IoRequest::Kind::kRead}, {"stream/write", IoRequest::Kind::kWrite}}) {
    for (int round = 0; round <= options.rounds; ++round) {
      std::fprintf(stderr, "\rstorage_bench: %s, round %d of %d", name, round, options.rounds);
      BALLAST_RETURN_IF_ERROR(streams.Round(kind, /*ours_first=*/round % 2 == 0));
      if (round == 0) streams.Forget();
    }
    std::fprintf(stderr, "\n");
    const auto median = [](const std::vector<StreamSpeed>& speeds, double StreamSpeed::*field) {
      std::vector<double> values;
      for (const StreamSpeed& speed : speeds) values.push_back(speed.*field);
      return Median(values);
    };
    rows->push_back(
        {.name = name,
         .bytes_per_element = static_cast<double>(shape.block_bytes),
         .gb_per_s = median(streams.ours(), &StreamSpeed::gb_per_s),
         .reference = streams.reference(),
         .ratio = Median(streams.ratios()),
         .bar = 0.95,
         .more = {{"reference_gb_per_s", median(streams.theirs(), &StreamSpeed::gb_per_s)},
                  {"cpu_seconds_per_gb", median(streams.ours(), &StreamSpeed::cpu_seconds_per_gb)},
                  {"reference_cpu_seconds_per_gb", median(streams.theirs(), &StreamSpeed::cpu_seconds_per_gb)}}});
    streams.Forget();
  }
  return absl::OkStatus();
}

// Small numbers of both signs, for as many chunks as no cache holds; update i of a step takes the i-th, round and
// round.
class Gradients {
 public:
  static absl::StatusOr<Gradients> Make() {
    Gradients gradients;
    BALLAST_ASSIGN_OR_RETURN(gradients.memory_, storage::Arena::Map(kChunks * kChunk * sizeof(uint16_t), false));
    auto* const values = reinterpret_cast<uint16_t*>(gradients.memory_.bytes().data());
    for (uint64_t i = 0; i < kChunks * kChunk; ++i) {
      const auto hash = static_cast<uint32_t>(i * 2654435761u);
      values[i] = kernels::ToBf16((static_cast<float>(hash >> 8) / (1 << 24) - 0.5f) * 0.02f);
    }
    return gradients;
  }
  absl::Span<const std::byte> Of(uint64_t i) const {
    return memory_.bytes().subspan(i % kChunks * kChunk * sizeof(uint16_t), kChunk * sizeof(uint16_t));
  }

 private:
  static constexpr uint64_t kChunks = 64;
  storage::Arena memory_;
};

// A store of full chunks, stepped by AdamW.
class Job {
 public:
  Job(storage::Tiers* tiers, MomentFormat moments, kernels::ThreadPool* pool, const Gradients* gradients)
      : spec_{.moments = moments}, store_(tiers, spec_, pool), gradients_(gradients) {}

  absl::Status Add(uint64_t chunks, TierKind tier) {
    storage::Plan plan;
    plan.chunks.resize(chunks, {.state = tier, .working = TierKind::kDram});
    return store_.Add(std::vector<uint64_t>(chunks, kChunk), plan);
  }
  uint64_t chunk_bytes() const { return store_.layout().StateBytes(kChunk); }
  uint64_t chunks() const { return store_.chunk_count(); }

  absl::Status Step(absl::Span<const uint64_t> chunks) {
    const kernels::Coefficients coefficients = MakeCoefficients(spec_, kHyper, ++step_, 1);
    std::vector<storage::ChunkUpdate> updates;
    for (const uint64_t chunk : chunks) {
      updates.push_back({.chunk = chunk,
                         .values = {},
                         .segments = {{.begin = 0, .end = kChunk, .coefficients = coefficients}},
                         .gradient = gradients_->Of(updates.size()),
                         .random = {.seed = 1, .unit = static_cast<uint32_t>(chunk), .step = step_}});
    }
    return store_.Run(updates, [](size_t) {});
  }
  // `updates` updates, of all chunks in turn.
  absl::Status StepInTurn(uint64_t updates) {
    for (uint64_t at = 0; at < updates; at += chunks()) {
      BALLAST_RETURN_IF_ERROR(Step(Range(0, std::min(chunks(), updates - at))));
    }
    return absl::OkStatus();
  }
  static std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
    std::vector<uint64_t> range(end - begin);
    for (uint64_t i = 0; i < range.size(); ++i) range[i] = begin + i;
    return range;
  }

 private:
  static constexpr kernels::Hyper kHyper = {
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
  const kernels::OptimizerSpec spec_;
  storage::ChunkStore store_;
  const Gradients* const gradients_;
  uint64_t step_ = 0;
};

// How many chunks of each kind make compute as long as I/O.
struct Balance {
  uint64_t nvme = 0, dram = 0;
  // DRAM chunks of `job`, from `first_dram` on, spread evenly between its first ones, which are on NVMe.
  std::vector<uint64_t> Order(uint64_t first_dram) const {
    std::vector<uint64_t> order;
    for (uint64_t i = 0, d = 0; i < nvme; ++i) {
      while (d * 2 * nvme < dram * (2 * i + 1)) order.push_back(first_dram + d++);
      order.push_back(i);
      if (i + 1 == nvme) {
        while (d < dram) order.push_back(first_dram + d++);
      }
    }
    return order;
  }
};

absl::StatusOr<Balance> FindBalance(const Options& options, Job& job, uint64_t nvme, double io, double compute) {
  constexpr uint64_t kProbeChunks = 16;
  BALLAST_RETURN_IF_ERROR(job.Add(kProbeChunks, TierKind::kDram));
  const auto probe = [&] { return job.Step(Job::Range(nvme, nvme + kProbeChunks)); };
  std::vector<double> seconds;
  for (int i = 0; i < 6; ++i) {
    BALLAST_ASSIGN_OR_RETURN(const double taken, Seconds(probe));
    seconds.push_back(taken / kProbeChunks);
  }
  const double missing = std::max(0.0, io - compute) / static_cast<double>(nvme);
  const double dram_per_nvme = missing / Median(seconds);
  const double affordable = static_cast<double>(options.dram_bytes / (job.chunk_bytes() + 2 * kChunk));
  Balance balance;
  balance.nvme = std::clamp<uint64_t>(static_cast<uint64_t>(affordable / std::max(dram_per_nvme, 1e-9)), 1, nvme);
  balance.dram = static_cast<uint64_t>(std::lround(dram_per_nvme * static_cast<double>(balance.nvme)));
  if (balance.dram > kProbeChunks) BALLAST_RETURN_IF_ERROR(job.Add(balance.dram - kProbeChunks, TierKind::kDram));
  std::fprintf(stderr, "storage_bench: balanced with %lu chunks on NVMe and %lu in DRAM\n", balance.nvme, balance.dram);
  return balance;
}

// The row of a step against what bounds it.
Row BoundedRow(const char* name, uint64_t chunks, uint64_t chunk_bytes, const std::vector<double>& step,
               const std::vector<double>& io, const std::vector<double>& compute,
               const std::vector<double>& checksums) {
  std::vector<double> ratios, with_checksums;
  for (size_t i = 0; i < step.size(); ++i) {
    ratios.push_back(std::max(io[i], compute[i]) / step[i]);
    with_checksums.push_back(std::max(io[i], compute[i] + checksums[i]) / step[i]);
  }
  const double moved = 2 * static_cast<double>(chunks * chunk_bytes);
  return {.name = name,
          .bytes_per_element = 2 * static_cast<double>(chunk_bytes) / kChunk,
          .gb_per_s = moved / Median(step) / 1e9,
          .reference = "max(I/O alone, compute alone)",
          .ratio = Median(ratios),
          .bar = 1 / 1.1,
          .more = {{"seconds", Median(step)},
                   {"io_seconds", Median(io)},
                   {"compute_seconds", Median(compute)},
                   {"checksum_seconds", Median(checksums)},
                   {"with_checksums", Median(with_checksums)}}};
}

absl::Status MeasureSteps(const Options& options, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(const auto tiers,
                           storage::Tiers::Open({.budget = {.dram = ~uint64_t{0} / 2, .nvme = ~uint64_t{0} / 2},
                                                 .directory = directory,
                                                 .staging_bytes = options.staging_bytes}));
  BALLAST_ASSIGN_OR_RETURN(const Gradients gradients, Gradients::Make());
  kernels::ThreadPool pool(options.threads);
  Job f32(tiers.get(), MomentFormat::kF32, &pool, &gradients), f8(tiers.get(), MomentFormat::kF8, &pool, &gradients);
  Job in_dram(tiers.get(), MomentFormat::kF32, &pool, &gradients);
  const uint64_t n = std::max<uint64_t>(options.bytes / f32.chunk_bytes(), 1);
  std::fprintf(stderr, "storage_bench: %lu chunks of 2^20 parameters, I/O by %s\n", n, tiers->io_backend().c_str());
  BALLAST_RETURN_IF_ERROR(f32.Add(n, TierKind::kNvme));
  if (tiers->used().nvme != n * f32.chunk_bytes()) {
    return absl::InternalError("extents no longer lie one behind the other: IoAlone would move others than the step");
  }
  BALLAST_RETURN_IF_ERROR(f8.Add(n, TierKind::kNvme));
  BALLAST_ASSIGN_OR_RETURN(IoAlone alone,
                           IoAlone::Make(options.staging_bytes, &tiers->nvme()->file(), f32.chunk_bytes()));
  BALLAST_RETURN_IF_ERROR(in_dram.Add(alone.slots(), TierKind::kDram));

  const Work io = [&] { return alone.Run(n); }, compute = [&] { return in_dram.StepInTurn(n); };
  const Work checksums = [&] {
    alone.Checksums(n);
    return absl::OkStatus();
  };
  const std::vector<uint64_t> all = Job::Range(0, n);
  // The first steps write extents that were never written, and the second read them for the first time.
  for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(f32.Step(all));
  for (int i = 0; i < 2; ++i) BALLAST_RETURN_IF_ERROR(f8.Step(all));
  BALLAST_ASSIGN_OR_RETURN(
      const auto times,
      Measure("steps", {io, compute, [&] { return f32.Step(all); }, [&] { return f8.Step(all); }, checksums},
              options.rounds));
  rows->push_back(BoundedRow("step/nvme", n, f32.chunk_bytes(), times[2], times[0], times[1], times[4]));
  std::vector<double> ratios;
  for (size_t i = 0; i < times[2].size(); ++i) ratios.push_back(times[2][i] / times[3][i]);
  const double f8_bytes = static_cast<double>(f8.chunk_bytes()), f8_seconds = Median(times[3]);
  const Row f8_row = {
      .name = "step/nvme_8bit",
      .bytes_per_element = 2 * f8_bytes / kChunk,
      .gb_per_s = 2 * f8_bytes * static_cast<double>(n) / f8_seconds / 1e9,
      .reference = "step/nvme, parameters per second",
      .ratio = Median(ratios),
      .bar = 1.6,
      .more = {{"seconds", f8_seconds}, {"parameters_per_s", static_cast<double>(n * kChunk) / f8_seconds}}};

  BALLAST_ASSIGN_OR_RETURN(const Balance balance, FindBalance(options, f32, n, Median(times[0]), Median(times[1])));
  const std::vector<uint64_t> mixed = balance.Order(n), added = Job::Range(n, n + balance.dram);
  const Work mixed_compute = [&] {
    BALLAST_RETURN_IF_ERROR(in_dram.StepInTurn(balance.nvme));
    return f32.Step(added);
  };
  BALLAST_ASSIGN_OR_RETURN(const auto mixed_times, Measure("balanced steps",
                                                           {[&] { return alone.Run(balance.nvme); }, mixed_compute,
                                                            [&] { return f32.Step(mixed); },
                                                            [&] {
                                                              alone.Checksums(balance.nvme);
                                                              return absl::OkStatus();
                                                            }},
                                                           options.rounds));
  rows->push_back(BoundedRow("step/nvme_balanced", balance.nvme, f32.chunk_bytes(), mixed_times[2], mixed_times[0],
                             mixed_times[1], mixed_times[3]));
  rows->push_back(f8_row);
  return absl::OkStatus();
}

void Print(const Row& row) {
  std::printf("%-20s %10.2f B %7.2f GB/s   %6.3f of %s (1/ratio %.3f, bar %.3f)\n", row.name.c_str(),
              row.bytes_per_element, row.gb_per_s, row.ratio, row.reference.c_str(), 1 / row.ratio, row.bar);
  for (const auto& [name, value] : row.more) std::printf("  %s %.5g", name.c_str(), value);
  std::printf("\n");
  std::fflush(stdout);
}

void WriteJson(const std::string& path, const std::vector<Row>& rows) {
  std::ofstream out(path);
  out << "{\"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    out << (i == 0 ? "\n" : ",\n") << "  {\"name\": \"" << row.name
        << "\", \"bytes_per_element\": " << row.bytes_per_element << ", \"gb_per_s\": " << row.gb_per_s
        << ", \"reference\": \"" << row.reference << "\", \"ratio\": " << row.ratio << ", \"bar\": " << row.bar;
    for (const auto& [name, value] : row.more) out << ", \"" << name << "\": " << value;
    out << "}";
  }
  out << "\n]}\n";
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("The storage layer against the disk, as ratios within one run");
  app.add_option("--json", options.json, "Also write the rows to this file");
  app.add_option("--filter", options.filter, "'stream' or 'step' alone")->check(CLI::IsMember({"", "stream", "step"}));
  app.add_option("--rounds", options.rounds, "Of each row")->capture_default_str()->check(CLI::Range(1, 1001));
  app.add_option("--directory", options.directory, "On the disk to measure; the files are gone afterwards")
      ->capture_default_str()
      ->check(CLI::ExistingDirectory);
  const CLI::AsSizeValue size(/*kb_is_1000=*/false);
  app.add_option("--bytes", options.bytes, "Of the streams' file, and of the step's state with fp32 moments (2 GiB)")
      ->transform(size);
  app.add_option("--staging", options.staging_bytes, "Of a store, as `staging` of a server (48 MiB)")->transform(size);
  app.add_option("--dram", options.dram_bytes, "At most, for the chunks that balance compute and I/O (4 GiB)")
      ->transform(size);
  app.add_option("--threads", options.threads, "That compute a step")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--block", options.stream.block_bytes, "Of a stream's transfers (1 MiB)")->transform(size);
  app.add_option("--depth", options.stream.depth, "Of a stream's transfers, in flight")
      ->capture_default_str()
      ->check(CLI::Range(1u, storage::kIoRequestsMax));
  CLI11_PARSE(app, argc, argv);
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("storage_bench", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::warn);
  setenv("TMPDIR", options.directory.c_str(), /*overwrite=*/1);  // where a ScratchDirectory lies
  const ScratchDirectory directory;
  std::vector<Row> rows;
  absl::Status status;
  if (options.filter != "step") status = MeasureStreams(options, directory.path(), &rows);
  if (!status.ok()) {
    std::fprintf(stderr, "\nstorage_bench: streams left out: %s\n", std::string(status.message()).c_str());
    rows.clear();
  }
  absl::Status steps;
  if (options.filter != "stream") steps = MeasureSteps(options, directory.path(), &rows);
  if (!steps.ok()) std::fprintf(stderr, "\nstorage_bench: steps: %s\n", std::string(steps.message()).c_str());
  for (const Row& row : rows) Print(row);
  if (!options.json.empty()) WriteJson(options.json, rows);
  return status.ok() && steps.ok() ? 0 : 1;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
