#include "ballast/services/work/space.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/durability/log_length.h"
#include "ballast/services/records/frozen.h"
#include "ballast/services/records/job_entry.h"
#include "ballast/services/records/log_records.h"

namespace ballast::services {

absl::Status Space::CheckSupported(const v1::OpenRequest& request, bool working_copies) {
  const v1::JobSpec& spec = request.spec();
  const bool known = spec.durability() == v1::DURABILITY_NONE || spec.durability() == v1::DURABILITY_STEP ||
                     spec.durability() == v1::DURABILITY_EVERY_K;
  if (known && spec.master_format() == v1::MASTER_FORMAT_REMAINDER && !working_copies) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "this server lies in its trainer's process and keeps no working copies, which a master kept as "
                        "remainder needs: keep an fp32 master, or take a server of its own");
  }
  const bool alone = !working_copies && request.members_size() == 1 && request.tiling().world_size() == 1;
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

absl::Status Space::CheckContinues(const model::EpochPlan& plan, const std::vector<uint64_t>& mine,
                                   const Chunks& chunks) const {
  bool continues = chunks.size() <= mine.size();
  for (size_t i = 0; continues && i < chunks.size(); ++i) {
    const model::Chunk& chunk = plan.layout().chunks()[mine[i]];
    const model::Chunk& held = chunks[i]->layout;
    continues = held.index == mine[i] && held.unit == chunk.unit && held.range == chunk.range;
  }
  if (continues) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadSpec,
      absl::StrCat("job '", core_->name, "' already has chunks on server '", core_->around.server_id,
                   "', and this Open would lay them out differently: it has other members, weights, chunk size or "
                   "tensors; take them from GetJob and only append, or drop the job"));
}

NewChunks Space::NewOf(const model::EpochPlan& plan, const std::vector<uint64_t>& mine, const Chunks& held,
                       bool dry_run) const {
  NewChunks wanted{.spec = plan.open().spec(),
                   .optimizer = *model::OptimizerOf(plan.open().spec()),
                   .ids = {},
                   .elements = {},
                   .frozen = {},
                   .all = {},
                   .spilt = {},
                   .snapshot_bytes = SnapshotBytesMax(plan, mine),
                   .log_steps = LogSteps(),
                   .log_steps_max = core_->around.log_steps > 0 ? core_->around.log_steps : kLogStepsMax,
                   .dry_run = dry_run};
  for (size_t i = 0; i < mine.size(); ++i) {
    const model::Chunk& chunk = plan.layout().chunks()[mine[i]];
    const uint64_t elements = chunk.range.size();
    wanted.all.Of(chunk)->push_back(elements);
    if (i >= held.size() || held[i]->logged) wanted.AddSpilt(plan, mine[i]);
    if (i < held.size()) continue;
    wanted.ids.push_back(mine[i]);
    wanted.elements.push_back(elements);
    wanted.frozen.push_back(FrozenOf(chunk.frozen));
    if (chunk.frozen == v1::FROZEN_UNSPECIFIED && plan.slices_of_chunk(mine[i]).size() > 1) {
      wanted.shared_elements += elements;
    }
  }
  return wanted;
}

uint64_t Space::LogSteps() const {
  const uint64_t first = FirstLogSteps(core_->around.log_steps);
  JobMutexLock lock(&core_->mu);
  // A log of few bytes holds very many steps of them: no measure for the bytes that this Open adds.
  const uint64_t held = std::min(journal_->StepsHeld().value_or(0), kLogStepsMax);
  return core_->around.log_steps > 0 ? first : std::max(first, held);
}

