#include "ballast/client/examples/trainer.h"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

absl::Status BadOption(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

absl::Status CheckOptions(const TrainerOptions& options, const Corpus& corpus, int world_size) {
  BALLAST_RETURN_IF_ERROR(CheckShape(options.shape));
  if (!std::has_single_bit(options.micro_batches) || options.micro_batches > 4096) {
    return BadOption(
        absl::StrCat("micro-batches must be a power of two up to 4096 (gradients are summed over a binary tree), got ",
                     options.micro_batches));
  }
  if (options.micro_batches < static_cast<uint32_t>(world_size)) {
    return BadOption(absl::StrCat("each of ", world_size, " ranks needs a micro-batch, but a step has ",
                                  options.micro_batches, "; raise micro-batches"));
  }
  if (options.threads < 1 || options.threads > 256) {
    return BadOption(absl::StrCat("threads must be from 1 to 256, got ", options.threads));
  }
  if (corpus.text().size() <= static_cast<size_t>(options.shape.context)) {
    return BadOption(absl::StrCat("the text has ", corpus.text().size(), " bytes, a sequence needs ",
                                  options.shape.context + 1, "; give more text or a shorter context"));
  }
  return absl::OkStatus();
}

uint64_t* PlaceOf(TensorRole role, EmbeddingPlaces& ends, LayerPlaces& layer) {
  switch (role) {
    case TensorRole::kEmbedding:
      return &ends.embedding;
    case TensorRole::kFinalNorm:
      return &ends.final_norm;
    case TensorRole::kAttentionNorm:
      return &layer.attention_norm;
    case TensorRole::kQkv:
      return &layer.qkv;
    case TensorRole::kAttentionOut:
      return &layer.attention_out;
    case TensorRole::kMlpNorm:
      return &layer.mlp_norm;
    case TensorRole::kGateUp:
      return &layer.gate_up;
    case TensorRole::kDown:
      return &layer.down;
  }
  return nullptr;
}

}  // namespace

void StepTimes::Add(const StepTimes& other) {
  pull += other.pull;
  compute += other.compute;
  push += other.push;
  update += other.update;
  waiting += other.waiting;
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainerOptions& options, const Corpus* corpus,
                                                         ParameterSource* source, Collective* collective) {
  BALLAST_RETURN_IF_ERROR(CheckOptions(options, *corpus, collective->world_size()));
  // Its own threads would cut sums at places that depend on their number.
  openblas_set_num_threads(1);
  std::unique_ptr<Trainer> trainer(new Trainer(options, corpus, source, collective));
  BALLAST_RETURN_IF_ERROR(trainer->FindPlaces());
  trainer->PrefetchFrom(0);
  return trainer;
}

Trainer::Trainer(const TrainerOptions& options, const Corpus* corpus, ParameterSource* source, Collective* collective)
    : options_(options),
      corpus_(corpus),
      source_(source),
      collective_(collective),
      own_(LeavesOf(options.micro_batches, collective->rank(), collective->world_size())),
      corpus_digest_(corpus->Digest()),
      tree_(options.micro_batches, collective->rank(), collective->world_size()) {
  const ModelShape& shape = options.shape;
  const size_t activation = size_t(shape.tokens()) * shape.width;
  for (int i = 0; i < options.threads; ++i) {
    layers_.emplace_back(shape);
    ends_.emplace_back(shape);
  }
  micro_batches_.resize(own_.end - own_.begin);
  for (MicroBatch& micro_batch : micro_batches_) {
    micro_batch.inputs.resize(shape.tokens());
    micro_batch.targets.resize(shape.tokens());
    micro_batch.activations.assign(shape.layers + 1, std::vector<float>(activation));
    micro_batch.back.resize(activation);
    micro_batch.embedding_gradient.resize(source->unit_elements(0));
  }

  const uint32_t layers = shape.layers;
  order_.push_back(0);
  for (uint32_t i = 0; i < layers; ++i) order_.push_back(1 + i);
  order_.push_back(0);
  for (uint32_t i = layers; i > 0; --i) order_.push_back(i);
}

