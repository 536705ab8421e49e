#include "ballast/storage/store/chunk_store.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/threads.h"
#include "ballast/storage/store/chunk_move.h"
#include "ballast/storage/store/store_core.h"
#include "ballast/storage/store/store_run.h"

namespace ballast::storage {
namespace {

// After an error of this run: leaves the extents of an earlier run on the disk.
void LeaveKept(absl::Span<const ChunkToAdd> added, std::vector<NvmeExtent>& extents) {
  for (size_t i = 0; i < added.size(); ++i) {
    if (added[i].durable.has_value()) extents[i].Leave();
  }
}

}  // namespace

StoreCore::~StoreCore() {
  if (!versions.has_value() || discarded) return;
  durable_pins->Leave();
  absl::MutexLock lock(&mutex);
  for (StoredChunk& chunk : chunks) {
    absl::MutexLock chunk_lock(&chunk.mutex);
    // An extent that never held a version is freed.
    if (chunk.newest.version >= 0) chunk.extent.Leave();
    // After a failed run the newest recorded version may be in a pin's copy.
    for (PinnedCopy& copy : chunk.copies) copy.extent.Leave();
  }
}

ChunkStore::ChunkStore(Tiers* tiers, const StateLayout& layout, kernels::ThreadPool* compute,
                       std::optional<DurableOptions> durable, std::shared_ptr<Account> account)
    : core_(std::make_unique<StoreCore>(tiers, layout, compute, std::move(durable), std::move(account))) {}
ChunkStore::~ChunkStore() = default;
void ChunkStore::Discard() {
  core_->discarded = true;
  if (core_->versions.has_value()) core_->versions->Discard();
}

absl::StatusOr<StoredChunk*> StoreCore::Find(uint64_t chunk) const {
  absl::ReaderMutexLock lock(&mutex);
  if (chunk >= chunks.size()) {
    return Bad(model::kBadRange, absl::StrCat("chunk ", chunk, " of a store of ", chunks.size(), " chunks"));
  }
  return const_cast<StoredChunk*>(&chunks[chunk]);
}

absl::Status StoreCore::CheckPlan(absl::Span<const ChunkToAdd> added, const Plan& plan) const {
  if (plan.chunks.size() != added.size()) {
    return Bad(model::kBadRequest, absl::StrCat("a plan of ", plan.chunks.size(), " chunks for ", added.size()));
  }
  if (versions.has_value() && tiers->nvme() == nullptr) {
    return Bad(model::kBadConfig, "durable state needs an nvme tier, and this server has none: give an nvme budget");
  }
  for (size_t i = 0; i < added.size(); ++i) {
    const auto [state, working] = plan.chunks[i];
    const uint64_t elements = added[i].elements;
    if (elements == 0) return Bad(model::kBadRequest, absl::StrCat("chunk ", i, " is empty"));
    if (working == TierKind::kNvme || (working == TierKind::kHbm && state != TierKind::kHbm)) {
      return Bad(model::kBadRequest, absl::StrCat("working copy of chunk ", i, " cannot be in ", TierName(*working),
                                                  " with its state in ", TierName(state)));
    }
    const StateLayout of = layout.Of(added[i].frozen, plan.chunks[i]);
    if (of.lends_master() && (versions.has_value() || of.working_copies())) {
      return Bad(model::kBadConfig,
                 absl::StrCat("chunk ", i, " has its master in the trainer's memory, and this store ",
                              versions.has_value() ? "is durable" : "keeps working copies", ": keep an fp32 master"));
    }
    if (versions.has_value() && of.keeps_remainder()) {
      return Bad(model::kBadConfig, absl::StrCat("chunk ", i, " keeps its master as remainder, and durable state is ",
                                                 "whole without a working copy: keep an fp32 master"));
    }
    BALLAST_RETURN_IF_ERROR(CheckTier(i, elements, of, state));
  }
  return absl::OkStatus();
}

absl::Status StoreCore::CheckTier(uint64_t chunk, uint64_t elements, const StateLayout& of, TierKind state) const {
  const bool there =
      state == TierKind::kHbm ? tiers->hbm() != nullptr : state != TierKind::kNvme || tiers->nvme() != nullptr;
  if (!there) return Bad(model::kBadConfig, absl::StrCat("this server has no ", TierName(state), " tier"));
  if (state != TierKind::kHbm) return absl::OkStatus();
  if (!layout.working_copies()) {
    return Bad(model::kBadConfig, "state in hbm needs working copies, and this store keeps none");
  }
  if (of.frozen() != Frozen::kNo) {
    return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk, " is frozen, and frozen chunks are not in hbm"));
  }
  if (of.keeps_remainder()) {
    return Bad(
        model::kBadRequest,
        absl::StrCat("chunk ", chunk, " keeps its master as remainder, which kernels on the ", "GPU do not read"));
  }
  if (!of.working_copies()) {
    return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk, " has no working copy, which hbm needs"));
  }
  if (elements <= kHbmSpanElementsMax) return absl::OkStatus();
  return Bad(model::kBadRequest,
             absl::StrCat("chunk ", chunk, " of ", elements, " elements, hbm takes ", kHbmSpanElementsMax));
}

