#include "ballast/services/job/step_work.h"

#include <algorithm>
#include <bit>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/copies.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::services {
namespace {

// Coefficients of one step: the same for all segments of a group that are assisted alike, and whose tensors have had
// equally many updates.
class StepCoefficients {
 public:
  // `factor`: what multiplies gradients. An update that the trainer computed is applied as it is.
  StepCoefficients(const storage::StateLayout& layout, const v1::StepHeader& header, float factor)
      : layout_(layout), header_(header), factor_(factor) {}

  const kernels::Coefficients& Get(v1::Assist assist, uint32_t group, uint64_t t) {
    const auto [entry, fresh] = cache_.try_emplace({assist, group, t});
    if (fresh) {
      const kernels::Hyper hyper = model::HyperOf(header_.groups(static_cast<int>(group)));
      const bool assisted = assist != v1::ASSIST_UNSPECIFIED;
      const storage::StateLayout& layout = assisted ? layout_.Of(storage::StateForm::kMaster) : layout_;
      entry->second =
          kernels::MakeCoefficients(layout.optimizer(), hyper, t, assist == v1::ASSIST_UPDATE ? 1.0f : factor_);
    }
    return entry->second;
  }

 private:
  const storage::StateLayout& layout_;
  const v1::StepHeader& header_;
  const float factor_;
  std::map<std::tuple<v1::Assist, uint32_t, uint64_t>, kernels::Coefficients> cache_;
};

// Does a transaction change the chunk, unless it is skipped?
bool Changes(const v1::StepHeader& header, const model::Chunk& chunk) {
  return std::any_of(chunk.segments.begin(), chunk.segments.end(), [&](const model::Segment& segment) {
    return model::HasBit(header.value_presence(), segment.tensor) ||
           (header.kind() == v1::STEP_KIND_UPDATE && model::HasBit(header.gradient_presence(), segment.tensor));
  });
}

// Values that the trainer lends.
void TakeLentValues(const LentMemory& lent, const model::Chunk& chunk, const std::string& presence, uint64_t width,
                    storage::ChunkUpdate* update) {
  for (const model::Segment& segment : chunk.segments) {
    const uint64_t at = segment.in_chunk.begin, count = segment.in_chunk.size();
    const std::byte* const from = lent.Value(chunk, segment.tensor, at);
    if (from == nullptr || !model::HasBit(presence, segment.tensor)) continue;
    storage::ChunkUpdate::Values& values = update->values.emplace_back();
    values.begin = at;
    if (lent.value_dtype(segment.tensor) == kernels::Dtype::kF32) {
      values.values = {reinterpret_cast<const float*>(from), count};
    } else {
      values.narrow = {from, count * width};
    }
  }
}

// Where values become working parameters.
void LendTo(const LentMemory& lent, const model::Chunk& chunk, storage::ChunkUpdate* update) {
  const auto lend = [&](auto& part) {
    const auto segment = std::find_if(chunk.segments.begin(), chunk.segments.end(),
                                      [&](const model::Segment& s) { return part.begin < s.in_chunk.end; });
    part.working = lent.Working(chunk, segment->tensor, part.begin);
  };
  for (storage::ChunkUpdate::Values& values : update->values) lend(values);
  for (storage::ChunkUpdate::LoggedValues& values : update->logged_values) {
    for (auto& part : values.parts) lend(part);
  }
}

// Makes a step's work chunk by chunk.
class WorkMaker {
 public:
  WorkMaker(const StepState& state, const v1::PreparedRecord& prepared, const v1::Decision& decision)
      : state_(state),
        header_(prepared.header()),
        attempt_(prepared.attempt()),
        skip_(decision.verdict().skip()),
        coefficients_(*state.layout, header_, std::bit_cast<float>(decision.verdict().factor_bits())) {
    work_.step = decision.step();
  }

  void Add(const std::shared_ptr<HeldChunk>& chunk) {
    // Its state will come as of this step or later. With all slices the update is made: by the time it runs, the state
    // may have come as of an earlier step.
    if (!chunk->filled() && !chunk->intake.Holds(header_, attempt_)) {
      work_.untouched.push_back(chunk);
      return;
    }
    // A restore leaves alone a chunk that never had a state: no pin has it. Whether a lacked chunk had one, its copy
    // tells, and the copy may have come by the time the update runs.
    const bool restore = header_.kind() == v1::STEP_KIND_RESTORE && (chunk->changed() >= 0 || !chunk->filled());
    if (!skip_ && (restore || Changes(header_, chunk->layout()))) work_.changed.push_back(chunk);
    if (*chunk->version() >= work_.step) return;  // after a restart: the disk's state is ahead of the replayed log
    storage::ChunkUpdate update;
    update.chunk = chunk->store_index;
    update.version = work_.step;
    update.random = {.seed = state_.seed,
                     .unit = chunk->layout().unit,
                     .step = static_cast<uint64_t>(work_.step),
                     .first_element = chunk->layout().range.begin};
    Intake::Buffers buffers;
    AddValues(*chunk, &update, &buffers);
    if (!skip_ && header_.kind() == v1::STEP_KIND_UPDATE) AddSegments(*chunk, &update, &buffers);
    if (restore) {
      update.restored = header_.restored_version();
      // A replay of the restore would need its pin, which may be gone by then: once all chunks are flushed, no chunk
      // needs the replay.
      update.flush = state_.logged;
    }
    const bool values = !update.values.empty() || !update.logged_values.empty();
    if (!values && update.segments.empty() && !update.restored.has_value()) {
      work_.untouched.push_back(chunk);
      return;
    }
    if (state_.has_copies && model::IsDigested(chunk->id, work_.step)) update.digests = &work_.digests.emplace_back();
    work_.touched.push_back(chunk);
    work_.updates.push_back(std::move(update));
    work_.buffers.push_back(std::move(buffers));
  }

