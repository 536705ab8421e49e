// The rows of a step over state in DRAM, and of its scheduling on more threads than processors: see storage_bench.cc.
#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kChunkElements = uint64_t{1} << 20;  // elements
constexpr uint64_t kPieces = 16;                        // of a chunk

// Each piece waits as long as a piece might compute, or returns at once.
class WaitingPool : public kernels::ThreadPool {
 public:
  WaitingPool(int threads, std::chrono::microseconds piece) : ThreadPool(threads), piece_(piece) {}

 private:
  void Compute(absl::FunctionRef<void(uint64_t)>, uint64_t) override {
    if (piece_.count() > 0) std::this_thread::sleep_for(piece_);
  }
  const std::chrono::microseconds piece_;
};

// A store of full chunks in DRAM, stepped over its first chunks.
class DramJob {
 public:
  static absl::StatusOr<std::unique_ptr<DramJob>> Make(const std::string& directory, kernels::OptimizerSpec spec,
                                                       uint64_t chunks, kernels::ThreadPool* pool) {
    std::unique_ptr<DramJob> job(new DramJob(spec));
    BALLAST_ASSIGN_OR_RETURN(job->tiers_,
                             storage::Tiers::Open({.budget = {.dram = ~uint64_t{0} / 2}, .directory = directory}));
    BALLAST_ASSIGN_OR_RETURN(job->gradient_, storage::Arena::Map(kChunkElements * sizeof(kernels::bf16)));
    auto* const values = reinterpret_cast<kernels::bf16*>(job->gradient_.bytes().data());
    for (uint64_t i = 0; i < kChunkElements; ++i) values[i] = kernels::ToBf16(i % 2 == 0 ? 1e-3f : -1e-3f);
    job->store_ = std::make_unique<storage::ChunkStore>(job->tiers_.get(), spec, pool);
    storage::Plan plan;
    plan.chunks.resize(chunks);
    BALLAST_RETURN_IF_ERROR(job->store_->Add(std::vector<uint64_t>(chunks, kChunkElements), plan));
    return job;
  }

