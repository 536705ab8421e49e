#include "ballast/services/space/space_need.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/table.h"
#include "ballast/services/job_state/state_form.h"
#include "ballast/services/journal/earlier_extents.h"
#include "ballast/services/journal/log_length.h"
#include "ballast/services/journal/log_records.h"

namespace ballast::services {
namespace {

// Buffers for logged values of frozen chunks: on their way in, and one that they are read back to.
constexpr uint64_t kValueBuffers = 5;

// Bytes held by a store that is not in use yet, and by the memory for its slices.
storage::TierBytes TakenBy(const SpaceState& state) {
  storage::TierBytes taken;
  const storage::ChunkStore::Residency residency = state.store->residency();
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    taken[kind] = residency.state[kind] + residency.working[kind];
  }
  taken.dram += state.memory->reserved_bytes();
  return taken;
}

// Does the plan lay out the job's chunks as they are, and give them all to this server? A table may give some to
// others.
absl::Status CheckContinues(const SpaceState& state, const model::EpochPlan& plan, const std::vector<uint64_t>& mine) {
  if (state.plan == nullptr) return absl::OkStatus();
  const auto& chunks = plan.layout().chunks();
  if (plan.open().has_table() && &chunks == &state.plan->layout().chunks()) return absl::OkStatus();  // one layout
  const std::vector<uint64_t> held = ChunksOf(*state.plan, state.server_id);
  const bool continues = std::all_of(held.begin(), held.end(), [&](uint64_t id) {
    if (!plan.open().has_table() && !std::binary_search(mine.begin(), mine.end(), id)) return false;
    const model::Chunk& was = state.plan->layout().chunks()[id];
    return id < chunks.size() && was.unit == chunks[id].unit && was.range == chunks[id].range;
  });
  if (continues) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadSpec,
      absl::StrCat("job '", state.job, "' already has chunks on server '", state.server_id,
                   "', and this Open would lay them out differently: it has other members, weights, chunk size or "
                   "tensors; take them from GetJob and only append, or drop the job"));
}

// A log that has become longer stays as long beside further chunks.
uint64_t LogSteps(const SpaceState& state) {
  const uint64_t first = FirstLogSteps(state.log_steps);
  // A log of few bytes holds very many steps of them: no measure for the bytes that this Open adds.
  const uint64_t held = std::min(state.journal.steps_held.value_or(0), kLogStepsMax);
  return state.log_steps > 0 ? first : std::max(first, held);
}

// Of `mine`, the chunks that the job has.
HeldChunks HeldOf(const SpaceState& state, const std::vector<uint64_t>& mine) {
  std::vector<const std::shared_ptr<HeldChunk>*> by_id;
  for (const auto* chunks : {state.chunks.get(), &state.leaving}) {
    for (const auto& chunk : *chunks) {
      if (chunk->id >= by_id.size()) by_id.resize(chunk->id + 1, nullptr);
      if (by_id[chunk->id] == nullptr) by_id[chunk->id] = &chunk;
    }
  }
  HeldChunks held;
  held.reserve(mine.size());
  for (const uint64_t id : mine) {
    held.push_back(id < by_id.size() && by_id[id] != nullptr ? *by_id[id] : nullptr);
  }
  return held;
}

// A copy of many tensors takes as long as all the rest of an Open.
v1::JobSpec WithoutTensors(const v1::JobSpec& spec) {
  v1::JobSpec rest;
  rest.set_name(spec.name());
  rest.set_chunk_elements(spec.chunk_elements());
  rest.set_durability(spec.durability());
  rest.set_pin_interval(spec.pin_interval());
  return rest;
}

NewChunks NewOf(const SpaceState& state, const model::EpochPlan& plan, const std::vector<uint64_t>& mine,
                const HeldChunks& held) {
  NewChunks wanted{.spec = WithoutTensors(plan.open().spec()),
                   .optimizer = *model::OptimizerOf(plan.open().spec()),
                   .ids = {},
                   .elements = {},
                   .forms = {},
                   .all = {},
                   .spilt = {},
                   .snapshot_bytes = SnapshotBytesMax(plan, mine),
                   .log_steps = LogSteps(state),
                   .log_steps_max = state.log_steps > 0 ? state.log_steps : kLogStepsMax};
  for (size_t i = 0; i < mine.size(); ++i) {
    const model::Chunk& chunk = plan.layout().chunks()[mine[i]];
    const uint64_t elements = chunk.range.size();
    wanted.all.Of(chunk)->push_back(elements);
    if (held[i] == nullptr || held[i]->logged) wanted.AddSpilt(plan, mine[i]);
    if (held[i] != nullptr) continue;
    wanted.ids.push_back(mine[i]);
    wanted.elements.push_back(elements);
    wanted.forms.push_back(FormOf(chunk));
    if (chunk.frozen == v1::FROZEN_UNSPECIFIED && plan.slices_of_chunk(mine[i]).size() > 1) {
      wanted.shared_elements += elements;
    }
  }
  return wanted;
}