  StepWork Take() { return std::move(work_); }

 private:
  void AddValues(const HeldChunk& chunk, storage::ChunkUpdate* update, Intake::Buffers* buffers) {
    if (!skip_) chunk.intake.TakeValues(header_.value_presence(), attempt_, update, buffers);
    if (state_.lent != nullptr && !skip_ && chunk.intake.lent(v1::SLICE_KIND_VALUE)) {
      TakeLentValues(*state_.lent, chunk.layout(), header_.value_presence(), state_.layout->working_element_bytes(),
                     update);
    }
    update->values_of = static_cast<storage::StateArray>(header_.value_array());
    if (state_.lent != nullptr && header_.value_array() == 0) LendTo(*state_.lent, chunk.layout(), update);
  }

  void AddSegments(const HeldChunk& chunk, storage::ChunkUpdate* update, Intake::Buffers* buffers) {
    const LentMemory* const lent = state_.lent;
    const bool lends = lent != nullptr && chunk.intake.lent(v1::SLICE_KIND_GRADIENT);
    for (const model::Segment& segment : chunk.layout().segments) {
      if (!model::HasBit(header_.gradient_presence(), segment.tensor)) continue;
      const uint64_t at = segment.in_chunk.begin;
      storage::ChunkUpdate::SegmentUpdate& part = update->segments.emplace_back(storage::ChunkUpdate::SegmentUpdate{
          at, segment.in_chunk.end,
          coefficients_.Get(chunk.layout().assist, segment.group, state_.tensor_steps[segment.tensor])});
      if (lends) part.gradient = lent->Gradient(chunk.layout(), segment.tensor, at);
      if (lent != nullptr) part.working = lent->Working(chunk.layout(), segment.tensor, at);
    }
    if (!update->segments.empty() && !lends) chunk.intake.TakeGradient(update, buffers);
  }

  const StepState& state_;
  const v1::StepHeader& header_;
  const uint64_t attempt_;
  const bool skip_;
  StepCoefficients coefficients_;
  StepWork work_;
};

}  // namespace

StepWork WorkOf(const StepState& state, const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  WorkMaker maker(state, prepared, decision);
  for (const std::shared_ptr<HeldChunk>& chunk : state.chunks) maker.Add(chunk);
  return maker.Take();
}

PassedOverUpdates PassOverOthers(StepWork* work) {
  const auto runs = [&](size_t i) { return work->touched[i]->filled() && *work->touched[i]->version() < work->step; };
  PassedOverUpdates passed;
  size_t kept = 0;
  for (size_t i = 0; i < work->updates.size(); ++i) {
    if (runs(i)) {
      if (kept != i) {
        work->updates[kept] = std::move(work->updates[i]);
        work->touched[kept] = std::move(work->touched[i]);
        work->buffers[kept] = std::move(work->buffers[i]);
      }
      ++kept;
      continue;
    }
    work->touched[i]->PassOverUpdate(work->step);
    passed.buffers += work->buffers[i].size();
    passed.chunks.push_back(std::move(work->touched[i]));
  }
  work->updates.resize(kept);
  work->touched.resize(kept);
  work->buffers.resize(kept);
  return passed;
}

size_t PutLeasedLast(StepWork* work, size_t first) {
  std::vector<size_t> order, leased;
  for (size_t i = first; i < work->updates.size(); ++i) {
    (work->touched[i]->leases.held() == 0 ? order : leased).push_back(i);
  }
  const size_t free = order.size();
  if (leased.empty()) return free;
  order.insert(order.end(), leased.begin(), leased.end());
  const auto reorder = [&](auto& items) {
    std::remove_reference_t<decltype(items)> ordered;
    for (const size_t i : order) ordered.push_back(std::move(items[i]));
    std::move(ordered.begin(), ordered.end(), items.begin() + static_cast<std::ptrdiff_t>(first));
  };
  reorder(work->updates);
  reorder(work->touched);
  reorder(work->buffers);
  return free;
}

uint64_t Commit(const StepWork& work, absl::Span<const std::shared_ptr<HeldChunk>> chunks, bool release_idle) {
  for (const auto& chunk : work.changed) chunk->SetChanged(work.step);
  for (const auto& chunk : work.touched) chunk->AwaitUpdate();
  for (const auto& chunk : chunks) {
    chunk->intake.Clear();
    if (release_idle) chunk->intake.ReleaseIdle();
  }
  uint64_t buffers = 0;
  for (const Intake::Buffers& of_update : work.buffers) buffers += of_update.size();
  return buffers;
}

}  // namespace ballast::services
