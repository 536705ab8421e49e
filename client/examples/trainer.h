// The training loop of one rank: forward and backward, layer by layer, over all of the rank's micro-batches.
//
// A step is a fixed power of two of micro-batches. Each micro-batch is computed alone, on shapes of its own. Gradients
// and losses are added in an order given by the micro-batches only. So bits depend neither on ranks nor on threads.
// Only one unit's parameters, and its gradient's partial sums, exist at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/collective/gradient_tree.h"
#include "ballast/client/examples/bytes_lm/corpus.h"
#include "ballast/client/examples/bytes_lm/model.h"
#include "ballast/client/examples/bytes_lm/schedule.h"
#include "ballast/client/examples/bytes_lm/transformer.h"
#include "ballast/client/examples/parameter_source.h"

namespace ballast::client {

struct TrainerOptions {
  ModelShape shape;
  uint32_t micro_batches = 4;  // per step, over all ranks; a power of two, at least one per rank
  uint64_t seed = 1;
  Schedule schedule;
  double weight_decay = 0.1;  // of matrices
  double beta1 = 0.9;         // SGD: the momentum
  double beta2 = 0.95;
  double beta3 = 0, alpha = 0;  // AdEMAMix: of the slow mean
  double average = 0;           // schedule-free AdamW: a step's part of the average
  double max_norm = 1.0;        // clips the gradient's global norm; 0 = never
  uint32_t prefetch_units = 2;
  int threads = 1;  // each takes a contiguous share of the rank's micro-batches
  // A signal number received by some rank, or 0. All ranks learn of the signal with the step's loss.
  const std::atomic<int>* stop_signal = nullptr;
};

// Wall seconds of a step, by the work of this rank's main thread.
struct StepTimes {
  double pull = 0;     // acquiring units
  double compute = 0;  // the model, and summing own gradients
  double push = 0;     // reducing gradients over ranks, and handing them over
  double update = 0;   // finishing the step: norm, verdict, and the part of the update that does not overlap
  double waiting = 0;  // for the other ranks, at the end of the step
  double total() const { return pull + compute + push + update + waiting; }
  void Add(const StepTimes& other);
};

struct TrainerStep {
  int64_t version = 0;
  double loss = 0;  // mean over all ranks' micro-batches, before the update
  double norm = 0;  // of the gradient, before clipping
  bool skipped = false;
  int stop_signal = 0;  // of any rank: the group stops after this step
  StepTimes times;
};

class Trainer {
 public:
  // Borrows all arguments, which must outlive the trainer. INVALID_ARGUMENT for options that do not fit each other, the
  // text, or the group.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainerOptions& options, const Corpus* corpus,
                                                         ParameterSource* source, Collective* collective);

  // COLLECTIVE. Trains step source->version() + 1.
  absl::StatusOr<TrainerStep> Step();

  // The blob sealed with each step: the sampler's state. CheckBlob: OK if `blob` is of a run which this run may
  // continue.
  std::string MakeBlob(int64_t step) const;
  absl::Status CheckBlob(const std::string& blob, int64_t version) const;
  // The step that a blob was sealed with; 0 for a blob of no step: no step was trained yet.
  static int64_t StepOf(absl::string_view blob);

 private:
  Trainer(const TrainerOptions& options, const Corpus* corpus, ParameterSource* source, Collective* collective);
  absl::Status FindPlaces();

  // Runs body(own micro-batch, thread) for all own micro-batches on all threads.
  void ForOwnMicroBatches(absl::FunctionRef<void(size_t, size_t)> body) const;
  // Acquires the next unit of order_, as fp32 in weights_, and prefetches the units that follow.
  absl::Status AcquireNext();
  void PrefetchFrom(size_t position);

  void SampleMicroBatches(int64_t step);
  absl::Status Forward();
  absl::Status Backward();
  // Sums `write(own micro-batch, thread, gradient)` over all micro-batches of all ranks and pushes the own part.
  // `write` must write every element of every tensor.
  absl::Status ReduceAndPush(uint32_t unit, absl::FunctionRef<void(size_t, size_t, absl::Span<float>)> write);
  absl::Status ExchangeLosses(TrainerStep& result);
  v1::StepHeader MakeHeader(int64_t step) const;
  // Adds the time since the last call to `share`.
  void Account(double& share);

  const TrainerOptions options_;
  const Corpus* const corpus_;
  ParameterSource* const source_;
  Collective* const collective_;
  const LeafRun own_;
  const uint32_t corpus_digest_;

  // Places of tensors, per layer, and the elements of each unit that belong to no tensor.
  EmbeddingPlaces embedding_places_;
  std::vector<LayerPlaces> layer_places_;
  std::vector<ParameterSource::Ranges> gaps_;
  std::vector<std::vector<ParameterSource::Ranges>> owned_;  // by unit, by rank

  // The units in the order in which a step acquires them, and the next one's position.
  std::vector<uint32_t> order_;
  size_t position_ = 0;

  std::vector<TransformerLayer<float>> layers_;  // one scratch per thread
  std::vector<EmbeddingEnds<float>> ends_;
  std::vector<float> weights_;  // the unit at work
  // Per own micro-batch.
  struct MicroBatch {
    std::vector<uint8_t> inputs, targets;
    std::vector<std::vector<float>> activations;  // the inputs of each layer and of the final norm
    std::vector<float> back;                      // derivative of the loss by the activation at hand
    std::vector<float> embedding_gradient;
    std::vector<float> leaf;  // with several threads only
    double loss = 0;
  };
  std::vector<MicroBatch> micro_batches_;

  GradientTree tree_;
  std::vector<float> sums_;
  StepTimes times_;
  std::chrono::steady_clock::time_point last_time_;
};

}  // namespace ballast::client