// Takes the pipeline's slots and the readers' buffer: together staging_bytes().
absl::Status StoreCore::TakeStaging(uint64_t state_bytes, DramTier::Limit limit) {
  const uint64_t slot_bytes = std::max(staging.slot_bytes, state_bytes);
  if (slot_bytes == 0) return absl::OkStatus();
  if (tiers->staging_bytes() < slot_bytes + ChunkReader::kStagingBytes) {
    return Bad(model::kBadConfig,
               absl::StrCat("staging of ", tiers->staging_bytes(), " bytes; one chunk's state and a read ",
                            "buffer need ", slot_bytes + ChunkReader::kStagingBytes,
                            ", and three times that lets reads, kernels and writes overlap"));
  }
  BALLAST_RETURN_IF_ERROR(reader.Prepare(limit));
  if (staging.memory.bytes().empty()) {
    BALLAST_ASSIGN_OR_RETURN(DramBlock memory,
                             tiers->dram()->Allocate(tiers->staging_bytes() - ChunkReader::kStagingBytes,
                                                     "buffers for moving nvme state", limit, TierPart::kStaging));
    memory.Charge(account);
    staging.Take(std::move(memory));
  }
  staging.slot_bytes = slot_bytes;
  return absl::OkStatus();
}

absl::Status StoreCore::TakePullMemory(const PullMemory& wanted, DramTier::Limit limit) {
  if (wanted.bytes() == 0 || pulled.slot_bytes() > 0) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(reader.Prepare(limit));
  BALLAST_ASSIGN_OR_RETURN(
      pull_memory, tiers->dram()->Allocate(wanted.bytes(), "memory for pulls of chunks without a working copy", limit,
                                           TierPart::kStaging));
  pull_memory.Charge(account);
  reader.AddBuffers(pull_memory.bytes().subspan(0, wanted.buffer_bytes));
  pulled.Take(pull_memory.bytes().subspan(wanted.buffer_bytes), wanted.slot_bytes);
  return absl::OkStatus();
}

void StoreCore::DropCopy(StoredChunk& chunk) {
  const uint64_t bytes = chunk.layout.WorkingBytes(chunk.elements);
  std::byte* copy = nullptr;
  {
    absl::MutexLock lock(&chunk.mutex);
    copy = std::exchange(chunk.working, nullptr);
    chunk.placement.working = std::nullopt;
  }
  chunk.shared->GiveBackOfRest({copy, bytes});
  absl::MutexLock lock(&mutex);
  placed[chunk.index].placement.working = std::nullopt;
  residency.working.dram -= bytes;
}

// Takes extents for NVMe state and for state left by an earlier run. A durable store also takes the budget for the
// first version of chunks in memory and for new versions of all chunks.
absl::StatusOr<StoreCore::NvmeSpace> StoreCore::TakeNvme(absl::Span<const ChunkToAdd> added, const Plan& plan) {
  NvmeSpace space;
  space.extents.resize(added.size());
  absl::Status status;
  // Before any other space: what is given back after an error may be what a wrong entry should have named.
  for (size_t i = 0; i < added.size() && status.ok(); ++i) {
    if (!added[i].durable.has_value()) continue;
    absl::StatusOr<NvmeExtent> kept = tiers->nvme()->TakeKept(added[i].durable->offset, added[i].durable->file);
    status = kept.status();
    if (!kept.ok()) continue;
    space.extents[i] = *std::move(kept);
    space.extents[i].Charge(account);
  }
  if (status.ok()) status = TakeFreshNvme(added, plan, &space);
  if (status.ok()) return space;
  LeaveKept(added, space.extents);
  return status;
}

