// Measures a GPU's work for a server: its link, the kernels alone, whole updates, many small tensors, reads beside
// updates. Prints rows of a markdown table. Exit code 77 without a GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/proto/model/mutexes.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kChunk = kHbmSpanElementsMax;
constexpr int kRounds = 50;

void Row(const char* what, const char* how, double value, const char* unit) {
  std::printf("| %s | %s | %.2f | %s |\n", what, how, value, unit);
}

template <typename T>
T OrDie(absl::StatusOr<T> result) {
  if (!result.ok()) {
    std::printf("FAILED: %s\n", std::string(result.status().message()).c_str());
    std::exit(1);
  }
  return *std::move(result);
}
void OrDie(const absl::Status& status) { OrDie(status.ok() ? absl::StatusOr<int>(0) : absl::StatusOr<int>(status)); }

// Mean seconds of a call of `body`, after a warm-up call.
template <typename Body>
double Seconds(int rounds, const Body& body) {
  body();
  const absl::Time begin = absl::Now();
  for (int i = 0; i < rounds; ++i) body();
  return absl::ToDoubleSeconds(absl::Now() - begin) / rounds;
}

void Link(HbmTier* tier, const DramTier& dram) {
  constexpr uint64_t kBytes = 256 * kMiB;
  const HbmBlock block = OrDie(tier->Allocate(kBytes, "link"));
  const Arena pageable = OrDie(Arena::Map(kBytes));
  const absl::Time begin = absl::Now();
  const Arena locked = OrDie(dram.Map(kBytes));
  Row("map, touch and page-lock", "256 MiB", absl::ToDoubleMilliseconds(absl::Now() - begin), "ms");
  for (const Arena* host : {&locked, &pageable}) {
    const char* const how = host->page_locked() ? "page-locked" : "pageable";
    Row("link to the GPU", how, kBytes / 1e9 / Seconds(5, [&] { OrDie(tier->CopyIn(host->bytes(), block.data())); }),
        "GB/s");
    Row("link from the GPU", how, kBytes / 1e9 / Seconds(5, [&] { OrDie(tier->CopyOut(block.data(), host->bytes())); }),
        "GB/s");
  }
}

// A chunk's state and working copy in HBM, its gradient in page-locked memory.
struct Chunk {
  Chunk(HbmTier* tier, const DramTier& dram, const kernels::OptimizerSpec& s) : spec(s) {
    bytes = kChunk * sizeof(float) + kernels::MomentCount(spec) * MomentBytes();
    state = OrDie(tier->Allocate(bytes, "state"));
    working = OrDie(tier->Allocate(kChunk * kernels::ElementBytes(spec.working), "working"));
    gradient = OrDie(dram.Map(kChunk * kernels::ElementBytes(spec.gradient)));
  }
  uint64_t MomentBytes() const {
    return kernels::MomentBytes(spec.moments, kChunk) + kernels::MomentScaleBytes(spec.moments, kChunk);
  }
  HbmSegment Segment(uint64_t at, uint64_t n) const {
    HbmSegment segment{.coefficients = kernels::MakeCoefficients(spec, {1e-3, 0.9, 0.999, 1e-8, 0.1}, 1, 1.0f),
                       .random = {.first_element = at},
                       .span = {.n = n,
                                .gradient = gradient.bytes().data() + at * kernels::ElementBytes(spec.gradient),
                                .master = reinterpret_cast<float*>(state.data()) + at,
                                .moments = {},
                                .working = nullptr},
                       .working = {.device = working.data() + at * kernels::ElementBytes(spec.working)}};
    std::byte* moment = state.data() + kChunk * sizeof(float);
    for (int k = 0; k < kernels::MomentCount(spec); ++k, moment += MomentBytes()) {
      auto* const scales = reinterpret_cast<float*>(moment + kernels::MomentBytes(spec.moments, kChunk));
      segment.span.moments[static_cast<size_t>(k)] = {moment + kernels::MomentBytes(spec.moments, at),
                                                      scales + at / kernels::kMomentBlock};
    }
    return segment;
  }
  const kernels::OptimizerSpec spec;
  uint64_t bytes = 0;
  HbmBlock state, working;
  Arena gradient;
};

