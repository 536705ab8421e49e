#include "ballast/tests/sim_server/reference.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/tests/sim_server/bits.h"

namespace ballast::sim {
namespace {

// Key for rounding the values written from element `at` of a chunk on.
kernels::RandomKey Key(const model::EpochPlan& plan, const model::Chunk& layout, int64_t step, uint64_t at) {
  return {.seed = plan.open().spec().seed(),
          .unit = layout.unit,
          .step = static_cast<uint64_t>(step),
          .first_element = layout.range.begin + at};
}

}  // namespace

Reference::Reference() : optimizer_(*model::OptimizerOf(OpenTemplate(1).spec())) {
  const model::Layout& layout = PlanOf(1).layout();
  tensor_steps_.assign(layout.tensors().size(), 0);
  for (const model::Chunk& chunk : layout.chunks()) {
    const uint64_t n = chunk.range.size();
    Chunk& added = chunks_.emplace_back();
    added.master.resize(n);
    for (int i = 0; i < kernels::MomentCount(optimizer_); ++i) {
      added.moments.emplace_back(kernels::MomentBytes(optimizer_.moments, n));
      added.scales.emplace_back(kernels::MomentScaleBytes(optimizer_.moments, n) / sizeof(float));
    }
  }
}

void Reference::Decided(const v1::Decision& decision, const GroupIntent& author) {
  if (decision.step() <= last_step_) return;
  last_step_ = decision.step();
  const bool skip = decision.verdict().skip();
  const v1::StepHeader header = author.Header(decision.step(), 0);
  for (uint32_t tensor = 0; tensor < tensor_steps_.size() && !skip; ++tensor) {
    if (model::HasBit(header.gradient_presence(), tensor)) ++tensor_steps_[tensor];
    if (header.value_tensor_steps_size() > 0 && model::HasBit(header.value_presence(), tensor)) {
      tensor_steps_[tensor] = header.value_tensor_steps(static_cast<int>(tensor));
    }
  }
  if (header.value_array() != 0) ++moments_written_;
  const bool restores = header.kind() == v1::STEP_KIND_RESTORE;
  if (restores) tensor_steps_ = tensor_steps_at_.at(header.restored_version());
  tensor_steps_at_[decision.step()] = tensor_steps_;
  for (const model::Chunk& layout : PlanOf(author.world_size).layout().chunks()) {
    Chunk* const chunk = &chunks_[layout.index];
    bool changed = decision.step() == 0 || restores;
    if (restores) Restore(header.restored_version(), chunk);
    if (!skip) {
      if (ApplyValues(decision, author, header, layout, chunk)) changed = true;
      if (Update(decision, author, header, layout, chunk)) changed = true;
    }
    if (changed) Take(decision.step(), chunk);
  }
}

void Reference::Restore(int64_t version, Chunk* chunk) {
  const Chunk::State& state = std::prev(chunk->states.upper_bound(version))->second;
  chunk->master = state.master;
  chunk->moments = state.moments;
  chunk->scales = state.scales;
}

bool Reference::ApplyValues(const v1::Decision& decision, const GroupIntent& author, const v1::StepHeader& header,
                            const model::Chunk& layout, Chunk* chunk) const {
  const model::EpochPlan& plan = PlanOf(author.world_size);
  std::vector<float> given(layout.range.size());
  for (const uint32_t index : plan.slices_of_chunk(layout.index)) {
    const model::Slice& slice = plan.slices()[index];
    if (!plan.Touches(slice, header.value_presence())) continue;
    const Payload payload =
        PayloadOf(author.Digest(decision.step(), decision.attempt(), v1::SLICE_KIND_VALUE, slice, 0));
    std::memcpy(given.data() + (slice.range.begin - layout.range.begin), payload->data(), payload->size());
  }
  bool changed = false;
  for (const model::Segment& segment : layout.segments) {
    if (!model::HasBit(header.value_presence(), segment.tensor)) continue;
    const uint64_t at = segment.in_chunk.begin;
    const auto values = absl::MakeConstSpan(given).subspan(at, segment.in_chunk.size());
    if (header.value_array() == 0) {
      std::copy(values.begin(), values.end(), chunk->master.begin() + static_cast<ptrdiff_t>(at));
    } else {
      const size_t k = header.value_array() - 1;
      kernels::WriteMoment(optimizer_, static_cast<int>(k), Key(plan, layout, decision.step(), at), values,
                           Moment(k, at, chunk));
    }
    changed = true;
  }
  return changed;
}

kernels::MomentSpan Reference::Moment(size_t k, uint64_t at, Chunk* chunk) const {
  return {chunk->moments[k].data() + kernels::MomentBytes(optimizer_.moments, at),
          chunk->scales[k].data() + at / kernels::kMomentBlock};
}

bool Reference::Update(const v1::Decision& decision, const GroupIntent& author, const v1::StepHeader& header,
                       const model::Chunk& layout, Chunk* chunk) const {
  const model::EpochPlan& plan = PlanOf(author.world_size);
  std::vector<std::byte> gradient;
  for (const model::Segment& segment : layout.segments) {
    if (!model::HasBit(header.gradient_presence(), segment.tensor)) continue;
    if (gradient.empty()) {
      gradient.resize(2 * layout.range.size());
      for (const uint32_t index : plan.slices_of_chunk(layout.index)) {
        const model::Slice& slice = plan.slices()[index];
        const Payload payload =
            PayloadOf(author.Digest(decision.step(), decision.attempt(), v1::SLICE_KIND_GRADIENT, slice, 0));
        std::memcpy(gradient.data() + 2 * (slice.range.begin - layout.range.begin), payload->data(), payload->size());
      }
    }
    const uint64_t at = segment.in_chunk.begin;
    std::vector<std::byte> working(2 * segment.in_chunk.size());
    kernels::UpdateSpan span{.n = segment.in_chunk.size(),
                             .gradient = gradient.data() + 2 * at,
                             .master = chunk->master.data() + at,
                             .moments = {},
                             .working = working.data()};
    for (size_t k = 0; k < chunk->moments.size(); ++k) span.moments[k] = Moment(k, at, chunk);
    const auto group = static_cast<int>(segment.group);
    kernels::Update(
        optimizer_,
        kernels::MakeCoefficients(optimizer_, model::HyperOf(header.groups(group)), tensor_steps_[segment.tensor],
                                  std::bit_cast<float>(decision.verdict().factor_bits())),
        Key(plan, layout, decision.step(), at), span);
  }
  return !gradient.empty();
}

void Reference::Take(int64_t step, Chunk* chunk) const {
  const uint64_t n = chunk->master.size();
  const auto bytes = [](const std::vector<float>& values) {
    const auto* begin = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(begin, begin + values.size() * sizeof(float));
  };
  Snapshot& snapshot = chunk->versions[step];
  snapshot[v1::CONTENT_MASTER] = bytes(chunk->master);
  snapshot[v1::CONTENT_WORKING].resize(2 * n);
  kernels::FromF32(chunk->master, kernels::Dtype::kBf16, snapshot[v1::CONTENT_WORKING].data());
  for (size_t k = 0; k < chunk->moments.size(); ++k) {
    std::vector<float> values(n);
    kernels::ReadMoment(optimizer_, static_cast<int>(k), {chunk->moments[k].data(), chunk->scales[k].data()},
                        absl::MakeSpan(values));
    snapshot[v1::CONTENT_MOMENT1 + static_cast<int>(k)] = bytes(values);
  }
  chunk->states[step] = {chunk->master, chunk->moments, chunk->scales};
  // Nobody looks further back than a few steps.
  while (chunk->versions.size() > 4) chunk->versions.erase(chunk->versions.begin());
}

int64_t Reference::ChangedAt(int64_t version, uint64_t chunk) const {
  const auto after = chunks_[chunk].versions.upper_bound(version);
  return after == chunks_[chunk].versions.begin() ? -1 : std::prev(after)->first;
}

absl::Span<const std::byte> Reference::Bits(int64_t version, uint64_t chunk, v1::Content content) const {
  const auto& versions = chunks_[chunk].versions;
  auto after = versions.upper_bound(version);
  if (after == versions.begin()) return {};
  return std::prev(after)->second.at(content);
}

}  // namespace ballast::sim
