#include "ballast/client/examples/trainer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/examples/local_source.h"
#include "ballast/client/examples/master_weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunkElements = uint64_t{1} << 16;

// Awkward on purpose: tensors that leave padding behind them, a context that fills no vector.
TrainerOptions SmallOptions() {
  TrainerOptions options;
  options.shape = {.layers = 2, .width = 24, .heads = 2, .context = 20, .sequences = 2};
  options.micro_batches = 4;
  options.schedule = {.peak = 1e-2, .warmup_steps = 3, .total_steps = 100};
  return options;
}

std::string RepetitiveText() {
  std::string text;
  for (int i = 0; i < 100; ++i) absl::StrAppend(&text, "the quick brown fox jumps over the lazy dog, and ");
  return text;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  uint32_t digest = 0;
};

void ExpectEqual(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.digest, b.digest);
}

Outcome TrainAlone(const TrainerOptions& options, int steps) {
  const Corpus corpus(RepetitiveText());
  const auto source = LocalSource::Create(options.shape, options.seed, kChunkElements);
  const auto group = MakeLoopbackGroup(1);
  const auto trainer = Trainer::Create(options, &corpus, source->get(), group[0].get());
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  Outcome outcome;
  for (int i = 0; i < steps; ++i) {
    const auto step = (*trainer)->Step();
    EXPECT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(step->version, i + 1);
    outcome.losses.push_back(step->loss);
    outcome.norms.push_back(step->norm);
  }
  outcome.digest = *SaveMasterWeights(options.shape, **source, "");
  return outcome;
}

// One LocalSource behind several ranks, as servers are: each rank owns an even part of every unit.
class SharedState {
 public:
  SharedState(const TrainerOptions& options, int world_size)
      : source_(*LocalSource::Create(options.shape, options.seed, kChunkElements)), world_size_(world_size) {
    for (int unit = 0; unit <= options.shape.layers; ++unit) gradients_.emplace_back(source_->unit_elements(unit));
  }

  ParameterSource::Ranges RangesOf(uint32_t unit, int rank) const {
    const uint64_t elements = source_->unit_elements(unit);
    return {{elements * rank / world_size_, elements * (rank + 1) / world_size_}};
  }

  void Put(uint32_t unit, int rank, absl::Span<const float> part) {
    std::copy(part.begin(), part.end(), gradients_[unit].begin() + RangesOf(unit, rank)[0].begin);
  }

  // By all ranks, after all have put: one of them takes the step.
  absl::StatusOr<v1::Verdict> Finish(const v1::StepHeader& header) {
    absl::MutexLock lock(&mutex_);
    const int64_t version = source_->version();
    if (++arrived_ == world_size_) {
      for (uint32_t unit = 0; unit < gradients_.size(); ++unit) EXPECT_TRUE(source_->Push(unit, gradients_[unit]).ok());
      verdict_ = *source_->FinishStep(header, "");
      arrived_ = 0;
    } else {
      const auto finished = [&] { return source_->version() > version; };
      mutex_.Await(absl::Condition(&finished));
    }
    return verdict_;
  }

  LocalSource& source() { return *source_; }
  int world_size() const { return world_size_; }

 private:
  std::unique_ptr<LocalSource> source_;
  const int world_size_;
  std::vector<std::vector<float>> gradients_;
  absl::Mutex mutex_;
  int arrived_ = 0;
  v1::Verdict verdict_;
};

class SharedSource : public ParameterSource {
 public:
  SharedSource(SharedState* state, int rank) : state_(state), rank_(rank) {}

  int64_t version() const override { return version_; }
  uint64_t unit_elements(uint32_t unit) const override { return state_->source().unit_elements(unit); }
  absl::StatusOr<uint64_t> Locate(const std::string& tensor) const override { return state_->source().Locate(tensor); }
  std::vector<Ranges> OwnedRanges(uint32_t unit) const override {
    std::vector<Ranges> all;
    for (int rank = 0; rank < state_->world_size(); ++rank) all.push_back(state_->RangesOf(unit, rank));
    return all;
  }
  void Prefetch(uint32_t unit) override {}
  absl::Status Acquire(uint32_t unit, absl::Span<float> parameters) override {
    return state_->source().Acquire(unit, parameters);
  }
  absl::Status Push(uint32_t unit, absl::Span<const float> gradient) override {
    state_->Put(unit, rank_, gradient);
    return absl::OkStatus();
  }
  absl::StatusOr<v1::Verdict> FinishStep(const v1::StepHeader& header, const std::string& blob) override {
    ++version_;
    return state_->Finish(header);
  }
  absl::Status ReadMaster(const std::string& tensor, absl::Span<float> to) override {
    return state_->source().ReadMaster(tensor, to);
  }

 private:
  SharedState* const state_;
  const int rank_;
  int64_t version_ = 0;
};