absl::Status StoreCore::TakeFreshNvme(absl::Span<const ChunkToAdd> added, const Plan& plan, NvmeSpace* space) {
  uint64_t room = 0, largest = 0;
  for (size_t i = 0; i < added.size(); ++i) {
    const uint64_t bytes = layout.Of(added[i].frozen, plan.chunks[i]).StateBytes(added[i].elements);
    largest = std::max(largest, bytes);
    space->aside_bytes += added[i].aside_bytes;
    if (added[i].durable.has_value()) continue;
    if (plan.chunks[i].state == TierKind::kNvme) {
      BALLAST_ASSIGN_OR_RETURN(space->extents[i], tiers->nvme()->Allocate(bytes, "chunk state"));
      space->extents[i].Charge(account);
    } else {
      room += bytes;
    }
  }
  if (!versions.has_value()) return absl::OkStatus();
  uint64_t count = added.size();
  {
    absl::ReaderMutexLock lock(&mutex);
    count += chunks.size();
  }
  space->spare_bytes = versions->SpareBytesMissing(count, largest);
  if (const uint64_t bytes = room + space->spare_bytes + space->aside_bytes; bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(space->room, tiers->nvme()->Promise(bytes, "durable versions of chunks", largest));
    space->room.Charge(account);
  }
  return absl::OkStatus();
}

absl::StatusOr<ChunkMemory> StoreCore::OwnMemory(const ChunkToAdd& added, const ChunkPlacement& placement) {
  constexpr char kWhat[] = "chunk state and working copies";
  const uint64_t state_bytes = layout.Of(added.frozen, placement).StateBytes(added.elements);
  ChunkMemory own;
  if (placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(own.hbm, tiers->hbm()->Allocate(state_bytes, kWhat));
  } else if (placement.state == TierKind::kDram) {
    BALLAST_ASSIGN_OR_RETURN(own.dram, tiers->dram()->Allocate(state_bytes, kWhat));
  }
  if (placement.working == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(own.hbm_working, tiers->hbm()->Allocate(layout.WorkingBytes(added.elements), kWhat));
    own.hbm_working.Mark(TierPart::kWorking);
  }
  own.Charge(account);
  return own;
}

absl::Status ChunkStore::Add(absl::Span<const uint64_t> elements, const Plan& plan) {
  std::vector<ChunkToAdd> added(elements.size());
  for (size_t i = 0; i < elements.size(); ++i) added[i].elements = elements[i];
  return Add(added, plan);
}

