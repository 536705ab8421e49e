// Measures a GPU's work for a server: its link, the kernels alone, whole updates by one and by several threads, many
// small tensors, reads beside updates. Prints rows of a markdown table. Exit code 77 without a GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/proto/base/mutexes.h"
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
void OrDie(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s\n", cudaGetErrorString(error));
  std::exit(1);
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

// Copies of page-locked memory alone, in GB/s: what no update by way of the link can surpass.
struct Ceilings {
  double in = 0;           // to the GPU
  double both = 0;         // in each direction, while the other direction copies too
  double device_copy = 0;  // memory traffic of copies within the device: a byte read and a byte written count as two
};

Ceilings MeasureCeilings(HbmTier* tier, const DramTier& dram) {
  constexpr uint64_t kBytes = 128 * kMiB;
  const HbmBlock device[] = {OrDie(tier->Allocate(kBytes, "ceiling")), OrDie(tier->Allocate(kBytes, "ceiling"))};
  const Arena host[] = {OrDie(dram.Map(kBytes)), OrDie(dram.Map(kBytes))};
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) OrDie(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto in = [&] {
    OrDie(cudaMemcpyAsync(device[0].data(), host[0].bytes().data(), kBytes, cudaMemcpyHostToDevice, streams[0]));
  };
  const auto out = [&] {
    OrDie(cudaMemcpyAsync(host[1].bytes().data(), device[1].data(), kBytes, cudaMemcpyDeviceToHost, streams[1]));
  };
  const auto within = [&] {
    OrDie(cudaMemcpyAsync(device[0].data(), device[1].data(), kBytes, cudaMemcpyDeviceToDevice, streams[0]));
  };
  const auto rate = [&](const auto& queue) {
    constexpr int kTimes = 10;
    return kTimes * kBytes / 1e9 / Seconds(3, [&] {
             for (int i = 0; i < kTimes; ++i) queue();
             OrDie(cudaDeviceSynchronize());
           });
  };
  const Ceilings ceilings{.in = rate(in), .both = rate([&] { in(), out(); }), .device_copy = 2 * rate(within)};
  for (const cudaStream_t stream : streams) OrDie(cudaStreamDestroy(stream));
  Row("ceiling: copies to the GPU", "page-locked", ceilings.in, "GB/s");
  Row("ceiling: copies in both directions at once", "page-locked, each direction", ceilings.both, "GB/s");
  Row("ceiling: copies within the device", "read and written", ceilings.device_copy, "GB/s");
  return ceilings;
}

// A chunk's state in HBM, its gradient in page-locked memory. Its working copy is in HBM, or in page-locked memory.
struct Chunk {
  Chunk(HbmTier* tier, const DramTier& dram, const kernels::OptimizerSpec& s, TierKind working_on = TierKind::kHbm)
      : spec(s) {
    bytes = kChunk * sizeof(float) + kernels::MomentCount(spec) * MomentBytes();
    state = OrDie(tier->Allocate(bytes, "state"));
    const uint64_t working_bytes = kChunk * kernels::ElementBytes(spec.working);
    if (working_on == TierKind::kHbm) {
      working = OrDie(tier->Allocate(working_bytes, "working"));
    } else {
      host_working = OrDie(dram.Map(working_bytes));
    }
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
                       .working = {}};
    const uint64_t working_at = at * kernels::ElementBytes(spec.working);
    if (working.data() != nullptr) {
      segment.working.device = working.data() + working_at;
    } else {
      segment.working.host = host_working.bytes().data() + working_at;
    }
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
  Arena gradient, host_working;
};

void UpdateAll(HbmTier* tier, const Chunk& chunk, absl::Span<const HbmSegment> segments) {
  OrDie(tier->Run([&](HbmQueue& queue) { return queue.Update(chunk.spec, segments); }));
}

// Numbers from 0.001 to 1: a GPU may be faster on zeros.
std::vector<float> Numbers(uint64_t count) {
  std::vector<float> numbers(count);
  uint32_t x = 1;
  for (float& number : numbers) {
    x = x * 1664525u + 1013904223u;
    number = 0.001f + static_cast<float>(x >> 8) / static_cast<float>(1u << 24);
  }
  return numbers;
}

// The kernel without copies: on one chunk, which the cache of some GPUs holds, on 4 GB of fp32 state by turns, and on
// the same in as few launches as possible, which begin and end less often.
void Kernels(HbmTier* tier, const DramTier& dram, const Ceilings& ceilings, const char* name,
             kernels::MomentFormat format) {
  constexpr int kChunks = 336, kTurns = 4;
  const std::vector<float> numbers = Numbers(kChunk);
  std::vector<kernels::bf16> gradient(kChunk);
  for (uint64_t i = 0; i < kChunk; ++i) gradient[i] = kernels::ToBf16(numbers[i]);
  std::vector<std::unique_ptr<Chunk>> chunks;
  std::vector<HbmBlock> gradients;
  std::vector<kernels::cuda::UpdatePart> parts;
  const auto bytes = [](const auto& values) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(values[0]));
  };
  for (int i = 0; i < kChunks; ++i) {
    chunks.push_back(std::make_unique<Chunk>(tier, dram, kernels::OptimizerSpec{.moments = format}));
    gradients.push_back(OrDie(tier->Allocate(2 * kChunk, "gradient")));
    OrDie(tier->CopyIn(bytes(gradient), gradients[i].data()));
    for (uint64_t at = 0; at < chunks[i]->bytes; at += 4 * kChunk) {
      OrDie(tier->CopyIn(bytes(numbers).first(std::min(4 * kChunk, chunks[i]->bytes - at)),
                         chunks[i]->state.data() + at));
    }
    const HbmSegment segment = chunks[i]->Segment(0, kChunk);
    parts.push_back({.coefficients = segment.coefficients, .key = segment.random, .span = segment.span});
    parts[i].span.gradient = gradients[i].data();
    parts[i].span.working = segment.working.device;
  }
  const auto measure = [&](const char* how, const auto& turn) {
    const double seconds = Seconds(3,
                                   [&] {
                                     for (int i = 0; i < kTurns; ++i) turn();
                                     OrDie(cudaDeviceSynchronize());
                                   }) /
                           (kTurns * kChunks);
    const double traffic = (2.0 * chunks[0]->bytes + 4 * kChunk) / 1e9 / seconds;
    const std::string which = absl::StrCat(name, ", ", how);
    Row("AdamW, the kernel alone", which.c_str(), kChunk / 1e9 / seconds, "G elements/s");
    Row("AdamW, the kernel alone, memory traffic", which.c_str(), traffic, "GB/s");
    Row("AdamW, the kernel alone, of a device copy's traffic", which.c_str(), traffic / ceilings.device_copy, "");
  };
  const auto update = [&](absl::Span<const kernels::cuda::UpdatePart> some) {
    OrDie(kernels::cuda::Update(chunks[0]->spec, some, nullptr).status());
  };
  measure("one chunk", [&] {
    for (int i = 0; i < kChunks; ++i) update({&parts[0], 1});
  });
  measure("336 chunks by turns", [&] {
    for (const auto& part : parts) update({&part, 1});
  });
  measure("336 chunks, up to 24 a launch", [&] { update(parts); });
}