void Updates(HbmTier* tier, const DramTier& dram) {
  const std::pair<const char*, kernels::MomentFormat> formats[] = {{"f32 moments", kernels::MomentFormat::kF32},
                                                                   {"bf16 moments", kernels::MomentFormat::kBf16},
                                                                   {"8-bit moments (i8)", kernels::MomentFormat::kI8},
                                                                   {"8-bit moments (f8)", kernels::MomentFormat::kF8}};
  for (const auto& [name, format] : formats) {
    const Chunk chunk(tier, dram, {.moments = format});
    const HbmSegment segment = chunk.Segment(0, kChunk);
    Row("AdamW of a chunk of 2^20, gradient from the host", name,
        kChunk / 1e9 /
            Seconds(kRounds,
                    [&] {
                      OrDie(tier->Run([&](HbmQueue& queue) { return queue.Update(chunk.spec, {&segment, 1}); }));
                    }),
        "G elements/s");
    const HbmBlock on_device = OrDie(tier->Allocate(2 * kChunk, "gradient"));
    kernels::UpdateSpan span = segment.span;
    span.gradient = on_device.data();
    span.working = chunk.working.data();
    const double seconds =
        Seconds(3,
                [&] {
                  for (int i = 0; i < kRounds; ++i) {
                    OrDie(kernels::cuda::Update(chunk.spec, segment.coefficients, segment.random, span, nullptr));
                  }
                  cudaDeviceSynchronize();
                }) /
        kRounds;
    Row("AdamW, the kernel alone", name, kChunk / 1e9 / seconds, "G elements/s");
    Row("AdamW, the kernel alone, memory traffic", name, (2.0 * chunk.bytes + 4 * kChunk) / 1e9 / seconds, "GB/s");
  }
}

void SmallTensors(HbmTier* tier, const DramTier& dram) {
  constexpr uint64_t kTensors = 500, kPlace = 2048;
  const Chunk chunk(tier, dram, {});
  std::vector<HbmSegment> segments;
  for (uint64_t i = 0; i < kTensors; ++i) segments.push_back(chunk.Segment(i * kPlace, kPlace - 48));
  Row("500 tensors of 2000 elements in one chunk", "AdamW",
      1e6 * Seconds(kRounds,
                    [&] { OrDie(tier->Run([&](HbmQueue& queue) { return queue.Update(chunk.spec, segments); })); }),
      "us");
}

void Reads(HbmTier* tier, const DramTier& dram) {
  const Chunk chunk(tier, dram, {});
  const Arena to = OrDie(dram.Map(kMiB));
  const HbmSegment segment = chunk.Segment(0, kChunk);
  for (const bool beside : {false, true}) {
    std::atomic<bool> stop = false;
    std::thread updates([&] {
      while (beside && !stop) {
        OrDie(tier->Run([&](HbmQueue& queue) { return queue.Update(chunk.spec, {&segment, 1}); }));
      }
    });
    std::vector<double> times_us;
    for (int i = 0; i < 2000; ++i) {
      const absl::Time begin = absl::Now();
      OrDie(tier->CopyOut(chunk.working.data(), to.bytes().subspan(0, 64 << 10)));
      times_us.push_back(absl::ToDoubleMicroseconds(absl::Now() - begin));
    }
    stop = true;
    updates.join();
    std::sort(times_us.begin(), times_us.end());
    const char* const how = beside ? "beside updates" : "alone";
    Row("read of 64 KiB, median", how, times_us[times_us.size() / 2], "us");
    Row("read of 64 KiB, 99 of 100", how, times_us[times_us.size() * 99 / 100], "us");
  }
}

int Main() {
  model::StopDeadlockSearch();
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    std::printf("SKIPPED: no GPU (%s)\n", cudaGetErrorString(error));
    return 77;
  }
  Ledger ledger({.hbm = 2048 * kMiB, .dram = 0, .nvme = 0});
  const absl::Time begin = absl::Now();
  const std::unique_ptr<HbmTier> tier = OrDie(OpenHbmTier(0, &ledger));
  Row("opening the tier, with its self-test", "", absl::ToDoubleMilliseconds(absl::Now() - begin), "ms");
  const DramTier dram(&ledger, 0);
  Link(tier.get(), dram);
  Updates(tier.get(), dram);
  SmallTensors(tier.get(), dram);
  Reads(tier.get(), dram);
  return 0;
}

}  // namespace
}  // namespace ballast::storage

int main() { return ballast::storage::Main(); }