absl::StatusOr<Space::Chunks> Space::Take(const model::EpochPlan& plan, v1::OpenResponse* answer) {
  const v1::JobSpec& spec = plan.open().spec();
  BALLAST_RETURN_IF_ERROR(CheckSupported(plan.open(), core_->around.working_copies));
  BALLAST_RETURN_IF_ERROR(plan.FindMember(core_->around.server_id).status());
  const std::vector<uint64_t> mine = ChunksOf(plan, core_->around.server_id);
  Chunks chunks;
  {
    JobMutexLock lock(&core_->mu);
    BALLAST_RETURN_IF_ERROR(core_->Refusal());
    chunks = core_->chunks;
  }
  NewChunks wanted = NewOf(plan, mine, chunks, /*dry_run=*/answer != nullptr);
  if (!chunks.empty()) {
    JobMutexLock lock(&core_->mu);
    BALLAST_RETURN_IF_ERROR(journal_->CheckFits(wanted.snapshot_bytes, spec.chunk_elements() * sizeof(float)));
  }
  BALLAST_RETURN_IF_ERROR(CheckContinues(plan, mine, chunks));
  if (answer != nullptr) wanted.retiled = RetiledBy(plan, chunks, wanted);
  absl::Status status = Add(wanted, &chunks, answer);
  if (status.ok() && answer == nullptr) {
    const std::optional<JournalSize> size = SpillFor(plan, chunks, std::move(wanted));
    if (size.has_value()) status = GrowJournal(*size, /*logged=*/false);
  }
  if (status.ok() && answer == nullptr) {
    uint64_t needed_bytes = 0;
    {
      JobMutexLock lock(&core_->mu);
      needed_bytes = slices_.NeededBytes(plan, chunks, spares_);
    }
    status = slices_.Reserve(needed_bytes);
  }
  if (status.ok()) return chunks;
  if (!absl::IsResourceExhausted(status)) return status;
  return model::Annotate(status, absl::StrCat("job '", plan.open().spec().name(), "' does not fit on server '",
                                              core_->around.server_id, "'"));
}

absl::StatusOr<v1::OpenResponse> Space::Try(const model::EpochPlan& plan) {
  v1::OpenResponse answer;
  BALLAST_RETURN_IF_ERROR(Take(plan, &answer).status());
  return answer;
}

bool Space::ReadsStore(const model::EpochPlan& plan) const {
  return core_->store != nullptr && ChunksOf(plan, core_->around.server_id).size() > core_->chunks.size();
}

std::optional<Space::Chunks> Space::AllHeld(const model::EpochPlan& plan) const {
  const v1::JobSpec& spec = plan.open().spec();
  if (core_->plan == nullptr || core_->store == nullptr || core_->recovering || !core_->Refusal().ok() ||
      spec.durability() != core_->plan->open().spec().durability()) {
    return std::nullopt;
  }
  const absl::StatusOr<kernels::OptimizerSpec> optimizer = model::OptimizerOf(spec);
  if (!optimizer.ok() || !(core_->store->layout().optimizer() == *optimizer)) return std::nullopt;
  const std::vector<uint64_t> mine = ChunksOf(plan, core_->around.server_id);
  const Chunks& chunks = core_->chunks;
  if (mine.size() != chunks.size() || !CheckContinues(plan, mine, chunks).ok()) return std::nullopt;
  if (spec.durability() == v1::DURABILITY_STEP) {
    const uint64_t slice_bytes = spec.chunk_elements() * sizeof(float);
    if (!core_->recoverable || !journal_->CheckFits(SnapshotBytesMax(plan, mine), slice_bytes).ok()) {
      return std::nullopt;
    }
  } else if (std::any_of(chunks.begin(), chunks.end(), [](const auto& chunk) { return chunk->logged; })) {
    return std::nullopt;  // the spill holds the slices as an epoch cuts them
  }
  const uint64_t needed_bytes = slices_.NeededBytes(plan, chunks, spares_);
  if (needed_bytes > 0 && room_->memory()->reserved_bytes() < needed_bytes) return std::nullopt;
  return chunks;
}

void Space::KeepSpares(const Chunks& chunks) {
  for (const auto& chunk : chunks) {
    if (!chunk->version.has_value()) spares_.push_back(chunk);
  }
}

std::shared_ptr<storage::ChunkStore> Space::MakeStore(const NewChunks& wanted) const {
  std::optional<storage::DurableOptions> durable;
  if (wanted.durable()) {
    durable = storage::DurableOptions{.job = core_->name, .life = journal_->life(), .record = {}};
  }
  if (wanted.logged()) {
    durable->record = [catalog = core_->around.catalog,
                       job = core_->name](absl::Span<const storage::DurableChunk> chunks) {
      std::vector<CatalogPair> entries;
      for (const storage::DurableChunk& chunk : chunks) entries.push_back(ChunkPair(job, chunk));
      return catalog->PutAll(entries);
    };
  }
  const storage::StateLayout layout(wanted.optimizer, core_->around.working_copies);
  return std::make_shared<storage::ChunkStore>(core_->around.tiers, layout, core_->around.compute, std::move(durable),
                                               core_->around.account);
}