absl::Status ChunkStore::Add(absl::Span<const ChunkToAdd> added, const Plan& plan, Interrupt interrupt) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed);
  BALLAST_RETURN_IF_ERROR(core.CheckPlan(added, plan));
  TierBytes state_bytes, working_bytes;
  for (size_t i = 0; i < added.size(); ++i) {
    const StateLayout layout = core.layout.Of(added[i].frozen, plan.chunks[i]);
    state_bytes[plan.chunks[i].state] += layout.StateBytes(added[i].elements);
    if (plan.chunks[i].working.has_value()) {
      working_bytes[*plan.chunks[i].working] += layout.WorkingBytes(added[i].elements);
    }
  }
  const bool shares = core.tiers->hbm() == nullptr;  // DRAM that states lie in
  const bool restores = std::all_of(added.begin(), added.end(), [](const auto& a) { return a.durable.has_value(); });
  DramBlock dram;
  if (const uint64_t bytes = (shares ? state_bytes.dram : 0) + working_bytes.dram; bytes > 0) {
    DramTier& tier = *core.tiers->dram();
    constexpr char kWhat[] = "chunk state and working copies";
    BALLAST_ASSIGN_OR_RETURN(dram, restores ? tier.AllocateToFill(bytes, kWhat) : tier.Allocate(bytes, kWhat));
    dram.MarkRest(working_bytes.dram, TierPart::kWorking);
    dram.Charge(core.account);
  }
  std::vector<ChunkMemory> own(added.size());
  for (size_t i = 0; i < added.size() && !shares; ++i) {
    BALLAST_ASSIGN_OR_RETURN(own[i], core.OwnMemory(added[i], plan.chunks[i]));
  }
  uint64_t moving = 0;  // the largest state that goes to NVMe
  for (size_t i = 0; i < added.size(); ++i) {
    if (plan.chunks[i].state != TierKind::kNvme) continue;
    moving = std::max(moving, core.layout.Of(added[i].frozen, plan.chunks[i]).StateBytes(added[i].elements));
  }
  if (core.versions.has_value() && state_bytes.hbm > 0) BALLAST_RETURN_IF_ERROR(core.reader.Prepare());
  BALLAST_RETURN_IF_ERROR(core.TakePullMemory(plan.pull));
  BALLAST_ASSIGN_OR_RETURN(StoreCore::NvmeSpace space, core.TakeNvme(added, plan));
  if (const absl::Status status = core.TakeStaging(moving, DramTier::Limit::kBudget); !status.ok()) {
    LeaveKept(added, space.extents);
    return status;
  }
  if (space.room.bytes() > 0) {
    core.durable_pins->SetAside(space.room.Split(space.aside_bytes));
    core.versions->AddRoom(std::move(space.room), space.spare_bytes);
  }

  std::byte* next = dram.bytes().data();
  std::vector<StoredChunk*> fresh;
  {
    absl::MutexLock lock(&core.mutex);
    core.dram.push_back(std::move(dram));
    for (size_t i = 0; i < added.size(); ++i) {
      const ChunkPlacement placement = plan.chunks[i];
      StoredChunk& chunk = core.chunks.emplace_back(core.layout.Of(added[i].frozen, plan.chunks[i]), core.chunks.size(),
                                                    added[i].elements, placement, added[i].id);
      core.placed.push_back({added[i].elements, placement, added[i].frozen});
      fresh.push_back(&chunk);
      absl::MutexLock chunk_lock(&chunk.mutex);
      chunk.extent = std::move(space.extents[i]);
      // Set even for a state that turns out unreadable: the extent stays on the disk.
      if (added[i].durable.has_value()) chunk.newest = *added[i].durable;
      chunk.own = std::move(own[i]);
      chunk.shared = &core.dram.back();
      chunk.state = placement.state == TierKind::kHbm ? chunk.own.hbm.data() : chunk.own.dram.bytes().data();
      if (placement.state == TierKind::kDram && shares) chunk.state = std::exchange(next, next + chunk.state_bytes());
      chunk.working = chunk.own.hbm_working.data();
      if (placement.working == TierKind::kHbm || !chunk.layout.working_copies()) continue;
      chunk.working = std::exchange(next, next + chunk.layout.WorkingBytes(added[i].elements));
    }
    for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
      core.residency.state[tier] += state_bytes[tier];
      core.residency.working[tier] += working_bytes[tier];
    }
    core.runs = std::max(core.runs, uint64_t{1});
  }
  std::thread settling;  // beside the reads that fill the memory
  if (restores && !fresh.empty()) {
    const auto settle = [&core, block = fresh.front()->shared] { core.tiers->dram()->Settle(block); };
    absl::StatusOr<std::thread> made = model::MakeThread(settle);
    if (made.ok()) {
      settling = *std::move(made);
    } else {
      settle();  // slower
    }
  }
  core.failed = core.RestoreAll(added, fresh, interrupt);  // on an error the chunks are there, and nobody may use them
  if (settling.joinable()) settling.join();
  return core.failed;
}

bool ChunkStore::durable() const { return core_->versions.has_value(); }

bool ChunkStore::records() const { return core_->versions.has_value() && core_->versions->records(); }

bool ChunkStore::dirty(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  return found.ok() && (*found)->dirty;
}

int64_t ChunkStore::durable_version(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  return found.ok() ? (*found)->newest.version : -1;
}

