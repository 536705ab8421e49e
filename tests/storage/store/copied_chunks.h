// A server's store, restarted at will, whose chunks are copied from another server's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/tier/test_hbm.h"
#include "gtest/gtest.h"

namespace ballast::storage {

// Whole states with the same bits?
inline bool SameState(const WholeState& a, const WholeState& b) {
  return std::equal(
      a.arrays.begin(), a.arrays.end(), b.arrays.begin(), b.arrays.end(),
      [](const auto& one, const auto& two) { return one.crc32c == two.crc32c && one.bytes == two.bytes; });
}

// A chunk of a server: where its state lies, and what it keeps.
struct CopiedChunk {
  TierKind tier = TierKind::kDram;
  StateForm form = StateForm::kFull;
  std::optional<TierKind> working = TierKind::kDram;
  bool imported = false;
};

class CopyingServer {
 public:
  using Chunks = std::vector<CopiedChunk>;
  // Several pieces, the last one short.
  static constexpr uint64_t kElements = 2 * 65536 - 3 * 256;
  static constexpr uint64_t kMiB = uint64_t{1} << 20;

  CopyingServer(const kernels::OptimizerSpec& spec, Chunks chunks, bool durable, bool gpu = true)
      : spec_(spec), chunks_(std::move(chunks)), durable_(durable), gpu_(gpu) {
    Restart();
  }

  // As after a crash: what was recorded comes back. `pinned`: extents that pins name besides.
  void Restart(absl::Span<const DurableChunk> pinned = {}) {
    store_.reset();
    tiers_.reset();
    std::vector<ExtentPlace> kept;
    for (const auto& [id, entry] : recorded_) kept.push_back({entry.offset, entry.bytes, entry.file});
    for (const DurableChunk& entry : pinned) kept.push_back({entry.offset, entry.bytes, entry.file});
    tiers_ = *Tiers::Open({.budget = {.hbm = gpu_ ? 256 * kMiB : 0, .dram = 256 * kMiB, .nvme = 256 * kMiB},
                           .directory = directory_.path(),
                           .staging_bytes = kMiB + 3 * StateLayout(spec_).StateBytes(kElements),
                           .open_hbm = TestHbm(),
                           .kept = std::move(kept)});
    std::optional<DurableOptions> options;
    if (durable_) {
      options = {.job = "job", .life = 7, .record = [this](absl::Span<const DurableChunk> entries) {
                   for (const DurableChunk& entry : entries) recorded_[entry.id] = entry;
                   return absl::OkStatus();
                 }};
    }
    store_ = std::make_unique<ChunkStore>(tiers_.get(), StateLayout(spec_), &compute_, std::move(options));
    ASSERT_EQ(Add(chunks_), absl::OkStatus());
  }

  // Further chunks, with the ids that come next.
  absl::Status Add(const Chunks& chunks, uint64_t aside_bytes = 0) {
    std::vector<ChunkToAdd> added;
    Plan plan;
    for (const CopiedChunk& chunk : chunks) {
      const uint64_t id = store_->chunk_count() + added.size();
      added.push_back({.elements = kElements,
                       .id = id,
                       .aside_bytes = aside_bytes,
                       .form = chunk.form,
                       .imported = chunk.imported});
      if (const auto entry = recorded_.find(id); entry != recorded_.end()) added.back().durable = entry->second;
      plan.chunks.push_back({.state = chunk.tier, .working = chunk.working});
    }
    const bool pulls = std::any_of(chunks.begin(), chunks.end(), [](const auto& chunk) { return !chunk.working; });
    if (pulls) plan.pull = store_->pull_memory_missing(kElements, added.size());
    return store_->Add(added, plan);
  }

  // Step 0 sets values, later ones are the optimizer's; the same for each server.
  ChunkUpdate UpdateOf(uint64_t chunk, int64_t version, std::vector<float>* values, std::vector<std::byte>* gradient) {
    std::mt19937 random(static_cast<uint32_t>(97 * chunk + static_cast<uint64_t>(version) + 1));
    values->resize(kElements);
    for (float& value : *values) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
    ChunkUpdate update;
    update.chunk = chunk;
    update.version = version;
    update.random = {.seed = 7, .unit = 3, .step = static_cast<uint64_t>(version)};
    if (version == 0 || IsFrozen(store_->placed()[chunk].form)) {
      update.values = {{0, *values}};
      return update;
    }
    gradient->resize(kernels::BytesOf(spec_.gradient, kElements));
    kernels::FromF32(*values, spec_.gradient, gradient->data());
    update.gradient = *gradient;
    const kernels::Hyper hyper{
        .learning_rate = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1};
    update.segments = {{0, kElements, kernels::MakeCoefficients(spec_, hyper, update.random.step, 0.5f)}};
    return update;
  }
  absl::Status Step(uint64_t chunk, int64_t version, bool flush = false) {
    std::vector<float> values;
    std::vector<std::byte> gradient;
    ChunkUpdate update = UpdateOf(chunk, version, &values, &gradient);
    update.flush = flush;
    return Run(update);
  }
  absl::Status Import(uint64_t chunk, const WholeState& state, int64_t version) {
    ChunkUpdate update;
    update.chunk = chunk;
    update.imported = &state;
    update.version = version;
    return Run(update);
  }
  absl::Status Run(const ChunkUpdate& update) {
    return store_->Run({&update, 1}, [](size_t) {});
  }

  WholeState Whole(uint64_t chunk) const {
    absl::StatusOr<WholeState> whole = store_->ReadWhole(chunk);
    EXPECT_EQ(whole.status(), absl::OkStatus()) << chunk;
    return whole.ok() ? *std::move(whole) : WholeState();
  }
  std::vector<std::byte> Working(uint64_t chunk) const {
    std::vector<std::byte> working(kernels::BytesOf(spec_.working, kElements));
    EXPECT_EQ(store_->ReadWorking(chunk, 0, absl::MakeSpan(working)), absl::OkStatus()) << chunk;
    return working;
  }

  ChunkStore& store() { return *store_; }
  Tiers& tiers() { return *tiers_; }
  std::map<uint64_t, DurableChunk>& recorded() { return recorded_; }  // by id
  std::string file() const { return directory_ / "nvme.tier"; }

 private:
  const kernels::OptimizerSpec spec_;
  const Chunks chunks_;
  const bool durable_, gpu_;
  ScratchDirectory directory_;
  kernels::ThreadPool compute_{2};
  std::map<uint64_t, DurableChunk> recorded_;
  std::unique_ptr<Tiers> tiers_;
  std::unique_ptr<ChunkStore> store_;
};

}  // namespace ballast::storage