absl::Status Space::GrowJournal(const JournalSize& size, bool logged) {
  if (journal_->Holds(size)) return absl::OkStatus();  // waits for no plan
  const auto take = [&] {
    absl::MutexLock planning(core_->around.planning);
    return journal_->TakeBudget(size, logged);
  };
  absl::StatusOr<JobJournal::Growth> growth = take();
  if (absl::IsResourceExhausted(growth.status())) {
    // As in Place: once no chunk moves, there may be room.
    const MoveGate::KeptShut no_moves(core_->around.moving);
    growth = take();
  }
  BALLAST_RETURN_IF_ERROR(growth.status());
  return journal_->Grow(*growth);
}

// For the slices as this epoch cuts them. None: there are none to spill.
std::optional<JournalSize> Space::SpillFor(const model::EpochPlan& plan, const Chunks& chunks, NewChunks wanted) const {
  if (wanted.logged()) return std::nullopt;
  const std::vector<uint64_t> mine = ChunksOf(plan, core_->around.server_id);
  wanted.spilt = {};
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i]->logged) wanted.AddSpilt(plan, mine[i]);
  }
  if (wanted.spilt.trained.empty() && wanted.spilt.frozen.empty()) return std::nullopt;
  JobMutexLock lock(&core_->mu);
  return wanted.journal_size(journal_->segment_bytes());
}

NewChunks::Retiled Space::RetiledBy(const model::EpochPlan& plan, const Chunks& held, const NewChunks& wanted) const {
  NewChunks::Retiled retiled;
  std::optional<JournalSize> size = SpillFor(plan, held, wanted);
  JobMutexLock lock(&core_->mu);
  if (AllHeld(plan).has_value()) return {};
  if (room_->memory() != nullptr) {
    const uint64_t needed = slices_.NeededBytes(plan, held, spares_);
    const uint64_t missing = needed - std::min(needed, room_->memory()->reserved_bytes());
    // Beyond the budget the job's own state and working copies make room.
    const uint64_t budget = core_->around.tiers->budget().dram, used = core_->around.tiers->used().dram;
    retiled.slice_bytes = std::min(missing, budget - std::min(budget, used));
  }
  const uint64_t segment_bytes = journal_->segment_bytes();
  // As Add does where all chunks are there.
  if (wanted.logged() && (!wanted.elements.empty() || segment_bytes == 0)) size = wanted.journal_size(segment_bytes);
  if (size.has_value()) retiled.journal_bytes = size->bytes() - std::min(size->bytes(), journal_->bytes());
  return retiled;
}

void Space::NoteLeastDram(uint64_t more) {
  least_dram_ += more;
  {
    JobMutexLock lock(&core_->mu);
    if (core_->recovering) return;  // the sum is still partial: until it is complete, the catalog's number stands
  }
  if (const absl::Status written = WriteLeastDram(core_->around.catalog, core_->name, least_dram_); !written.ok()) {
    spdlog::error(
        "job '{}' goes on until it next needs the catalog, which takes no more writes; jobs that come back before it "
        "after a restart may leave it too little DRAM: {}",
        core_->name, std::string(written.message()));
  }
}

absl::StatusOr<Space::Ground> Space::Prepare(const NewChunks& wanted) {
  Ground ground;
  JobMutexLock lock(&core_->mu);
  // A refused Open may have left a store and a log for its own needs.
  const bool adopted = core_->plan != nullptr || !core_->chunks.empty();
  const storage::ChunkStore* const present = core_->store.get();
  const uint64_t segment_bytes = journal_->segment_bytes();
  const bool misfit = segment_bytes > 0 && !adopted && segment_bytes != wanted.journal_size(0).segment_bytes;
  const bool other =
      present != nullptr && (!(present->layout().optimizer() == wanted.optimizer) ||
                             present->durable() != wanted.durable() || present->records() != wanted.logged() || misfit);
  ground.unlogged = !wanted.dry_run && !adopted && core_->recoverable && !wanted.logged();
  if (other && adopted) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadSpec,
        absl::StrCat("job '", core_->name, "' has state for ", model::Show(present->layout().optimizer()),
                     " on server '", core_->around.server_id, "', and this Open is for ", model::Show(wanted.optimizer),
                     "; take the spec from GetJob, or drop the job"));
  }
  if (other && wanted.dry_run) ground.freed = TakenBy(*present, *room_->memory());
  if (other && !wanted.dry_run) {
    // The store was made for an Open that was then refused.
    ground.old_store = std::exchange(core_->store, nullptr);
    moves_->Forget();
    ground.old_spares.swap(spares_);
  }
  if (present == nullptr || other) {
    ground.store = MakeStore(wanted);
    ground.memory = std::make_shared<SliceMemory>(core_->around.tiers, core_->around.account);
  } else {
    ground.store = core_->store;
    ground.memory = room_->memory();
    ground.spares = wanted.dry_run ? spares_ : std::exchange(spares_, {});
  }
  if (!wanted.dry_run) {
    core_->store = ground.store;
    room_->SetMemory(ground.memory);
  }
  return ground;
}

