#include "ballast/services/space/space.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/journal/earlier_extents.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/services/space/dry_run_answer.h"
#include "ballast/services/space/prediction.h"
#include "ballast/storage/store/log_reads.h"

namespace ballast::services {

SpaceState Space::State() const {
  SpaceState state{.job = core_->name,
                   .server_id = core_->around.server_id,
                   .working_copies = core_->around.working_copies,
                   .log_steps = core_->around.log_steps,
                   .recovering = core_->state.recovering(),
                   .plan = core_->state.plan(),
                   .chunks = core_->state.chunk_list(),
                   .leaving = core_->state.leaving(),
                   .spares = spares_,
                   .store = core_->state.store(),
                   .memory = room_->memory(),
                   .journal = journal_->state(),
                   .earlier = earlier_};
  if (room_->read_back() != nullptr) state.read_back_bytes = room_->read_back()->bytes();
  return state;
}

absl::StatusOr<SpaceState> Space::Look() const {
  JobMutexLock lock(&core_->mu);
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  return State();
}

absl::StatusOr<SpaceNeed> Space::NeedOf(const SpaceState& state, const model::EpochPlan& plan) const {
  BALLAST_ASSIGN_OR_RETURN(SpaceNeed need, Need(state, plan));
  if (need.missing.empty()) return need;
  JobMutexLock lock(&core_->mu);
  need.shape = prediction_->of_job();
  return need;
}

absl::Status Space::Annotate(const model::EpochPlan& plan, const absl::Status& status) const {
  if (!absl::IsResourceExhausted(status)) return status;
  return model::Annotate(status, absl::StrCat("job '", plan.open().spec().name(), "' does not fit on server '",
                                              core_->around.server_id, "'"));
}

absl::StatusOr<HeldChunks> Space::Take(const model::EpochPlan& plan) {
  SpaceNeed need;
  {
    // Ends here: a store that goes gives its space back with its last reference.
    BALLAST_ASSIGN_OR_RETURN(const SpaceState state, Look());
    BALLAST_ASSIGN_OR_RETURN(need, NeedOf(state, plan));
  }
  const absl::Status status = TakeAll(plan, &need);
  // An error loses no chunk of the store: the next Open takes what this Open had or added.
  for (const auto& chunk : need.taken) {
    if (chunk != nullptr && !status.ok()) need.spares.push_back(chunk);
  }
  {
    JobMutexLock lock(&core_->mu);
    spares_ = std::move(need.spares);
  }
  BALLAST_RETURN_IF_ERROR(Annotate(plan, status));
  return ChunksUnder(need);
}

absl::Status Space::TakeAll(const model::EpochPlan& plan, SpaceNeed* need) {
  BALLAST_ASSIGN_OR_RETURN(Grant grant, Replace(need));
  BALLAST_RETURN_IF_ERROR(Add(need, &grant));
  const HeldChunks chunks = ChunksUnder(*need);
  if (const std::optional<JournalSize> spill = SpillOf(*need, plan, chunks)) {
    BALLAST_RETURN_IF_ERROR(GrowJournal(*spill, /*logged=*/false));
  }
  return ReserveSlices(plan, chunks, need->spares);
}

absl::StatusOr<v1::OpenResponse> Space::Try(const model::EpochPlan& plan) const {
  BALLAST_ASSIGN_OR_RETURN(const SpaceState state, Look());
  BALLAST_ASSIGN_OR_RETURN(const SpaceNeed need, NeedOf(state, plan));
  const storage::TierUsage usage = core_->around.tiers->usage();
  const storage::TierBytes free = FreeOf(usage, {});
  const Retiled retiled = RetiledBy(state, need, plan, free.dram);
  if (need.missing.empty()) return DryRunAnswer(retiled, free);
  const std::shared_ptr<storage::ChunkStore> store = need.makes_store ? MakeStore(need.wanted) : state.store;
  const storage::PlanRequest request = RequestOf(need, *store, FreeOf(usage, need.freed));
  const absl::StatusOr<storage::Plan> placed = storage::MakePlan(request);
  BALLAST_RETURN_IF_ERROR(Annotate(plan, placed.status()));
  return DryRunAnswer(need, retiled, request, *placed);
}

bool Space::ReadsStore(const model::EpochPlan& plan) const {
  if (core_->state.store() == nullptr) return false;
  const std::vector<uint64_t> mine = ChunksOf(plan, core_->around.server_id);
  return std::any_of(mine.begin(), mine.end(), [&](uint64_t id) {
    core_->mu.AssertHeld();
    return core_->state.Find(id) == nullptr;
  });
}

std::optional<HeldChunks> Space::AllHeld(const model::EpochPlan& plan) const {
  if (!core_->Refusal().ok() || !HasAll(State(), plan)) return std::nullopt;
  return core_->state.chunks();
}

void Space::KeepSpares(const HeldChunks& chunks) {
  for (const auto& chunk : chunks) {
    if (!chunk->version().has_value()) spares_.push_back(chunk);
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
  return std::make_shared<storage::ChunkStore>(core_->around.tiers, LayoutOf(wanted, core_->around.working_copies),
                                               core_->around.compute, std::move(durable), core_->around.account);
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

void Space::NoteLeastDram(uint64_t more) {
  least_dram_ += more;
  {
    JobMutexLock lock(&core_->mu);
    if (core_->state.recovering())
      return;  // the sum is still partial: until it is complete, the catalog's number stands
  }
  if (const absl::Status written = WriteLeastDram(core_->around.catalog, core_->name, least_dram_); !written.ok()) {
    spdlog::error(
        "job '{}' goes on until it next needs the catalog, which takes no more writes; jobs that come back before it "
        "after a restart may leave it too little DRAM: {}",
        core_->name, std::string(written.message()));
  }
}

absl::StatusOr<Space::Grant> Space::Replace(SpaceNeed* need) {
  Grant grant;
  // Left by an Open that was then refused; destroyed without the lock.
  std::shared_ptr<storage::ChunkStore> old_store;
  HeldChunks old_spares;
  {
    JobMutexLock lock(&core_->mu);
    if (need->replaces_store) moves_->Forget();
    if (need->makes_store) {
      old_spares.swap(spares_);
      old_store = core_->state.Replace(MakeStore(need->wanted));
      room_->SetMemory(std::make_shared<SliceMemory>(core_->around.tiers, core_->around.account));
    }
    grant.store = core_->state.store();
    grant.memory = room_->memory();
  }
  old_spares.clear();
  if (old_store != nullptr) {
    // The catalog never recorded anything of the old store.
    least_dram_ = 0;
    old_store->Discard();
    old_store.reset();
  }
  if (!need->drops_journal) return grant;
  // The catalog's entry of the log goes first: a crash then leaves a file that the next Open makes anew.
  BALLAST_RETURN_IF_ERROR(core_->around.catalog->ErasePrefix(absl::StrCat(CatalogPrefix(core_->name), kCatalogLog)));
  BALLAST_RETURN_IF_ERROR(journal_->Remove());
  return grant;
}

absl::Status Space::TakeReadBack(const NewChunks& wanted, const std::shared_ptr<SliceMemory>& memory,
                                 uint64_t buffer_bytes) {
  // Reads get half of the bytes beyond the minimum.
  const LargestSlices largest(wanted.spec, wanted.optimizer);
  const uint64_t more = buffer_bytes - wanted.read_back().buffer_bytes_min;
  const uint64_t reads = std::min(1 + more / 2 / largest.gradient_bytes, storage::LogReads::kReadsMax);
  BALLAST_ASSIGN_OR_RETURN(auto buffer,
                           SliceMemory::Allocate(memory, largest.values_bytes + reads * largest.gradient_bytes));
  JobMutexLock lock(&core_->mu);
  room_->SetReadBack(std::move(buffer));
  return absl::OkStatus();
}

absl::Status Space::TakePlaces(const SpaceNeed& need, const storage::PlanRequest& request, const storage::Plan& plan,
                               Grant* grant) {
  BALLAST_RETURN_IF_ERROR(grant->memory->Reserve(plan.slice_bytes));
  grant->reads_back = plan.reads_back;
  const bool first = plan.reads_back && !need.has_read_back;
  absl::Status status;
  if (first) status = TakeReadBack(need.wanted, grant->memory, plan.slice_bytes - request.read_back->shared_bytes);
  const auto dispensable = [&](size_t i, const absl::Status& found) {
    if (need.may_be_copied) grant->damaged[i] = found;
    return need.may_be_copied;
  };
  const auto interrupt = [this] { return core_->Interrupted(); };
  if (status.ok()) status = grant->store->Add(need.missing, plan, interrupt, dispensable);
  if (status.ok()) return absl::OkStatus();
  JobMutexLock lock(&core_->mu);
  if (first) room_->SetReadBack(nullptr);
  grant->memory->Unreserve(plan.slice_bytes);
  return status;
}

absl::Status Space::PlanAndTake(const SpaceNeed& need, Grant* grant) {
  const NewChunks& wanted = need.wanted;
  absl::MutexLock planning(core_->around.planning);
  const storage::PlanRequest request = RequestOf(need, *grant->store, FreeOf(core_->around.tiers->usage(), {}));
  BALLAST_ASSIGN_OR_RETURN(const storage::Plan plan, storage::MakePlan(request));
  spdlog::info("job '{}': {}", core_->name, plan.Explain());
  JobJournal::Growth growth;
  if (wanted.logged()) {
    BALLAST_ASSIGN_OR_RETURN(growth, journal_->TakeBudget(wanted.journal_size(need.journal.segment_bytes), true));
  }
  const absl::Status taken = TakePlaces(need, request, plan, grant);
  if (!taken.ok()) {
    core_->around.tiers->Return(storage::TierKind::kNvme, growth.bytes, storage::TierPart::kLog,
                                core_->around.account.get());
    return taken;
  }
  grant->least_dram = storage::LeastDram(request);
  grant->journal = growth;
  JobMutexLock lock(&core_->mu);
  prediction_->Set(plan.prediction);
  return absl::OkStatus();
}

bool Space::ShortOfDram(const SpaceNeed& need, const Grant& grant) const {
  absl::MutexLock planning(core_->around.planning);
  const storage::PlanRequest request = RequestOf(need, *grant.store, FreeOf(core_->around.tiers->usage(), {}));
  return storage::LeastDram(request) > request.free.dram;
}

absl::Status Space::Place(SpaceNeed* need, Grant* grant) {
  absl::Status status = PlanAndTake(*need, grant);
  if (absl::IsResourceExhausted(status)) {
    // A chunk that moves has a place in two tiers: once none moves, there may be room.
    const MoveGate::KeptShut no_moves(core_->around.moving);
    status = PlanAndTake(*need, grant);
  }
  while (absl::IsResourceExhausted(status) && ShortOfDram(*need, *grant)) {
    BALLAST_ASSIGN_OR_RETURN(const bool dropped, DropWorkingCopies(grant->store.get()));
    if (!dropped) break;
    spdlog::info("job '{}': dropped working copies, further tensors need their room", core_->name);
    status = PlanAndTake(*need, grant);
  }
  BALLAST_RETURN_IF_ERROR(status);
  Hold(*grant, need);
  if (need->wanted.durable()) NoteLeastDram(grant->least_dram);
  return journal_->Grow(grant->journal);
}

void Space::Hold(const Grant& grant, SpaceNeed* need) {
  const NewChunks& wanted = need->wanted;
  uint64_t next = grant.store->chunk_count() - need->missing.size();
  auto added = need->missing.begin();
  for (size_t i = 0; i < need->taken.size(); ++i) {
    std::shared_ptr<HeldChunk>& chunk = need->taken[i];
    if (chunk != nullptr) continue;
    chunk = std::make_shared<HeldChunk>(grant.memory, next++, wanted.ids[i], wanted.elements[i], wanted.forms[i],
                                        wanted.optimizer, grant.reads_back || wanted.LogsValues(wanted.forms[i]));
    if (added->durable.has_value()) {
      chunk->ComeBack(added->durable->version);
      earlier_->Taken(added->id);
    }
    const auto damage = grant.damaged.find(static_cast<size_t>(added - need->missing.begin()));
    if (damage != grant.damaged.end()) chunk->Damage(damage->second);
    ++added;
  }
}

absl::Status Space::Add(SpaceNeed* need, Grant* grant) {
  if (!need->missing.empty()) return Place(need, grant);
  // Chunks of an Open whose log could not grow come back as spares. A server without chunks of the job keeps promises
  // and decisions all the same.
  if (!need->wanted.logged() || (need->taken.empty() && need->journal.segment_bytes > 0)) return absl::OkStatus();
  return GrowJournal(need->wanted.journal_size(need->journal.segment_bytes), /*logged=*/true);
}

absl::Status Space::ReserveSlices(const model::EpochPlan& plan, const HeldChunks& chunks, const HeldChunks& spares) {
  std::shared_ptr<storage::ChunkStore> store;
  std::shared_ptr<SliceMemory> memory;
  uint64_t needed_bytes = 0;
  {
    JobMutexLock lock(&core_->mu);
    store = core_->state.store();
    memory = room_->memory();
    const uint64_t read_back_bytes = room_->read_back() == nullptr ? 0 : room_->read_back()->bytes();
    needed_bytes = SliceBytes(store->layout(), read_back_bytes, plan, chunks, spares);
  }
  while (memory->reserved_bytes() < needed_bytes) {
    const absl::Status reserved = memory->Reserve(needed_bytes - memory->reserved_bytes());
    if (reserved.ok()) break;
    BALLAST_ASSIGN_OR_RETURN(const bool moved, MoveOneDown(store.get()));
    if (moved) continue;
    BALLAST_ASSIGN_OR_RETURN(const bool dropped, DropWorkingCopies(store.get()));
    if (!dropped) return reserved;
    spdlog::info("job '{}': dropped working copies, its ranks now share more chunks", core_->name);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Space::DropWorkingCopies(storage::ChunkStore* store) {
  if (!store->may_drop_working_copies()) return false;
  const std::shared_ptr<void> no_leases = core_->leases->ShutOut();
  BALLAST_RETURN_IF_ERROR(
      core_->leases->Await([this] { return core_->leases->held() == 0; }, [this] { return core_->Interrupted(); }));
  return store->DropWorkingCopies();
}

absl::StatusOr<bool> Space::MoveOneDown(storage::ChunkStore* store) {
  const std::vector<storage::PlacedChunk> placed = store->placed();
  const auto last = std::find_if(placed.rbegin(), placed.rend(), [](const storage::PlacedChunk& chunk) {
    return !chunk.gap() && chunk.placement.state == storage::TierKind::kDram;
  });
  if (last == placed.rend()) return false;
  const auto chunk = static_cast<uint64_t>(placed.rend() - last) - 1;
  if (store->dirty(chunk)) BALLAST_RETURN_IF_ERROR(flushes_->Run(store, {&chunk, 1}));
  core_->around.moving->Begin();
  const absl::Status moved = store->Move(chunk, storage::TierKind::kNvme);
  core_->around.moving->End();
  BALLAST_RETURN_IF_ERROR(moved);
  spdlog::info("job '{}': chunk {} of its store moved to nvme, its ranks now share more chunks", core_->name, chunk);
  return true;
}

}  // namespace ballast::services