// Keeps the store and the journal, or has them replaced.
absl::Status ChooseStore(const SpaceState& state, SpaceNeed* need) {
  const NewChunks& wanted = need->wanted;
  // A refused Open may have left a store and a log for its own needs.
  const bool adopted = state.plan != nullptr;
  const storage::ChunkStore* const present = state.store.get();
  const uint64_t segment_bytes = state.journal.segment_bytes;
  const bool misfit = segment_bytes > 0 && !adopted && segment_bytes != wanted.journal_size(0).segment_bytes;
  const bool other =
      present != nullptr && (!(present->layout().optimizer() == wanted.optimizer) ||
                             present->durable() != wanted.durable() || present->records() != wanted.logged() || misfit);
  if (other && adopted) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec,
                        absl::StrCat("job '", state.job, "' has state for ", model::Show(present->layout().optimizer()),
                                     " on server '", state.server_id, "', and this Open is for ",
                                     model::Show(wanted.optimizer), "; take the spec from GetJob, or drop the job"));
  }
  need->replaces_store = other;
  need->makes_store = present == nullptr || other;
  need->drops_journal = other || (!adopted && state.journal.durable && !wanted.logged());
  if (other) need->freed = TakenBy(state);
  if (need->drops_journal) need->freed.nvme += state.journal.bytes;
  if (!need->drops_journal) need->journal = state.journal;
  need->has_read_back = !need->makes_store && state.read_back_bytes > 0;
  return absl::OkStatus();
}

// Spares for the missing chunks, or what the store has to add.
void Match(const SpaceState& state, SpaceNeed* need) {
  const NewChunks& wanted = need->wanted;
  need->taken.resize(wanted.elements.size());
  HeldChunks& spares = need->spares;
  if (!need->makes_store) spares = state.spares;
  auto first = spares.begin();  // all before it are taken: an Open that comes again takes its chunks in order
  for (size_t i = 0; i < wanted.elements.size(); ++i) {
    const uint64_t elements = wanted.elements[i], id = wanted.ids[i];
    while (first != spares.end() && *first == nullptr) ++first;
    // The disk knows a durable chunk by its id, so only the very same Open can take the chunk.
    const auto spare = std::find_if(first, spares.end(), [&](const auto& s) {
      return s != nullptr && s->elements == elements && s->form == wanted.forms[i] &&
             (!wanted.durable() || s->id == id);
    });
    if (spare != spares.end()) {
      need->taken[i] = std::move(*spare);
      continue;
    }
    storage::ChunkToAdd& chunk = need->missing.emplace_back(
        storage::ChunkToAdd{.elements = elements, .id = id, .durable = {}, .form = wanted.forms[i]});
    if (state.earlier == nullptr) continue;
    chunk.durable = state.earlier->FindChunk(id);
    if (wanted.durable() && !wanted.logged()) {
      const storage::StateLayout layout = LayoutOf(wanted, state.working_copies).Of(wanted.forms[i]);
      chunk.aside_bytes = state.earlier->AsideBytes(id, layout.StateBytes(elements));
    }
  }
  std::erase(spares, nullptr);
}

}  // namespace

absl::Status CheckSupported(const v1::OpenRequest& request, bool working_copies) {
  const v1::JobSpec& spec = request.spec();
  const bool known = spec.durability() == v1::DURABILITY_NONE || spec.durability() == v1::DURABILITY_STEP ||
                     spec.durability() == v1::DURABILITY_EVERY_K;
  if (known && spec.master_format() == v1::MASTER_FORMAT_REMAINDER && !working_copies) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "this server lies in its trainer's process and keeps no working copies, which a master kept as "
                        "remainder needs: keep an fp32 master, or take a server of its own");
  }
  const bool alone = !working_copies && model::MembersOf(request).size() == 1 && request.tiling().world_size() == 1;
  const bool lends = known && spec.master_format() == v1::MASTER_FORMAT_LENT;
  if (lends && (!alone || spec.durability() != v1::DURABILITY_NONE)) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "a parameter is its own master (LENT) only in a job of one rank with durability none, on the "
                        "one server in the process of that rank: keep an fp32 master on the servers");
  }
  if (known) return model::OptimizerOf(spec).status();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("durability ", v1::Durability_Name(spec.durability()),
                                   ": this version accepts DURABILITY_NONE, DURABILITY_STEP and DURABILITY_EVERY_K"));
}