absl::Status Space::DropOld(Ground* ground) {
  ground->old_spares.clear();
  if (ground->old_store != nullptr) {
    // The catalog never recorded anything of the old store.
    least_dram_ = 0;
    ground->old_store->Discard();
    ground->old_store.reset();
    ground->unlogged = true;
  }
  if (!ground->unlogged) return absl::OkStatus();
  // The catalog's entry of the log goes first: a crash then leaves a file that the next Open makes anew.
  BALLAST_RETURN_IF_ERROR(core_->around.catalog->ErasePrefix(absl::StrCat(CatalogPrefix(core_->name), kCatalogLog)));
  return journal_->Remove();
}

Space::Addition Space::Match(const NewChunks& wanted, Ground* ground) {
  Addition add;
  add.taken.resize(wanted.elements.size());
  Chunks& spares = ground->spares;
  auto first = spares.begin();  // all before it are taken: an Open that comes again takes its chunks in order
  for (size_t i = 0; i < wanted.elements.size(); ++i) {
    const uint64_t elements = wanted.elements[i], id = wanted.ids[i];
    while (first != spares.end() && *first == nullptr) ++first;
    // The disk knows a durable chunk by its id, so only the very same Open can take the chunk.
    const auto spare = std::find_if(first, spares.end(), [&](const auto& s) {
      return s != nullptr && s->elements == elements && s->frozen == wanted.frozen[i] &&
             (!wanted.durable() || s->id == id);
    });
    if (spare != spares.end()) {
      add.taken[i] = std::move(*spare);
      continue;
    }
    add.missing.push_back(
        {.elements = elements, .id = id, .durable = earlier_->TakeChunk(id), .frozen = wanted.frozen[i]});
    if (wanted.durable() && !wanted.logged()) {
      const storage::StateLayout layout = ground->store->layout().Of(wanted.frozen[i]);
      add.missing.back().aside_bytes = earlier_->AsideBytes(id, layout.StateBytes(elements));
    }
  }
  std::erase(spares, nullptr);
  return add;
}

absl::Status Space::TakePlaces(const NewChunks& wanted, const Ground& ground, Addition* add, const storage::Plan& plan,
                               const storage::PlanRequest& request) {
  BALLAST_RETURN_IF_ERROR(ground.memory->Reserve(plan.slice_bytes));
  absl::Status status;
  add->logged = plan.reads_back;
  const bool first = request.read_back.has_value() && request.read_back->buffer_bytes_min > 0;
  if (add->logged) status = slices_.TakeReadBack(wanted, plan.slice_bytes - request.read_back->shared_bytes);
  if (status.ok()) status = ground.store->Add(add->missing, plan, [this] { return core_->Interrupted(); });
  if (status.ok()) return absl::OkStatus();
  JobMutexLock lock(&core_->mu);
  if (first) room_->SetReadBack(nullptr);
  ground.memory->Unreserve(plan.slice_bytes);
  return status;
}

absl::StatusOr<Space::PlannedPlaces> Space::PlanPlaces(const NewChunks& wanted, const Ground& ground,
                                                       const Addition& add, v1::OpenResponse* answer) {
  storage::PlanRequest request = plans_.RequestFor(wanted, *ground.store, add.missing, ground.freed);
  BALLAST_ASSIGN_OR_RETURN(storage::Plan plan, storage::MakePlan(request));
  plans_.Note(wanted, plan, request, answer);
  if (answer != nullptr && wanted.logged()) answer->set_plan(absl::StrCat(answer->plan(), " ", wanted.ExplainLog()));
  return PlannedPlaces{std::move(request), std::move(plan)};
}

