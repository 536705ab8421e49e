// An optimizer whose state is on NVMe, for peers/deepspeed_nvme.py: it maps the trainer's gradients and parameters
// (bf16, chunk after chunk), and steps on request. Usage: nvme_step_peer --directory DIR --chunks N --gradients FILE
// --parameters FILE [--moments f32|f8] [--dram SIZE] [--staging SIZE] [--threads N]
//
// stdout says "ready" once the state is there, on NVMe but for what --dram holds of it, masters being the parameters
// found; then it answers each line of stdin in one line of JSON. "step": the gradients' norms, AdamW over all chunks,
// and every updated chunk copied into the trainer's parameters. "reset_peak": the peak resident set counts from now
// on. "resident": nothing but the answer.
#include <fcntl.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/base/mutexes.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kChunk = uint64_t{1} << 20;  // elements
constexpr uint64_t kChunkBytes = kChunk * sizeof(uint16_t);

struct Options {
  std::string directory, gradients, parameters;
  uint64_t chunks = 0;
  kernels::MomentFormat moments = kernels::MomentFormat::kF32;
  uint64_t dram_bytes = 0;  // for state, beside staging and working copies
  uint64_t staging_bytes = storage::DefaultStagingBytes(~uint64_t{0});
  int threads = 2;
  kernels::Hyper hyper = {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
};

// A file of one chunk of bf16 after another, shared with the trainer.
absl::StatusOr<absl::Span<std::byte>> MapShared(const std::string& path, uint64_t bytes) {
  const auto refused = [&path] {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kIo, absl::StrCat(path, ": ", std::strerror(errno)));
  };
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return refused();
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  const auto result = memory == MAP_FAILED ? absl::StatusOr<absl::Span<std::byte>>(refused())
                                           : absl::MakeSpan(static_cast<std::byte*>(memory), bytes);
  close(fd);
  return result;
}

// "VmHWM", the peak; "RssShmem", the shared part of what is resident now.
uint64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(field + ":", 0) == 0) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

class Peer {
 public:
  static absl::StatusOr<std::unique_ptr<Peer>> Make(const Options& options) {
    auto peer = std::unique_ptr<Peer>(new Peer(options));
    const uint64_t n = options.chunks;
    BALLAST_ASSIGN_OR_RETURN(peer->gradients_, MapShared(options.gradients, n * kChunkBytes));
    BALLAST_ASSIGN_OR_RETURN(peer->parameters_, MapShared(options.parameters, n * kChunkBytes));
    const uint64_t state_bytes = storage::StateLayout(peer->spec_).StateBytes(kChunk);
    const uint64_t in_dram = std::min(options.dram_bytes / state_bytes, n);
    BALLAST_ASSIGN_OR_RETURN(
        peer->tiers_,
        storage::Tiers::Open({.budget = {.dram = n * kChunkBytes + options.staging_bytes + (in_dram + 1) * state_bytes,
                                         .nvme = n * state_bytes},
                              .directory = options.directory,
                              .staging_bytes = options.staging_bytes}));
    peer->store_ = std::make_unique<storage::ChunkStore>(peer->tiers_.get(), peer->spec_, &peer->pool_);
    storage::Plan plan;
    plan.chunks.resize(n, {.state = storage::TierKind::kNvme, .working = storage::TierKind::kDram});
    for (uint64_t i = 0; i < in_dram; ++i) plan.chunks[i * n / in_dram].state = storage::TierKind::kDram;
    BALLAST_RETURN_IF_ERROR(peer->store_->Add(std::vector<uint64_t>(n, kChunk), plan));
    BALLAST_RETURN_IF_ERROR(peer->TakeMasters());
    return peer;
  }

  absl::Status Step() {
    BALLAST_RETURN_IF_ERROR(CheckGradients());
    const kernels::Coefficients coefficients = MakeCoefficients(spec_, options_.hyper, ++step_, 1);
    std::vector<storage::ChunkUpdate> updates(options_.chunks);
    for (uint64_t i = 0; i < updates.size(); ++i) {
      updates[i] = {.chunk = i,
                    .values = {},
                    .segments = {{.begin = 0, .end = kChunk, .coefficients = coefficients}},
                    .gradient = Part(gradients_, i),
                    .random = {.seed = 1, .unit = static_cast<uint32_t>(i), .step = step_}};
    }
    absl::Status delivered;
    BALLAST_RETURN_IF_ERROR(
        store_->Run(updates, [&](size_t i) { delivered.Update(store_->ReadWorking(i, 0, Part(parameters_, i))); }));
    return delivered;
  }

