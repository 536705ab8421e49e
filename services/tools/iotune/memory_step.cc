#include "ballast/services/tools/iotune/memory_step.h"

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::services {

uint64_t PerSecond(uint64_t count, absl::Duration time) {
  return static_cast<uint64_t>(static_cast<double>(count) / std::max(absl::ToDoubleSeconds(time), 1e-9));
}

absl::StatusOr<std::unique_ptr<MemoryStep>> MemoryStep::Make(const std::string& directory,
                                                             kernels::MomentFormat moments) {
  std::unique_ptr<MemoryStep> step(new MemoryStep);
  step->spec_.moments = moments;
  const storage::StateLayout layout(step->spec_);
  const uint64_t dram = kChunks * (layout.StateBytes(kElements) + layout.WorkingBytes(kElements));
  BALLAST_ASSIGN_OR_RETURN(step->tiers_, storage::Tiers::Open({.budget = {.dram = dram}, .directory = directory}));
  BALLAST_ASSIGN_OR_RETURN(step->gradients_,
                           storage::Arena::Map(kChunks * kElements * layout.gradient_element_bytes()));
  // Small and of both signs: zeros would make every moment a denormal's neighbour.
  auto* const values = reinterpret_cast<kernels::bf16*>(step->gradients_.bytes().data());
  for (uint64_t i = 0; i < kChunks * kElements; ++i) {
    const auto hash = static_cast<uint32_t>(i * 2654435761u);
    values[i] = kernels::ToBf16((static_cast<float>(hash >> 8) / (1 << 24) - 0.5f) * 0.02f);
  }
  return step;
}

double MemoryStep::bytes_per_element() const {
  const storage::StateLayout layout(spec_);
  return static_cast<double>(2 * layout.StateBytes(kElements)) / kElements +
         static_cast<double>(layout.gradient_element_bytes() + layout.working_element_bytes());
}

absl::StatusOr<storage::ChunkStore*> MemoryStep::StoreOf(int threads) {
  if (store_ != nullptr && pool_->threads() == threads) return store_.get();
  store_.reset();
  pool_ = std::make_unique<kernels::ThreadPool>(threads);
  auto store = std::make_unique<storage::ChunkStore>(tiers_.get(), spec_, pool_.get());
  storage::Plan plan;
  plan.chunks.resize(kChunks);
  BALLAST_RETURN_IF_ERROR(store->Add(std::vector<uint64_t>(kChunks, kElements), plan));
  BALLAST_RETURN_IF_ERROR(Step(store.get()));  // from zero on, which few steps are
  store_ = std::move(store);
  return store_.get();
}

absl::Status MemoryStep::Step(storage::ChunkStore* store) {
  constexpr kernels::Hyper kHyper = {
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
  const uint64_t gradient_bytes = kElements * store->layout().gradient_element_bytes();
  const kernels::Coefficients coefficients = MakeCoefficients(spec_, kHyper, ++steps_, 1);
  std::vector<storage::ChunkUpdate> updates(kChunks);
  for (uint64_t i = 0; i < kChunks; ++i) {
    updates[i].chunk = i;
    updates[i].segments = {{.begin = 0, .end = kElements, .coefficients = coefficients}};
    updates[i].gradient = gradients_.bytes().subspan(i * gradient_bytes, gradient_bytes);
    updates[i].random = {.seed = 1, .unit = static_cast<uint32_t>(i), .step = steps_};
  }
  return store->Run(updates, [](size_t) {});
}

absl::StatusOr<uint64_t> MemoryStep::ElementsPerSecond(int threads, absl::Duration duration) {
  BALLAST_ASSIGN_OR_RETURN(storage::ChunkStore* const store, StoreOf(threads));
  uint64_t elements = 0;
  const absl::Time begin = absl::Now(), end = begin + duration;
  do {
    BALLAST_RETURN_IF_ERROR(Step(store));
    elements += kChunks * kElements;
  } while (absl::Now() < end);
  return PerSecond(elements, absl::Now() - begin);
}

uint64_t DigestBytesPerSecond(absl::Span<const std::byte> memory, int threads, absl::Duration duration) {
  constexpr uint64_t kElements = uint64_t{1} << 20;
  const storage::StateLayout layout;
  const uint64_t state_bytes = layout.StateBytes(kElements);
  kernels::ThreadPool pool(threads);
  uint64_t bytes = 0, at = 0;
  const absl::Time begin = absl::Now(), end = begin + duration;
  do {
    if (at + state_bytes > memory.size()) at = 0;
    const storage::StateView state = {&layout, const_cast<std::byte*>(memory.data()) + at, kElements};
    volatile uint32_t keep = storage::DigestState(state, {.pool = &pool, .poll = [] {}})[0];
    static_cast<void>(keep);
    at += state_bytes;
    bytes += state_bytes;
  } while (absl::Now() < end);
  return PerSecond(bytes, absl::Now() - begin);
}

}  // namespace ballast::services