absl::Status Trainer::FindPlaces() {
  const uint32_t units = 1 + options_.shape.layers;
  layer_places_.resize(options_.shape.layers);
  std::vector<std::vector<std::pair<uint64_t, uint64_t>>> taken(units);
  uint32_t unit = 0;
  std::string unit_name;
  for (const ModelTensor& tensor : TensorsOf(options_.shape)) {
    if (!unit_name.empty() && tensor.unit != unit_name) ++unit;
    unit_name = tensor.unit;
    BALLAST_ASSIGN_OR_RETURN(const uint64_t begin, source_->Locate(tensor.name));
    *PlaceOf(tensor.role, embedding_places_, layer_places_[unit == 0 ? 0 : unit - 1]) = begin;
    taken[unit].emplace_back(begin, begin + tensor.elements());
  }

  uint64_t elements_max = 0;
  for (uint32_t u = 0; u < units; ++u) {
    std::sort(taken[u].begin(), taken[u].end());
    ParameterSource::Ranges& gaps = gaps_.emplace_back();
    uint64_t end = 0;
    for (const auto& [tensor_begin, tensor_end] : taken[u]) {
      if (tensor_begin > end) gaps.push_back({end, tensor_begin});
      end = tensor_end;
    }
    if (end < source_->unit_elements(u)) gaps.push_back({end, source_->unit_elements(u)});
    owned_.push_back(source_->OwnedRanges(u));
    elements_max = std::max(elements_max, source_->unit_elements(u));
  }
  weights_.resize(elements_max);
  if (options_.threads > 1) {
    for (MicroBatch& micro_batch : micro_batches_) micro_batch.leaf.resize(elements_max);
  }
  return absl::OkStatus();
}

void Trainer::ForOwnMicroBatches(absl::FunctionRef<void(size_t, size_t)> body) const {
  const size_t threads = options_.threads;
  const auto share = [&](size_t thread) {
    const LeafRun run =
        LeavesOf(static_cast<uint32_t>(micro_batches_.size()), static_cast<int>(thread), options_.threads);
    for (uint32_t i = run.begin; i < run.end; ++i) body(i, thread);
  };
  std::vector<std::thread> workers;
  for (size_t thread = 1; thread < threads; ++thread) workers.emplace_back(share, thread);
  share(0);
  for (std::thread& worker : workers) worker.join();
}

void Trainer::PrefetchFrom(size_t position) {
  // Not beyond the step: the next step's parameters do not exist yet.
  const size_t end = std::min(order_.size(), position + options_.prefetch_units);
  for (size_t i = position; i < end; ++i) source_->Prefetch(order_[i]);
}

absl::Status Trainer::AcquireNext() {
  Account(times_.compute);
  const uint32_t unit = order_[position_];
  // Before Acquire, so that the next units are on their way while this unit is waited for.
  PrefetchFrom(++position_);
  BALLAST_RETURN_IF_ERROR(source_->Acquire(unit, absl::MakeSpan(weights_).first(source_->unit_elements(unit))));
  Account(times_.pull);
  return absl::OkStatus();
}

void Trainer::SampleMicroBatches(int64_t step) {
  for (size_t i = 0; i < micro_batches_.size(); ++i) {
    const Corpus::SampleKey key{options_.seed, static_cast<uint64_t>(step), own_.begin + i};
    corpus_->Sample(key, options_.shape.context, absl::MakeSpan(micro_batches_[i].inputs),
                    absl::MakeSpan(micro_batches_[i].targets));
  }
}

absl::Status Trainer::Forward() {
  BALLAST_RETURN_IF_ERROR(AcquireNext());
  ForOwnMicroBatches([&](size_t i, size_t thread) {
    MicroBatch& m = micro_batches_[i];
    ends_[thread].Embed(weights_.data(), embedding_places_, m.inputs.data(), m.activations[0].data());
  });
  for (size_t layer = 0; layer < layer_places_.size(); ++layer) {
    BALLAST_RETURN_IF_ERROR(AcquireNext());
    ForOwnMicroBatches([&](size_t i, size_t thread) {
      MicroBatch& m = micro_batches_[i];
      layers_[thread].Forward(weights_.data(), layer_places_[layer], m.activations[layer].data(),
                              m.activations[layer + 1].data());
    });
  }
  return absl::OkStatus();
}