absl::StatusOr<SpaceNeed> Need(const SpaceState& state, const model::EpochPlan& plan) {
  BALLAST_RETURN_IF_ERROR(CheckSupported(plan.open(), state.working_copies));
  BALLAST_RETURN_IF_ERROR(plan.FindMember(state.server_id).status());
  SpaceNeed need;
  need.mine = ChunksOf(plan, state.server_id);
  need.held = HeldOf(state, need.mine);
  need.wanted = NewOf(state, plan, need.mine, need.held);
  need.recovering = state.recovering;
  need.may_be_copied = state.recovering && plan.open().has_table();
  // Where slices are lent, they need no memory here.
  need.pushed = state.working_copies || need.wanted.logged();
  if (!state.chunks->empty()) {
    const uint64_t slice_bytes = plan.open().spec().chunk_elements() * sizeof(float);
    BALLAST_RETURN_IF_ERROR(CheckFits(state.journal, need.wanted.snapshot_bytes, slice_bytes));
  }
  BALLAST_RETURN_IF_ERROR(CheckContinues(state, plan, need.mine));
  BALLAST_RETURN_IF_ERROR(ChooseStore(state, &need));
  Match(state, &need);
  const uint32_t self = *plan.FindMember(state.server_id);
  for (storage::ChunkToAdd& chunk : need.missing) {
    const absl::Span<const uint32_t> fillers = plan.fillers_of(chunk.id);
    chunk.imported = std::find(fillers.begin(), fillers.end(), self) != fillers.end();
  }
  return need;
}

HeldChunks ChunksUnder(const SpaceNeed& need) {
  HeldChunks chunks = need.held;
  auto next = need.taken.begin();
  for (auto& chunk : chunks) {
    if (chunk == nullptr) chunk = *next++;
  }
  return chunks;
}

bool HasAll(const SpaceState& state, const model::EpochPlan& plan) {
  const v1::JobSpec& spec = plan.open().spec();
  if (state.store == nullptr || state.recovering || state.plan == nullptr) return false;
  if (state.plan->open().spec().durability() != spec.durability()) return false;
  const absl::StatusOr<kernels::OptimizerSpec> optimizer = model::OptimizerOf(spec);
  if (!optimizer.ok() || !(state.store->layout().optimizer() == *optimizer)) return false;
  const std::vector<uint64_t> mine = ChunksOf(plan, state.server_id);
  const HeldChunks& chunks = *state.chunks;
  const bool same = std::equal(mine.begin(), mine.end(), chunks.begin(), chunks.end(),
                               [](uint64_t id, const auto& chunk) { return id == chunk->id; });
  if (!same || !CheckContinues(state, plan, mine).ok()) return false;
  if (spec.durability() == v1::DURABILITY_STEP) {
    const uint64_t slice_bytes = spec.chunk_elements() * sizeof(float);
    if (!state.journal.durable || !CheckFits(state.journal, SnapshotBytesMax(plan, mine), slice_bytes).ok())
      return false;
  } else if (std::any_of(chunks.begin(), chunks.end(), [](const auto& chunk) { return chunk->logged; })) {
    return false;  // the spill holds the slices as an epoch cuts them
  }
  const uint64_t needed = SliceBytes(state.store->layout(), state.read_back_bytes, plan, chunks, state.spares);
  return needed == 0 || state.memory->reserved_bytes() >= needed;
}

storage::StateLayout LayoutOf(const NewChunks& wanted, bool working_copies) {
  return storage::StateLayout(wanted.optimizer, working_copies);
}

storage::TierBytes FreeOf(const storage::TierUsage& usage, const storage::TierBytes& returned) {
  storage::TierBytes free;
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    const uint64_t taken = usage.used[kind] - std::min(usage.used[kind], returned[kind]);
    free[kind] = usage.budget[kind] > taken ? usage.budget[kind] - taken : 0;
  }
  return free;
}