  // A step, as one run or as a run for each chunk, which lets all threads end before the next chunk begins. The first
  // chunks tell digests of their new states.
  absl::Status Step(bool joined, uint64_t digested = 0) {
    constexpr kernels::Hyper kHyper = {
        .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
    const kernels::Coefficients coefficients = MakeCoefficients(spec_, kHyper, ++steps_, 1);
    std::vector<storage::ChunkUpdate> updates(store_->chunk_count());
    std::vector<std::optional<storage::ArrayDigests>> digests(digested);
    for (uint64_t i = 0; i < digested; ++i) updates[i].digests = &digests[i];
    for (uint64_t i = 0; i < updates.size(); ++i) {
      updates[i].chunk = i;
      updates[i].segments = {{.begin = 0, .end = kChunkElements, .coefficients = coefficients}};
      updates[i].gradient = gradient_.bytes();
      updates[i].random = {.seed = 1, .unit = static_cast<uint32_t>(i), .step = steps_};
    }
    const size_t together = joined ? 1 : updates.size();
    for (size_t i = 0; i < updates.size(); i += together) {
      BALLAST_RETURN_IF_ERROR(store_->Run(absl::MakeConstSpan(updates).subspan(i, together), [](size_t) {}));
    }
    return absl::OkStatus();
  }
  double bytes_per_element() const {
    return 2.0 * static_cast<double>(store_->layout().StateBytes(kChunkElements)) / kChunkElements + 4;
  }

 private:
  explicit DramJob(const kernels::OptimizerSpec& spec) : spec_(spec) {}

  const kernels::OptimizerSpec spec_;
  std::unique_ptr<storage::Tiers> tiers_;
  storage::Arena gradient_;
  std::unique_ptr<storage::ChunkStore> store_;
  uint64_t steps_ = 0;
};

absl::StatusOr<Row> RealRow(const StorageBenchOptions& options, const std::string& directory) {
  constexpr uint64_t kChunks = 64;
  kernels::ThreadPool pool(options.threads);
  BALLAST_ASSIGN_OR_RETURN(const auto job, DramJob::Make(directory, {}, kChunks, &pool));
  BALLAST_ASSIGN_OR_RETURN(const auto times, Measure("update in DRAM",
                                                     {[&] { return job->Step(/*joined=*/false); },
                                                      [&] { return job->Step(/*joined=*/true); }},
                                                     options.rounds));
  std::vector<double> ratios;
  for (size_t i = 0; i < times[0].size(); ++i) ratios.push_back(times[1][i] / times[0][i]);
  const double seconds = Median(times[0]);
  return Row{.name = "update/dram",
             .bytes_per_element = job->bytes_per_element(),
             .gb_per_s = job->bytes_per_element() * static_cast<double>(kChunks * kChunkElements) / seconds / 1e9,
             .reference = "a run for each chunk",
             .ratio = Median(ratios),
             .bar = 1,
             .more = {{"seconds", seconds}, {"threads", static_cast<double>(options.threads)}}};
}

// What the comparison of copies (proto/model/copies.h) costs a step: one chunk of 64 tells digests of its new state.
// `all_chunks` is the ratio if every chunk does.
absl::StatusOr<Row> DigestRow(const StorageBenchOptions& options, const std::string& directory) {
  constexpr uint64_t kChunks = 64;
  kernels::ThreadPool pool(options.threads);
  BALLAST_ASSIGN_OR_RETURN(const auto job, DramJob::Make(directory, {}, kChunks, &pool));
  double cpu[3] = {};  // seconds of all threads
  const auto step = [&](double* spent, uint64_t digested) -> Work {
    return [&job, spent, digested] {
      const std::clock_t begun = std::clock();
      const absl::Status status = job->Step(/*joined=*/true, digested);
      *spent += static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
      return status;
    };
  };
  BALLAST_ASSIGN_OR_RETURN(
      const auto times,
      Measure("update with digests", {step(&cpu[0], 0), step(&cpu[1], 1), step(&cpu[2], kChunks)}, options.rounds));
  std::vector<double> one, all;
  for (size_t i = 0; i < times[0].size(); ++i) {
    one.push_back(times[0][i] / times[1][i]);
    all.push_back(times[0][i] / times[2][i]);
  }
  const double seconds = Median(times[1]);
  return Row{.name = "update/digests",
             .bytes_per_element = job->bytes_per_element(),
             .gb_per_s = job->bytes_per_element() * static_cast<double>(kChunks * kChunkElements) / seconds / 1e9,
             .reference = "the same without digests",
             .ratio = Median(one),
             .bar = 0.99,
             .more = {{"cpu", cpu[0] / cpu[1]}, {"all_chunks", Median(all)}, {"all_chunks_cpu", cpu[0] / cpu[2]}}};
}

// Pieces per second of a waiting pool.
absl::StatusOr<double> PiecesPerSecond(const StorageBenchOptions& options, const std::string& directory, int threads,
                                       std::chrono::microseconds piece, bool joined) {
  const uint64_t chunks = 2 * static_cast<uint64_t>(threads);
  WaitingPool pool(threads, piece);
  BALLAST_ASSIGN_OR_RETURN(const auto job,
                           DramJob::Make(directory, {.kind = kernels::OptimizerKind::kSgd}, chunks, &pool));
  BALLAST_ASSIGN_OR_RETURN(const auto times, Measure(absl::StrCat("update on ", threads, " threads").c_str(),
                                                     {[&] { return job->Step(joined); }}, options.rounds));
  return static_cast<double>(chunks * kPieces) / Median(times[0]);
}

absl::StatusOr<Row> SimulatedRow(const StorageBenchOptions& options, const std::string& directory) {
  constexpr int kThreads = 64;
  constexpr std::chrono::milliseconds kPiece(4);
  BALLAST_ASSIGN_OR_RETURN(const double alone, PiecesPerSecond(options, directory, 1, kPiece, false));
  Row row = {.name = "threads/64", .reference = "64 times one thread", .bar = 0.85};
  for (int threads = 2; threads <= kThreads; threads *= 2) {
    BALLAST_ASSIGN_OR_RETURN(const double rate, PiecesPerSecond(options, directory, threads, kPiece, false));
    row.ratio = rate / alone / threads;
    row.more.emplace_back(absl::StrCat("threads_", threads), row.ratio);
  }
  BALLAST_ASSIGN_OR_RETURN(const double joined, PiecesPerSecond(options, directory, kThreads, kPiece, true));
  row.more.emplace_back("run_for_each_chunk", joined / alone / kThreads);
  // The run's own thread, without any computation: the time for a chunk that no number of threads makes shorter.
  BALLAST_ASSIGN_OR_RETURN(const double idle,
                           PiecesPerSecond(options, directory, 1, std::chrono::microseconds(0), false));
  row.more.emplace_back("us_of_a_chunk", 1e6 * kPieces / idle);
  return row;
}

}  // namespace

absl::Status MeasureUpdates(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(Row real, RealRow(options, directory));
  rows->push_back(std::move(real));
  BALLAST_ASSIGN_OR_RETURN(Row digests, DigestRow(options, directory));
  rows->push_back(std::move(digests));
  return absl::OkStatus();
}

absl::Status MeasureThreads(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_ASSIGN_OR_RETURN(Row simulated, SimulatedRow(options, directory));
  rows->push_back(std::move(simulated));
  return absl::OkStatus();
}

}  // namespace ballast::bench