int64_t ChunkStore::needed_from(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  return found.ok() ? (*found)->needed_from : -1;
}

std::optional<int64_t> ChunkStore::recoverable_from(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  if (!found.ok()) return std::nullopt;
  if ((*found)->unrecorded_from.has_value()) {
    return (*found)->unrecorded_from;
  }
  return (*found)->dirty ? std::optional((*found)->needed_from) : std::nullopt;
}

uint64_t ChunkStore::spare_bytes_missing(absl::Span<const ChunkToAdd> added) const {
  if (!core_->versions.has_value() || added.empty()) return 0;
  uint64_t largest = 0;
  for (const ChunkToAdd& chunk : added) {
    largest = std::max(largest, core_->layout.Of(chunk.frozen).StateBytes(chunk.elements));
  }
  return core_->versions->SpareBytesMissing(chunk_count() + added.size(), largest);
}

uint64_t ChunkStore::chunk_count() const {
  absl::ReaderMutexLock lock(&core_->mutex);
  return core_->chunks.size();
}

bool ChunkStore::has_working_copy(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  if (!found.ok()) return false;
  absl::ReaderMutexLock lock(&(*found)->mutex);
  return (*found)->working != nullptr;
}

absl::StatusOr<bool> ChunkStore::DropWorkingCopies() {
  uint64_t largest = 0;
  std::vector<uint64_t> with_copy;
  {
    absl::ReaderMutexLock lock(&core_->mutex);
    for (const StoredChunk& chunk : core_->chunks) {
      largest = std::max(largest, chunk.elements);
      if (core_->MayDropCopy(chunk)) with_copy.push_back(chunk.index);
    }
  }
  // The first copies that are dropped make room for the memory of pulls too.
  const PullMemory pull = pull_memory_missing(largest, chunk_count());
  uint64_t freed = 0;
  size_t first = with_copy.size();
  while (first > 0 && freed <= 2 * pull.bytes()) {
    --first;
    freed += core_->layout.WorkingBytes((*core_->Find(with_copy[first]))->elements);
  }
  if (freed <= pull.bytes()) return false;
  BALLAST_RETURN_IF_ERROR(DropWorkingCopies(absl::MakeConstSpan(with_copy).subspan(first)));
  return true;
}

absl::Status ChunkStore::DropWorkingCopies(absl::Span<const uint64_t> chunks) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed);
  uint64_t largest = 0;
  std::vector<StoredChunk*> dropped;
  {
    absl::ReaderMutexLock lock(&core.mutex);
    for (const StoredChunk& chunk : core.chunks) largest = std::max(largest, chunk.elements);
    for (const uint64_t index : chunks) {
      if (index < core.chunks.size() && core.MayDropCopy(core.chunks[index])) dropped.push_back(&core.chunks[index]);
    }
  }
  if (dropped.empty()) return absl::OkStatus();
  // Pulls need it as soon as the first copy is gone.
  BALLAST_RETURN_IF_ERROR(core.TakePullMemory(pull_memory_missing(largest, chunk_count()), DramTier::Limit::kBeyond));
  for (StoredChunk* const chunk : dropped) core.DropCopy(*chunk);
  return absl::OkStatus();
}

std::vector<PlacedChunk> ChunkStore::placed() const {
  absl::ReaderMutexLock lock(&core_->mutex);
  return core_->placed;
}

uint64_t ChunkStore::slot_memory_bytes() const {
  const uint64_t staging = core_->tiers->staging_bytes();
  return staging - std::min(staging, ChunkReader::kStagingBytes);
}

const StateLayout& ChunkStore::layout() const { return core_->layout; }

PullMemory ChunkStore::pull_memory_missing(uint64_t elements, uint64_t chunks) const {
  if (core_->pulled.slot_bytes() > 0) return {};
  // Sixteen chunks ahead keep a disk busy; a quarter of a small job leaves it something to gain.
  constexpr uint64_t kSlotsMax = 16, kSlotsPerBuffer = 5;
  const uint64_t slots = std::clamp<uint64_t>(chunks / 4, 1, kSlotsMax);
  return {.slots = slots,
          .slot_bytes = core_->layout.WorkingBytes(elements),
          .buffer_bytes = slots / kSlotsPerBuffer * ChunkReader::kStagingBytes};
}