absl::Status Trainer::Backward() {
  BALLAST_RETURN_IF_ERROR(AcquireNext());
  ForOwnMicroBatches([&](size_t i, size_t thread) {
    MicroBatch& m = micro_batches_[i];
    m.loss = ends_[thread].LossAndBackward(weights_.data(), embedding_places_, m.activations.back().data(),
                                           m.targets.data(), m.embedding_gradient.data(), m.back.data());
  });
  for (size_t layer = layer_places_.size(); layer-- > 0;) {
    BALLAST_RETURN_IF_ERROR(AcquireNext());
    BALLAST_RETURN_IF_ERROR(
        ReduceAndPush(static_cast<uint32_t>(1 + layer), [&](size_t i, size_t thread, absl::Span<float> gradient) {
          MicroBatch& m = micro_batches_[i];
          layers_[thread].Backward(weights_.data(), layer_places_[layer], m.activations[layer].data(), m.back.data(),
                                   gradient.data(), m.back.data());
        }));
  }
  return ReduceAndPush(0, [&](size_t i, size_t thread, absl::Span<float> gradient) {
    MicroBatch& m = micro_batches_[i];
    ends_[thread].EmbedBackward(embedding_places_, m.inputs.data(), m.back.data(), m.embedding_gradient.data());
    std::copy(m.embedding_gradient.begin(), m.embedding_gradient.end(), gradient.begin());
  });
}

absl::Status Trainer::ReduceAndPush(uint32_t unit, absl::FunctionRef<void(size_t, size_t, absl::Span<float>)> write) {
  const uint64_t elements = source_->unit_elements(unit);
  const auto write_leaf = [&](size_t i, size_t thread, absl::Span<float> leaf) {
    write(i, thread, leaf);
    for (const auto& gap : gaps_[unit]) std::fill(leaf.begin() + gap.begin, leaf.begin() + gap.end, 0.0f);
  };
  tree_.Reset(elements);
  if (options_.threads > 1) {
    ForOwnMicroBatches([&](size_t i, size_t thread) {
      write_leaf(i, thread, absl::MakeSpan(micro_batches_[i].leaf).first(elements));
    });
  }
  for (size_t i = 0; i < micro_batches_.size(); ++i) {
    const absl::Span<float> leaf = tree_.NextLeaf();
    if (options_.threads > 1) {
      std::copy_n(micro_batches_[i].leaf.begin(), elements, leaf.begin());
    } else {
      write_leaf(i, 0, leaf);
    }
    tree_.Add();
  }
  Account(times_.compute);

  uint64_t own_elements = 0;
  for (const auto& range : owned_[unit][collective_->rank()]) own_elements += range.end - range.begin;
  sums_.resize(own_elements);
  BALLAST_RETURN_IF_ERROR(tree_.ReduceScatter(collective_, owned_[unit], absl::MakeSpan(sums_)));
  BALLAST_RETURN_IF_ERROR(source_->Push(unit, sums_));
  Account(times_.push);
  return absl::OkStatus();
}