 private:
  explicit Peer(const Options& options)
      : options_(options), spec_{.moments = options.moments}, pool_(options.threads) {}

  // Computes the global norm, because every step of the peer computes the norm as well.
  absl::Status CheckGradients() {
    std::vector<kernels::NormResult> norms(options_.chunks);
    pool_.ParallelFor(norms.size(), [&](uint64_t i) {
      norms[i] = kernels::SquaredNorm(spec_.gradient, Part(gradients_, i).data(), kChunk);
    });
    for (const kernels::NormResult& norm : norms) {
      if (!norm.finite) return absl::InvalidArgumentError("the gradients are not finite");
    }
    return absl::OkStatus();
  }
  absl::Status TakeMasters() {
    std::vector<float> values(kChunk);
    for (uint64_t i = 0; i < options_.chunks; ++i) {
      kernels::ToF32(spec_.working, Part(parameters_, i).data(), absl::MakeSpan(values));
      storage::ChunkUpdate update;
      update.chunk = i;
      update.values = {{.begin = 0, .values = values}};
      BALLAST_RETURN_IF_ERROR(store_->Run({update}, [](size_t) {}));
    }
    return absl::OkStatus();
  }
  static absl::Span<std::byte> Part(absl::Span<std::byte> all, uint64_t chunk) {
    return all.subspan(chunk * kChunkBytes, kChunkBytes);
  }

  const Options options_;
  const kernels::OptimizerSpec spec_;
  kernels::ThreadPool pool_;
  absl::Span<std::byte> gradients_, parameters_;  // mapped until the process ends
  std::unique_ptr<storage::Tiers> tiers_;
  std::unique_ptr<storage::ChunkStore> store_;
  uint64_t step_ = 0;
};

absl::Status Serve(const Options& options) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<Peer> peer, Peer::Make(options));
  std::printf("ready\n");
  std::fflush(stdout);
  std::string request;
  while (std::getline(std::cin, request)) {
    const auto start = std::chrono::steady_clock::now();
    if (request == "step") {
      BALLAST_RETURN_IF_ERROR(peer->Step());
    } else if (request == "reset_peak") {
      std::ofstream("/proc/self/clear_refs") << "5";
    } else if (request != "resident") {
      return absl::InvalidArgumentError(absl::StrCat("unknown request '", request, "'"));
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("{\"seconds\": %.6f, \"peak_rss_bytes\": %lu, \"shared_bytes\": %lu}\n", seconds, StatusBytes("VmHWM"),
                StatusBytes("RssShmem"));
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Optimizer on NVMe for peers/deepspeed_nvme.py");
  app.add_option("--directory", options.directory, "For the NVMe tier's file")->required();
  app.add_option("--chunks", options.chunks, "Of 2^20 parameters")->required()->check(CLI::PositiveNumber);
  app.add_option("--gradients", options.gradients, "Shared memory of bf16")->required();
  app.add_option("--parameters", options.parameters, "Shared memory of bf16")->required();
  const std::map<std::string, kernels::MomentFormat> formats = {{"f32", kernels::MomentFormat::kF32},
                                                                {"f8", kernels::MomentFormat::kF8}};
  app.add_option("--moments", options.moments, "f32 or f8")->transform(CLI::CheckedTransformer(formats));
  app.add_option("--dram", options.dram_bytes, "For state")->transform(CLI::AsSizeValue(false));
  app.add_option("--staging", options.staging_bytes, "Of the store")->transform(CLI::AsSizeValue(false));
  app.add_option("--learning-rate", options.hyper.learning_rate, "Of AdamW");
  app.add_option("--threads", options.threads, "That compute")->check(CLI::Range(1, 1024));
  CLI11_PARSE(app, argc, argv);
  model::StopDeadlockSearch();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("nvme_step_peer", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::warn);
  const absl::Status status = Serve(options);
  if (!status.ok()) std::fprintf(stderr, "nvme_step_peer: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