storage::PlanRequest RequestOf(const SpaceNeed& need, const storage::ChunkStore& store,
                               const storage::TierBytes& free) {
  const NewChunks& wanted = need.wanted;
  storage::PlanRequest plan{.free = free,
                            .elements = {},
                            .forms = {},
                            .layout = store.layout(),
                            .provisional_bytes_per_element = need.pushed ? SliceBytesPerElement(wanted.optimizer) : 0,
                            .staging_bytes = store.staging_bytes_missing(),
                            .flush_buffer_bytes = store.flush_buffer_bytes_missing(),
                            .placed = store.placed(),
                            .shape = need.shape};
  plan.shape.staging_bytes = store.slot_memory_bytes();
  plan.shape.durable = store.durable();
  if (store.layout().working_copies()) {
    plan.pull = store.pull_memory_missing(wanted.spec.chunk_elements(), store.present_count() + need.missing.size());
  }
  for (const storage::ChunkToAdd& chunk : need.missing) {
    plan.elements.push_back(chunk.elements);
    plan.forms.push_back(chunk.form);
    // The extent of an earlier run is taken already.
    if (chunk.durable.has_value()) plan.free.nvme += chunk.durable->bytes;
    plan.nvme_fixed_bytes += chunk.aside_bytes;
    if (!need.pushed || !storage::IsFrozen(chunk.form)) continue;
    if (wanted.logged()) {
      plan.value_buffer_bytes = kValueBuffers * LargestSlices(wanted.spec, wanted.optimizer).values_bytes;
    } else if (!chunk.durable.has_value()) {
      plan.passing_bytes += chunk.elements * sizeof(float);
    }
  }
  // A job has one set of these.
  const bool has_some = std::any_of(plan.placed.begin(), plan.placed.end(),
                                    [](const auto& chunk) { return storage::IsFrozen(chunk.form); });
  if (has_some) plan.value_buffer_bytes = 0;
  if (need.pushed) {
    plan.read_back = wanted.read_back();
    if (need.has_read_back) plan.read_back->buffer_bytes_min = plan.read_back->buffer_bytes_max = 0;
  }
  // A log under replay keeps its size.
  const uint64_t log_bytes = need.recovering ? 0 : wanted.journal_size(need.journal.segment_bytes).bytes();
  const uint64_t log_bytes_missing = log_bytes - std::min(log_bytes, need.journal.bytes);
  if (wanted.logged()) {
    plan.nvme_fixed_bytes += log_bytes_missing;
  } else if (plan.read_back.has_value()) {
    plan.read_back->spill_bytes = log_bytes_missing;
  }
  if (!wanted.durable()) return plan;
  plan.durable = true;
  plan.nvme_fixed_bytes += store.spare_bytes_missing(need.missing);
  plan.shape.logged = wanted.logged();
  if (!wanted.logged()) plan.shape.flushed_share = 1.0 / static_cast<double>(wanted.spec.pin_interval());
  return plan;
}

std::optional<JournalSize> SpillOf(const SpaceNeed& need, const model::EpochPlan& plan, const HeldChunks& chunks) {
  if (need.wanted.logged()) return std::nullopt;
  NewChunks wanted = need.wanted;
  wanted.spilt = {};
  for (const auto& chunk : chunks) {
    if (chunk->logged) wanted.AddSpilt(plan, chunk->id);
  }
  if (wanted.spilt.trained.empty() && wanted.spilt.frozen.empty()) return std::nullopt;
  return wanted.journal_size(need.journal.segment_bytes);
}

uint64_t SliceBytes(const storage::StateLayout& layout, uint64_t read_back_bytes, const model::EpochPlan& plan,
                    const HeldChunks& chunks, const HeldChunks& spares) {
  if (read_back_bytes == 0) return 0;
  const uint64_t unlogged_bytes = SliceBytesPerElement(layout.optimizer());
  uint64_t needed = read_back_bytes + LargestSlices(plan.open().spec(), layout.optimizer()).values_bytes;
  for (const auto& spare : spares) {
    if (!spare->logged && !spare->is_frozen()) needed += spare->elements * unlogged_bytes;
  }
  for (const auto& chunk : chunks) {
    if (chunk->is_frozen()) continue;
    if (!chunk->logged) {
      needed += chunk->elements * unlogged_bytes;
    } else if (plan.slices_of_chunk(chunk->id).size() > 1) {
      // Several slices share the chunk's gradient, which stays in memory.
      needed += chunk->elements * layout.gradient_element_bytes();
    }
  }
  return needed;
}

}  // namespace ballast::services