absl::Status Trainer::ExchangeLosses(TrainerStep& result) {
  const int64_t signal = options_.stop_signal == nullptr ? 0 : options_.stop_signal->load();
  std::string mine(sizeof(signal) + micro_batches_.size() * sizeof(double), '\0');
  std::memcpy(mine.data(), &signal, sizeof(signal));
  for (size_t i = 0; i < micro_batches_.size(); ++i) {
    std::memcpy(mine.data() + sizeof(signal) + i * sizeof(double), &micro_batches_[i].loss, sizeof(double));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> all, collective_->Exchange(mine));

  // Ranks hold contiguous runs, so this is the order of the micro-batches for any number of ranks.
  double sum = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const LeafRun run = LeavesOf(options_.micro_batches, static_cast<int>(rank), collective_->world_size());
    const size_t expected = sizeof(int64_t) + (run.end - run.begin) * sizeof(double);
    if (all[rank].size() != expected) {
      return BadOption(absl::StrCat("rank ", rank, " sent ", all[rank].size(), " bytes of losses, expected ", expected,
                                    "; start all ranks with the same options"));
    }
    int64_t rank_signal = 0;
    std::memcpy(&rank_signal, all[rank].data(), sizeof(rank_signal));
    result.stop_signal = std::max(result.stop_signal, static_cast<int>(rank_signal));
    for (size_t at = sizeof(rank_signal); at < expected; at += sizeof(double)) {
      double loss = 0;
      std::memcpy(&loss, all[rank].data() + at, sizeof(loss));
      sum += loss;
    }
  }
  result.loss = sum / options_.micro_batches;
  return absl::OkStatus();
}

v1::StepHeader Trainer::MakeHeader(int64_t step) const {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  for (uint32_t group = 0; group < kGroupCount; ++group) {
    v1::GroupHyper& hyper = *header.add_groups();
    hyper.set_learning_rate(options_.schedule.LearningRate(static_cast<uint64_t>(step)));
    hyper.set_beta1(options_.beta1);
    hyper.set_beta2(options_.beta2);
    hyper.set_beta3(options_.beta3);
    hyper.set_alpha(options_.alpha);
    hyper.set_average(options_.average);
    hyper.set_epsilon(1e-8);
    hyper.set_weight_decay(group == kGainGroup ? 0 : options_.weight_decay);
  }
  header.set_gradient_scale(1.0 / options_.micro_batches);
  header.set_max_norm(options_.max_norm);
  return header;
}

absl::StatusOr<TrainerStep> Trainer::Step() {
  TrainerStep result;
  times_ = StepTimes();
  last_time_ = std::chrono::steady_clock::now();
  position_ = 0;
  const int64_t step = source_->version() + 1;
  SampleMicroBatches(step);
  BALLAST_RETURN_IF_ERROR(Forward());
  BALLAST_RETURN_IF_ERROR(Backward());
  BALLAST_RETURN_IF_ERROR(ExchangeLosses(result));
  Account(times_.waiting);
  BALLAST_ASSIGN_OR_RETURN(const v1::Verdict verdict, source_->FinishStep(MakeHeader(step), MakeBlob(step)));
  PrefetchFrom(0);
  Account(times_.update);
  result.version = source_->version();
  result.norm = verdict.norm();
  result.skipped = verdict.skip();
  result.times = times_;
  return result;
}

std::string Trainer::MakeBlob(int64_t step) const {
  const ModelShape& shape = options_.shape;
  return absl::StrCat("bytes_lm 1 step=", step, " seed=", options_.seed,
                      " text=", absl::Hex(corpus_digest_, absl::kZeroPad8), " micro_batches=", options_.micro_batches,
                      " sequences=", shape.sequences, " context=", shape.context);
}

int64_t Trainer::StepOf(absl::string_view blob) {
  int64_t step = 0;
  if (!absl::ConsumePrefix(&blob, "bytes_lm 1 step=")) return 0;
  return absl::SimpleAtoi(blob.substr(0, blob.find(' ')), &step) ? step : 0;
}

absl::Status Trainer::CheckBlob(const std::string& blob, int64_t version) const {
  const std::string expected = MakeBlob(version);
  if (blob == expected) return absl::OkStatus();
  return BadOption(absl::StrCat("the job's data cursor is '", blob, "', these options imply '", expected,
                                "'; resume with the options and the text that the job was started with"));
}

void Trainer::Account(double& share) {
  const auto now = std::chrono::steady_clock::now();
  share += std::chrono::duration<double>(now - last_time_).count();
  last_time_ = now;
}

}  // namespace ballast::client
