// One rank of a job whose gradients are given: the data path without the model. Acquires every unit forwards and
// backwards, reduce-scatters a gradient for each over the ranks, pushes it, and steps, as train_bytes_lm does. With
// --reference, the same work in one process on local arrays. Prints one JSON object.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/file_rendezvous.h"
#include "ballast/client/collective/gloo_collective.h"
#include "ballast/client/collective/gradient_tree.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/examples/local_source.h"
#include "ballast/client/examples/server_source.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

constexpr uint32_t kMicroBatches = 2;

struct Flags {
  bool reference = false;
  std::vector<std::string> servers;
  int rank = 0;
  int world_size = 2;
  std::string rendezvous;
  v1::Durability durability = v1::DURABILITY_NONE;
  int steps = 20;
  ModelShape shape{.layers = 8, .width = 512, .heads = 8};
};

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

v1::StepHeader MakeHeader() {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  for (uint32_t i = 0; i < kGroupCount; ++i) {
    v1::GroupHyper* group = header.add_groups();
    group->set_learning_rate(1e-4);
    group->set_beta1(0.9);
    group->set_beta2(0.999);
    group->set_epsilon(1e-8);
    group->set_weight_decay(0.1);
  }
  header.set_gradient_scale(1);
  header.set_max_norm(1);
  return header;
}

class PrecomputedTrainer {
 public:
  PrecomputedTrainer(ParameterSource* source, Collective* collective, uint32_t units)
      : source_(source),
        collective_(collective),
        units_(units),
        tree_(kMicroBatches, collective->rank(), collective->world_size()),
        leaves_(LeavesOf(kMicroBatches, collective->rank(), collective->world_size())) {
    uint64_t largest = 0;
    for (uint32_t unit = 0; unit < units; ++unit) {
      owned_.push_back(source->OwnedRanges(unit));
      largest = std::max(largest, source->unit_elements(unit));
    }
    for (uint64_t i = 0; i < largest; ++i) gradient_.push_back(1e-3f * static_cast<float>(i % 1009));
    sums_.resize(largest);
    parameters_.resize(largest);
  }

  absl::Status Step() {
    for (uint32_t i = 0; i < 2 * units_; ++i) {
      const uint32_t unit = i < units_ ? i : 2 * units_ - 1 - i;
      for (uint32_t ahead = i + 1; ahead < std::min(2 * units_, i + 3); ++ahead) {
        source_->Prefetch(ahead < units_ ? ahead : 2 * units_ - 1 - ahead);
      }
      BALLAST_RETURN_IF_ERROR(source_->Acquire(unit, absl::MakeSpan(parameters_).first(source_->unit_elements(unit))));
      if (i >= units_) BALLAST_RETURN_IF_ERROR(Push(unit));
    }
    return source_->FinishStep(MakeHeader(), "").status();
  }

  uint64_t reduced_bytes() const { return reduced_bytes_; }

 private:
  absl::Status Push(uint32_t unit) {
    const uint64_t elements = source_->unit_elements(unit);
    tree_.Reset(elements);
    for (uint32_t leaf = leaves_.begin; leaf < leaves_.end; ++leaf) {
      const absl::Span<float> to = tree_.NextLeaf();
      std::copy_n(gradient_.begin(), elements, to.begin());
      tree_.Add();
    }
    uint64_t own = 0;
    for (const auto& range : owned_[unit][collective_->rank()]) own += range.end - range.begin;
    BALLAST_RETURN_IF_ERROR(tree_.ReduceScatter(collective_, owned_[unit], absl::MakeSpan(sums_).first(own)));
    reduced_bytes_ += (elements - own) * sizeof(float);
    return source_->Push(unit, absl::MakeConstSpan(sums_).first(own));
  }

  ParameterSource* const source_;
  Collective* const collective_;
  const uint32_t units_;
  GradientTree tree_;
  const LeafRun leaves_;
  std::vector<std::vector<ParameterSource::Ranges>> owned_;
  std::vector<float> gradient_, sums_, parameters_;
  uint64_t reduced_bytes_ = 0;
};

absl::Status Run(const Flags& flags) {
  std::unique_ptr<Collective> collective;
  std::unique_ptr<ParameterSource> source;
  const ServerSource* on_servers = nullptr;
  if (flags.reference) {
    collective = std::move(MakeLoopbackGroup(1).front());
    BALLAST_ASSIGN_OR_RETURN(source, LocalSource::Create(flags.shape, 1, uint64_t{1} << 20));
  } else {
    TuneProgram();
    BALLAST_ASSIGN_OR_RETURN(
        const auto rendezvous,
        FileRendezvous::Join({.directory = flags.rendezvous, .rank = flags.rank, .world_size = flags.world_size}));
    BALLAST_ASSIGN_OR_RETURN(collective, MakeGloo(rendezvous.get(), flags.rank, flags.world_size, GlooOptions()));
    SessionOptions options;
    options.durability = flags.durability;
    options.job = "precomputed";
    options.group_count = kGroupCount;
    BALLAST_ASSIGN_OR_RETURN(auto session,
                             Session::Connect(options, SessionTensors(flags.shape), flags.servers, collective.get()));
    BALLAST_ASSIGN_OR_RETURN(auto server_source, ServerSource::Create(std::move(session), flags.shape, 1));
    on_servers = server_source.get();
    source = std::move(server_source);
  }
  PrecomputedTrainer trainer(source.get(), collective.get(), static_cast<uint32_t>(flags.shape.layers) + 1);
  BALLAST_RETURN_IF_ERROR(trainer.Step());  // warm-up: first touches of memory are not the data path's
  const SessionStats before = on_servers != nullptr ? on_servers->session().stats() : SessionStats{};
  const uint64_t reduced_before = trainer.reduced_bytes();
  const double cpu_before = CpuSeconds();
  const absl::Time began = absl::Now();
  for (int step = 0; step < flags.steps; ++step) BALLAST_RETURN_IF_ERROR(trainer.Step());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - began);
  const SessionStats after = on_servers != nullptr ? on_servers->session().stats() : SessionStats{};
  absl::PrintF(
      "{\"seconds\": %.6f, \"cpu_seconds\": %.6f, \"pulled_bytes\": %d, \"pushed_bytes\": %d, \"gathered_bytes\": %d, "
      "\"reduced_bytes\": %d}\n",
      seconds, CpuSeconds() - cpu_before, after.pulled_bytes - before.pulled_bytes,
      after.pushed_bytes - before.pushed_bytes, after.gathered_bytes - before.gathered_bytes,
      on_servers != nullptr ? trainer.reduced_bytes() - reduced_before : 0);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("One rank of a job with given gradients, for step_bench.");
  app.add_flag("--reference", flags.reference);
  app.add_option("--servers", flags.servers)->delimiter(',');
  app.add_option("--rank", flags.rank);
  app.add_option("--world-size", flags.world_size);
  app.add_option("--rendezvous", flags.rendezvous);
  app.add_option("--durability", flags.durability)
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, v1::Durability>{{"none", v1::DURABILITY_NONE}, {"step", v1::DURABILITY_STEP}}));
  app.add_option("--steps", flags.steps);
  app.add_option("--layers", flags.shape.layers);
  app.add_option("--width", flags.shape.width);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Run(flags);
  if (status.ok()) return 0;
  absl::FPrintF(stderr, "precomputed_trainer: rank %d: %s\n", flags.rank, status.message());
  return 1;
}

}  // namespace
}  // namespace ballast::client

int main(int argc, char** argv) { return ballast::client::Main(argc, argv); }