absl::StatusOr<JobJournal::Growth> Space::PlanAndTake(const NewChunks& wanted, const Ground& ground, Addition* add) {
  absl::MutexLock planning(core_->around.planning);
  BALLAST_ASSIGN_OR_RETURN(const PlannedPlaces planned, PlanPlaces(wanted, ground, *add, nullptr));
  JobJournal::Growth growth;
  if (wanted.logged()) {
    uint64_t segment_bytes = 0;
    {
      JobMutexLock lock(&core_->mu);
      segment_bytes = journal_->segment_bytes();
    }
    BALLAST_ASSIGN_OR_RETURN(growth, journal_->TakeBudget(wanted.journal_size(segment_bytes), /*logged=*/true));
  }
  const absl::Status taken = TakePlaces(wanted, ground, add, planned.plan, planned.request);
  if (!taken.ok()) {
    core_->around.tiers->Return(storage::TierKind::kNvme, growth.bytes, storage::TierPart::kLog,
                                core_->around.account.get());
    return taken;
  }
  add->least_dram = storage::LeastDram(planned.request);
  return growth;
}

bool Space::ShortOfDram(const NewChunks& wanted, const Ground& ground, const Addition& add) {
  absl::MutexLock planning(core_->around.planning);
  const storage::PlanRequest request = plans_.RequestFor(wanted, *ground.store, add.missing, ground.freed);
  return storage::LeastDram(request) > request.free.dram;
}

absl::Status Space::Place(const NewChunks& wanted, const Ground& ground, Addition* add, v1::OpenResponse* answer) {
  // A dry run waits neither for another job that takes places nor for a chunk that moves.
  if (wanted.dry_run) return PlanPlaces(wanted, ground, *add, answer).status();
  absl::StatusOr<JobJournal::Growth> growth = PlanAndTake(wanted, ground, add);
  if (absl::IsResourceExhausted(growth.status())) {
    // A chunk that moves has a place in two tiers: once none moves, there may be room.
    const MoveGate::KeptShut no_moves(core_->around.moving);
    growth = PlanAndTake(wanted, ground, add);
  }
  while (absl::IsResourceExhausted(growth.status()) && ShortOfDram(wanted, ground, *add)) {
    BALLAST_ASSIGN_OR_RETURN(const bool dropped, ground.store->DropWorkingCopies());
    if (!dropped) break;
    spdlog::info("job '{}': dropped working copies, further tensors need their room", core_->name);
    growth = PlanAndTake(wanted, ground, add);
  }
  BALLAST_RETURN_IF_ERROR(growth.status());
  Hold(wanted, ground, add);
  if (wanted.durable()) NoteLeastDram(add->least_dram);
  return journal_->Grow(*growth);
}

void Space::Hold(const NewChunks& wanted, const Ground& ground, Addition* add) {
  uint64_t next = ground.store->chunk_count() - add->missing.size();
  auto added = add->missing.begin();
  for (size_t i = 0; i < add->taken.size(); ++i) {
    if (add->taken[i] != nullptr) continue;
    add->taken[i] =
        std::make_shared<HeldChunk>(ground.memory, next++, wanted.ids[i], wanted.elements[i], wanted.frozen[i],
                                    wanted.optimizer, add->logged || wanted.LogsValues(wanted.frozen[i]));
    if (added->durable.has_value()) add->taken[i]->version = added->durable->version;
    ++added;
  }
}

absl::Status Space::Add(const NewChunks& wanted, Chunks* chunks, v1::OpenResponse* answer) {
  BALLAST_ASSIGN_OR_RETURN(Ground ground, Prepare(wanted));
  BALLAST_RETURN_IF_ERROR(DropOld(&ground));
  Addition add = Match(wanted, &ground);
  absl::Status status;
  if (!add.missing.empty()) {
    status = Place(wanted, ground, &add, answer);
  } else if (wanted.dry_run) {
    ChunkPlans::NoteHeld(wanted, answer);
  } else if (wanted.logged()) {
    // Chunks of an Open whose log could not grow come back as spares. A server without chunks of the job keeps promises
    // and decisions all the same.
    uint64_t segment_bytes = 0;
    {
      JobMutexLock lock(&core_->mu);
      segment_bytes = journal_->segment_bytes();
    }
    if (!add.taken.empty() || segment_bytes == 0) {
      status = GrowJournal(wanted.journal_size(segment_bytes), /*logged=*/true);
    }
  }
  if (wanted.dry_run) return status;
  if (status.ok()) {
    chunks->insert(chunks->end(), add.taken.begin(), add.taken.end());
  } else {
    for (const auto& chunk : add.taken) {
      if (chunk != nullptr) ground.spares.push_back(chunk);
    }
  }
  JobMutexLock lock(&core_->mu);
  spares_ = std::move(ground.spares);
  return status;
}

}  // namespace ballast::services