uint64_t ChunkStore::staging_bytes_missing() const {
  if (!core_->staging.memory.bytes().empty()) return 0;
  const uint64_t staging = core_->tiers->staging_bytes();
  return core_->reader.prepared() ? staging - std::min(staging, ChunkReader::kStagingBytes) : staging;
}

uint64_t ChunkStore::flush_buffer_bytes_missing() const {
  return core_->reader.prepared() ? 0 : std::min(core_->tiers->staging_bytes(), ChunkReader::kStagingBytes);
}

ChunkStore::Residency ChunkStore::residency() const {
  absl::ReaderMutexLock lock(&core_->mutex);
  return core_->residency;
}

absl::Status ChunkStore::Run(absl::Span<const ChunkUpdate> updates, absl::FunctionRef<void(size_t)> done,
                             const ReadBack& read_back, Interrupt interrupt, RunStageObserver observer) {
  return StoreRun(core_.get(), done, observer).Run(updates, read_back, interrupt);
}

absl::Status ChunkStore::Move(uint64_t index, TierKind to) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed);
  BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, core.Find(index));
  const ChunkPlacement from = chunk->placement;
  if (from.state == to) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(core.CheckTier(index, chunk->elements, core.layout.Of(chunk->layout.frozen(), from), to));
  BALLAST_RETURN_IF_ERROR(core.Move(*chunk, to));
  absl::MutexLock lock(&core.mutex);
  core.placed[index].placement = chunk->placement;
  core.residency.state[from.state] -= chunk->state_bytes();
  core.residency.state[to] += chunk->state_bytes();
  if (!from.working.has_value()) return absl::OkStatus();
  const uint64_t working_bytes = chunk->layout.WorkingBytes(chunk->elements);
  core.residency.working[*from.working] -= working_bytes;
  core.residency.working[*chunk->placement.working] += working_bytes;
  return absl::OkStatus();
}

absl::Status StoreCore::Move(StoredChunk& chunk, TierKind to) {
  const uint64_t bytes = chunk.state_bytes();
  StateMove move{.to = to, .extent = {}, .keep_extent = versions.has_value(), .buffer = {}};
  if (to == TierKind::kNvme) {
    BALLAST_RETURN_IF_ERROR(TakeStaging(bytes, DramTier::Limit::kBeyond));
    BALLAST_ASSIGN_OR_RETURN(move.extent, ExtentToMoveTo(chunk));
  } else if (chunk.placement.state == TierKind::kNvme) {
    move.buffer = staging.memory.bytes();
  }
  if (to == TierKind::kHbm && versions.has_value()) BALLAST_RETURN_IF_ERROR(reader.Prepare());
  // A chunk that goes to NVMe leaves its memory, and the extent has everything.
  if (to == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(LoadMoments(chunk));
  const absl::Status moved = MoveState(tiers, account, &reader, chunk, move);
  // The extent was part of the room.
  if (!moved.ok() && versions.has_value() && move.extent.bytes() > 0) versions->AddRoom(move.extent.TakeRoom(), 0);
  return moved;
}

absl::StatusOr<NvmeExtent> StoreCore::ExtentToMoveTo(const StoredChunk& chunk) {
  const uint64_t bytes = chunk.state_bytes();
  if (!versions.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(NvmeExtent extent, tiers->nvme()->Allocate(bytes, "chunk state that moves to nvme"));
    extent.Charge(account);
    return extent;
  }
  if (chunk.dirty) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                        absl::StrCat("chunk ", chunk.index, " has changed since it was flushed: flush it first"));
  }
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    if (chunk.extent.bytes() > 0) return NvmeExtent();  // the extent holds the state already
  }
  // Never updated, so never flushed: its place is part of the room.
  if (!versions->HasRoom(bytes)) BALLAST_RETURN_IF_ERROR(Harden());
  if (versions->HasRoom(bytes)) return versions->Take(bytes);
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("no room for the extent of chunk ", chunk.id, " until versions are hardened"));
}

}  // namespace ballast::storage