Outcome TrainTogether(const TrainerOptions& options, int world_size, int steps) {
  const Corpus corpus(RepetitiveText());
  SharedState state(options, world_size);
  const auto group = MakeLoopbackGroup(world_size);
  std::vector<Outcome> outcomes(world_size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      SharedSource source(&state, rank);
      const auto trainer = Trainer::Create(options, &corpus, &source, group[rank].get());
      ASSERT_TRUE(trainer.ok()) << trainer.status();
      for (int i = 0; i < steps; ++i) {
        const auto step = (*trainer)->Step();
        ASSERT_TRUE(step.ok()) << step.status();
        outcomes[rank].losses.push_back(step->loss);
        outcomes[rank].norms.push_back(step->norm);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (Outcome& outcome : outcomes) {
    outcome.digest = *SaveMasterWeights(options.shape, state.source(), "");
    ExpectEqual(outcome, outcomes[0]);
  }
  return outcomes[0];
}

TEST(TrainerTest, BitsDoNotDependOnThreads) {
  TrainerOptions options = SmallOptions();
  const Outcome expected = TrainAlone(options, 5);
  for (const int threads : {2, 3, 4, 7}) {
    SCOPED_TRACE(threads);
    options.threads = threads;
    ExpectEqual(TrainAlone(options, 5), expected);
  }
}

TEST(TrainerTest, BitsDoNotDependOnRanks) {
  const TrainerOptions options = SmallOptions();
  const Outcome expected = TrainAlone(options, 5);
  for (const int world_size : {1, 2, 3, 4}) {
    SCOPED_TRACE(world_size);
    ExpectEqual(TrainTogether(options, world_size, 5), expected);
  }
}

TEST(TrainerTest, BitsDependOnTheSeed) {
  TrainerOptions options = SmallOptions();
  const Outcome first = TrainAlone(options, 2);
  options.seed = 2;
  EXPECT_NE(TrainAlone(options, 2).digest, first.digest);
}

TEST(TrainerTest, LossFallsBelowTheUnigramEntropy) {
  const Outcome outcome = TrainAlone(SmallOptions(), 60);
  const double entropy = Corpus(RepetitiveText()).UnigramEntropy();
  EXPECT_GT(outcome.losses.front(), entropy);
  EXPECT_LT(outcome.losses.back(), 0.7 * entropy);
  // A byte at random is where training starts.
  EXPECT_NEAR(outcome.losses.front(), std::log(256.0), 0.5);
}

TEST(TrainerTest, ASignalIsReportedWithTheStep) {
  const Corpus corpus(RepetitiveText());
  TrainerOptions options = SmallOptions();
  std::atomic<int> signal{0};
  options.stop_signal = &signal;
  const auto source = LocalSource::Create(options.shape, 1, kChunkElements);
  const auto group = MakeLoopbackGroup(1);
  const auto trainer = Trainer::Create(options, &corpus, source->get(), group[0].get());
  EXPECT_EQ((*trainer)->Step()->stop_signal, 0);
  signal = 15;
  EXPECT_EQ((*trainer)->Step()->stop_signal, 15);
}

TEST(TrainerTest, AnotherRunsBlobIsRefused) {
  const Corpus corpus(RepetitiveText());
  TrainerOptions options = SmallOptions();
  const auto source = LocalSource::Create(options.shape, 1, kChunkElements);
  const auto group = MakeLoopbackGroup(1);
  const auto trainer = Trainer::Create(options, &corpus, source->get(), group[0].get());
  const std::string blob = (*trainer)->MakeBlob(7);
  EXPECT_TRUE((*trainer)->CheckBlob(blob, 7).ok());
  EXPECT_THAT((*trainer)->CheckBlob(blob, 8).message(), HasSubstr("step=8"));
  options.seed = 9;
  const auto other = Trainer::Create(options, &corpus, source->get(), group[0].get());
  EXPECT_THAT((*other)->CheckBlob(blob, 7).message(), HasSubstr("resume with the options"));
}

TEST(TrainerTest, BadOptionsAreNamed) {
  const Corpus corpus("short text");
  TrainerOptions options = SmallOptions();
  const auto source = LocalSource::Create(options.shape, 1, kChunkElements);
  const auto group = MakeLoopbackGroup(1);
  EXPECT_THAT(Trainer::Create(options, &corpus, source->get(), group[0].get()).status().message(),
              HasSubstr("the text has 10 bytes, a sequence needs 21"));
  const Corpus enough(RepetitiveText());
  options.micro_batches = 6;
  EXPECT_THAT(Trainer::Create(options, &enough, source->get(), group[0].get()).status().message(),
              HasSubstr("must be a power of two"));
  options.micro_batches = 4;
  const auto large = MakeLoopbackGroup(8);
  EXPECT_THAT(Trainer::Create(options, &enough, source->get(), large[0].get()).status().message(),
              HasSubstr("each of 8 ranks needs a micro-batch"));
}

}  // namespace
}  // namespace ballast::client
