// The row of pulls from NVMe: parameters of chunks that have no working copy, rounded from the masters that their reads
// fetch, against fio reading as many bytes. See storage_bench.cc.
#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kPulledChunk = uint64_t{1} << 20;  // elements
constexpr uint64_t kMasterBytes = kPulledChunk * sizeof(float);
constexpr uint64_t kRanks = 2;
constexpr int kReadThreads = 1;  // a server's default

// A store whose state and parameters are on NVMe, with memory for pulls alone.
class PulledStore {
 public:
  absl::Status Open(const StorageBenchOptions& bench, const std::string& directory, uint64_t chunks) {
    const std::vector<uint64_t> elements(chunks, kPulledChunk);
    // The memory that pulls take depends on nothing but the chunks.
    BALLAST_RETURN_IF_ERROR(OpenTiers(bench, directory, bench.staging_bytes));
    const storage::PullMemory pull = store_->pull_memory_missing(kPulledChunk, chunks);
    BALLAST_RETURN_IF_ERROR(OpenTiers(bench, directory, bench.staging_bytes + pull.bytes()));
    storage::Plan plan;
    plan.chunks.resize(chunks, {.state = storage::TierKind::kNvme, .working = std::nullopt});
    plan.pull = pull;
    BALLAST_RETURN_IF_ERROR(store_->Add(elements, plan));
    for (uint64_t i = 0; i < chunks; ++i) {
      if (store_->has_working_copy(i)) return absl::InternalError("a chunk has a working copy in spite of the plan");
    }
    return absl::OkStatus();
  }

  // So that the extents are written: a state before its first update takes no read.
  absl::Status Step(absl::Span<const std::byte> gradient) {
    std::vector<storage::ChunkUpdate> updates(store_->chunk_count());
    const kernels::Coefficients coefficients = kernels::MakeCoefficients({}, {1e-3, 0.9, 0.999, 1e-8, 0.01}, 1, 1);
    for (uint64_t i = 0; i < updates.size(); ++i) {
      updates[i].chunk = i;
      updates[i].segments = {{.begin = 0, .end = kPulledChunk, .coefficients = coefficients}};
      updates[i].gradient = gradient;
    }
    return store_->Run(updates, [](size_t) {});
  }

  // A forward and a backward pass: each rank pulls its half of every chunk, the second time from the last chunk to the
  // first. `threads` take the pulls in this order, as the reading threads of a server do.
  absl::Status Passes(int threads) {
    const uint64_t chunks = store_->chunk_count(), pulls = 2 * chunks * kRanks;
    std::atomic<uint64_t> next{0};
    absl::Mutex mutex;
    absl::Status status;
    const auto pull = [&] {
      std::vector<std::byte> to(kPulledChunk / kRanks * sizeof(uint16_t));
      for (uint64_t i = 0; (i = next++) < pulls;) {
        const uint64_t place = i / kRanks, chunk = place < chunks ? place : 2 * chunks - 1 - place;
        const absl::Status read = store_->ReadWorking(chunk, i % kRanks * (kPulledChunk / kRanks), absl::MakeSpan(to));
        absl::MutexLock lock(&mutex);
        status.Update(read);
      }
    };
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) all.emplace_back(pull);
    for (std::thread& thread : all) thread.join();
    return status;
  }

 private:
  absl::Status OpenTiers(const StorageBenchOptions& bench, const std::string& directory, uint64_t dram) {
    store_.reset();
    tiers_.reset();  // has the directory
    BALLAST_ASSIGN_OR_RETURN(tiers_, storage::Tiers::Open({.budget = {.dram = dram, .nvme = uint64_t{1} << 40},
                                                           .directory = directory,
                                                           .staging_bytes = bench.staging_bytes}));
    store_ = std::make_unique<storage::ChunkStore>(tiers_.get(), kernels::OptimizerSpec(), &pool_);
    return absl::OkStatus();
  }

  kernels::ThreadPool pool_{2};
  std::unique_ptr<storage::Tiers> tiers_;
  std::unique_ptr<storage::ChunkStore> store_;
};

}  // namespace

absl::Status MeasureParams(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  const uint64_t chunks = std::max<uint64_t>(options.bytes / storage::StateLayout().StateBytes(kPulledChunk), 1);
  const std::vector<std::byte> gradient(kPulledChunk * sizeof(uint16_t));
  PulledStore store;
  BALLAST_RETURN_IF_ERROR(store.Open(options, directory, chunks));
  BALLAST_RETURN_IF_ERROR(store.Step(gradient));

  // fio reads a file of the masters' bytes twice, as the passes do.
  StreamShape shape = options.stream;
  shape.bytes = chunks * kMasterBytes;
  BALLAST_ASSIGN_OR_RETURN(StreamComparison fio, StreamComparison::Make(shape, directory + "/masters"));
  constexpr int kThreads[] = {1, 2, 4};  // read_threads
  std::vector<std::vector<double>> seconds(std::size(kThreads));
  for (int round = 0; round <= options.rounds; ++round) {
    std::fprintf(stderr, "\rstorage_bench: pulls from NVMe, round %d of %d", round, options.rounds);
    BALLAST_RETURN_IF_ERROR(fio.Round(storage::IoRequest::Kind::kRead, /*ours_first=*/round % 2 == 0));
    for (size_t i = 0; i < std::size(kThreads); ++i) {
      BALLAST_ASSIGN_OR_RETURN(const double passes, Seconds([&] { return store.Passes(kThreads[i]); }));
      if (round > 0) seconds[i].push_back(passes);
    }
    if (round == 0) fio.Forget();
  }
  std::fprintf(stderr, "\n");
  const double bytes = 2 * static_cast<double>(shape.bytes);
  std::vector<double> fio_speeds;
  for (const StreamSpeed& speed : fio.theirs()) fio_speeds.push_back(speed.gb_per_s);
  Row row{.name = "params/nvme",
          .bytes_per_element = sizeof(float),
          .reference = fio.reference(),
          .bar = 0.9,
          .more = {{"reference_gb_per_s", Median(fio_speeds)}}};
  for (size_t i = 0; i < std::size(kThreads); ++i) {
    std::vector<double> ratios;
    for (size_t round = 0; round < seconds[i].size(); ++round) {
      ratios.push_back(bytes / seconds[i][round] / 1e9 / fio_speeds[round]);
    }
    row.more.emplace_back(absl::StrCat("read_threads_", kThreads[i]), Median(ratios));
    if (kThreads[i] != kReadThreads) continue;
    row.gb_per_s = bytes / Median(seconds[i]) / 1e9;
    row.ratio = Median(ratios);
  }
  rows->push_back(std::move(row));
  return absl::OkStatus();
}

}  // namespace ballast::bench