void Updates(HbmTier* tier, const DramTier& dram, const Ceilings& ceilings) {
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
                      UpdateAll(tier, chunk, {&segment, 1});
                    }),
        "G elements/s");
    Kernels(tier, dram, ceilings, name, format);
  }
}

// Updates one after the other, so many of them under way. The link's own rates bound them: 2 bytes of gradient an
// element go to the GPU, and 2 of working copy come back where that is in host memory.
void ManyChunks(HbmTier* tier, const DramTier& dram, const Ceilings& ceilings) {
  constexpr int kChunks = 32, kUpdates = 480;
  for (const TierKind working : {TierKind::kHbm, TierKind::kDram}) {
    std::vector<std::unique_ptr<Chunk>> chunks;
    for (int i = 0; i < kChunks; ++i) {
      chunks.push_back(std::make_unique<Chunk>(tier, dram, kernels::OptimizerSpec(), working));
    }
    const double ceiling = (working == TierKind::kHbm ? ceilings.in : ceilings.both) / 2;
    for (const size_t ahead : {1, 4, 8}) {
      const double seconds = Seconds(3, [&] {
        std::deque<HbmWork> begun;
        for (int i = 0; i < kUpdates; ++i) {
          const Chunk& chunk = *chunks[i % kChunks];
          const HbmSegment segment = chunk.Segment(0, kChunk);
          begun.push_back(OrDie(tier->Start([&](HbmQueue& queue) { return queue.Update(chunk.spec, {&segment, 1}); })));
          if (begun.size() < ahead) continue;
          OrDie(begun.front().Wait());
          begun.pop_front();
        }
        for (HbmWork& work : begun) OrDie(work.Wait());
      });
      const double rate = kUpdates * kChunk / 1e9 / seconds;
      const std::string how = absl::StrCat(ahead, " under way, working copies ",
                                           working == TierKind::kHbm ? "on the device" : "in page-locked memory");
      Row("AdamW of 32 chunks of 2^20", how.c_str(), rate, "G elements/s");
      Row("AdamW of 32 chunks of 2^20, of the link's ceiling", how.c_str(), rate / ceiling, "");
    }
  }
}

void SmallTensors(HbmTier* tier, const DramTier& dram) {
  constexpr uint64_t kTensors = 500, kPlace = 2048;
  const Chunk chunk(tier, dram, {});
  std::vector<HbmSegment> segments;
  for (uint64_t i = 0; i < kTensors; ++i) segments.push_back(chunk.Segment(i * kPlace, kPlace - 48));
  Row("500 tensors of 2000 elements in one chunk", "AdamW",
      1e6 * Seconds(kRounds, [&] { UpdateAll(tier, chunk, segments); }), "us");
}

void Reads(HbmTier* tier, const DramTier& dram) {
  const Chunk chunk(tier, dram, {});
  const Arena to = OrDie(dram.Map(kMiB));
  const HbmSegment segment = chunk.Segment(0, kChunk);
  for (const bool beside : {false, true}) {
    std::atomic<bool> stop = false;
    std::thread updates([&] {
      while (beside && !stop) UpdateAll(tier, chunk, {&segment, 1});
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
  Ledger ledger({.hbm = 12288 * kMiB, .dram = 0, .nvme = 0});
  const absl::Time begin = absl::Now();
  const std::unique_ptr<HbmTier> tier = OrDie(OpenHbmTier(0, &ledger));
  Row("opening the tier, with its self-test", "", absl::ToDoubleMilliseconds(absl::Now() - begin), "ms");
  const DramTier dram(&ledger, 0);
  Link(tier.get(), dram);
  const Ceilings ceilings = MeasureCeilings(tier.get(), dram);
  Updates(tier.get(), dram, ceilings);
  ManyChunks(tier.get(), dram, ceilings);
  SmallTensors(tier.get(), dram);
  Reads(tier.get(), dram);
  return 0;
}

}  // namespace
}  // namespace ballast::storage

int main() { return ballast::storage::Main(); }
