// How class Job takes space for the chunks of an Open, before the epoch's promise is used. An Open that does not fit
// leaves everything as it was.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/records/job_entry.h"
#include "ballast/storage/faults/failpoint.h"
#include "ballast/storage/placement/placement.h"

namespace ballast::services {
namespace {

absl::Status UnsupportedSpec(absl::string_view message) {
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported, message);
}

absl::Status CheckSupported(const v1::JobSpec& spec) {
  const bool known = spec.durability() == v1::DURABILITY_NONE || spec.durability() == v1::DURABILITY_STEP ||
                     spec.durability() == v1::DURABILITY_EVERY_K;
  if (!known) {
    return UnsupportedSpec(
        absl::StrCat("durability ", v1::Durability_Name(spec.durability()),
                     ": this version accepts DURABILITY_NONE, DURABILITY_STEP and DURABILITY_EVERY_K"));
  }
  return absl::OkStatus();
}

// The free part of the budgets, once `returned` has come back.
storage::TierBytes Free(const storage::Tiers& tiers, const storage::TierBytes& returned) {
  const storage::TierBytes budget = tiers.budget();
  const storage::TierBytes used = tiers.used();
  storage::TierBytes free;
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    const uint64_t taken = used[kind] - std::min(used[kind], returned[kind]);
    free[kind] = budget[kind] > taken ? budget[kind] - taken : 0;
  }
  return free;
}

// Bytes held by a store that is not in use yet, and by the memory for its slices.
storage::TierBytes TakenBy(const storage::ChunkStore& store, const SliceMemory& memory) {
  storage::TierBytes taken;
  const storage::ChunkStore::Residency residency = store.residency();
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    taken[kind] = residency.state[kind] + residency.working[kind];
  }
  taken.dram += memory.reserved_bytes();
  return taken;
}

}  // namespace

JournalSize Job::JournalSizeOf(const NewChunks& wanted, uint64_t segment_bytes) {
  const bool logged = wanted.logged();
  return SizeJournal({.chunk_elements = wanted.spec.chunk_elements(),
                      .elements = logged ? wanted.all_elements : wanted.spilt_slices,
                      .gradient_bytes = kernels::ElementBytes(wanted.optimizer.gradient),
                      .snapshot_bytes = logged ? wanted.snapshot_bytes : 0,
                      .segment_bytes = segment_bytes,
                      .steps = logged ? Journal::kStepsKept : Journal::kStepsSpilt,
                      .segments_reserved = logged ? Journal::kSegmentsReserved : Journal::kSpillSegmentsReserved});
}

std::vector<uint64_t> ChunksOf(const model::EpochPlan& plan, absl::string_view server_id) {
  std::vector<uint64_t> mine;
  const absl::StatusOr<uint32_t> member = plan.FindMember(server_id);
  if (!member.ok()) return mine;
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (plan.server_of(chunk.index) == *member) mine.push_back(chunk.index);
  }
  return mine;
}

void Job::PrepareOpen(const v1::OpenRequest& request) {
  std::vector<std::shared_ptr<HeldChunk>> chunks;
  const absl::Status status = TakeChunks(request, &chunks);
  storage::Pass("fence/space_taken");
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    opening_->done = true;
    opening_->status = status;
    if (request.dry_run()) opening_->answer = std::move(planned_);
    opening_->chunks = std::move(chunks);
    waiting_.Wake(&machine_queue_, replies);  // the machine takes the Open now, or refuses it
    if (!opening_->adopted) {
      for (const auto& chunk : opening_->chunks) {
        if (!chunk->version.has_value()) spares_.push_back(chunk);
      }
    }
    opening_.reset();
    moved_ = true;  // another Open may have waited for the end of this Open
  });
}

std::optional<storage::DurableChunk> Job::TakeDurable(uint64_t id) {
  const auto found = durable_chunks_.find(id);
  if (found == durable_chunks_.end()) return std::nullopt;
  const storage::DurableChunk chunk = found->second;
  durable_chunks_.erase(found);
  return chunk;
}

absl::Status Job::TakeChunks(const v1::OpenRequest& request, std::vector<std::shared_ptr<HeldChunk>>* chunks) {
  BALLAST_RETURN_IF_ERROR(CheckSupported(request.spec()));
  BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec optimizer, model::OptimizerOf(request.spec()));
  BALLAST_ASSIGN_OR_RETURN(const model::EpochPlan plan, model::EpochPlan::Make(request));
  BALLAST_RETURN_IF_ERROR(plan.FindMember(around_.server_id).status());
  const std::vector<uint64_t> mine = ChunksOf(plan, around_.server_id);
  const auto fits = [&](const HeldChunk& held, uint64_t index) {
    const model::Chunk& chunk = plan.layout().chunks()[index];
    return held.layout.index == index && held.layout.unit == chunk.unit && held.layout.range == chunk.range;
  };
  const uint64_t snapshot_bytes = SnapshotBytesMax(plan, mine);
  bool continues = true;
  {
    absl::MutexLock lock(&mu_);
    BALLAST_RETURN_IF_ERROR(Refusal());
    *chunks = chunks_;
    if (journal_ != nullptr && durable_ && !chunks_.empty()) {
      BALLAST_RETURN_IF_ERROR(journal_->CheckFits(snapshot_bytes, request.spec().chunk_elements() * sizeof(float)));
    }
    for (size_t i = 0; continues && i < chunks->size(); ++i)
      continues = i < mine.size() && fits(*(*chunks)[i], mine[i]);
  }
  if (!continues) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadSpec,
        absl::StrCat("job '", name_, "' already has chunks on server '", around_.server_id,
                     "', and this Open would lay them out anew by other members, weights, chunk size or "
                     "tensors; take them from GetJob and only append, or drop the job"));
  }
  NewChunks wanted{.spec = request.spec(),
                   .optimizer = optimizer,
                   .ids = {},
                   .elements = {},
                   .all_elements = {},
                   .spilt_slices = {},
                   .snapshot_bytes = snapshot_bytes,
                   .dry_run = request.dry_run()};
  for (size_t i = 0; i < mine.size(); ++i) {
    const uint64_t elements = plan.layout().chunks()[mine[i]].range.size();
    wanted.all_elements.push_back(elements);
    if (i >= chunks->size() || (*chunks)[i]->logged) wanted.AddSpilt(plan, mine[i]);
    if (i < chunks->size()) continue;
    wanted.ids.push_back(mine[i]);
    wanted.elements.push_back(elements);
    if (plan.slices_of_chunk(mine[i]).size() > 1) wanted.shared_elements += elements;
  }
  BALLAST_RETURN_IF_ERROR(AddChunks(wanted, chunks));
  if (wanted.dry_run) return absl::OkStatus();
  absl::Status status = EnsureSpill(plan, *chunks, std::move(wanted));
  if (status.ok()) status = TakeSharedGradients(plan, *chunks);
  return model::Annotate(status, absl::StrCat("job '", name_, "' does not fit on server '", around_.server_id, "'"));
}

void Job::NewChunks::AddSpilt(const model::EpochPlan& plan, uint64_t chunk) {
  for (const uint32_t slice : plan.slices_of_chunk(chunk)) spilt_slices.push_back(plan.slices()[slice].range.size());
}

std::shared_ptr<storage::ChunkStore> Job::MakeStore(const NewChunks& wanted) const {
  std::optional<storage::DurableOptions> durable;
  if (wanted.durable() && !wanted.logged())
    durable = storage::DurableOptions{.job = name_, .life = life_, .record = {}};
  if (wanted.logged()) {
    const auto record = [catalog = around_.catalog, job = name_](absl::Span<const storage::DurableChunk> chunks) {
      std::vector<CatalogPair> entries;
      for (const storage::DurableChunk& chunk : chunks) entries.push_back(ChunkPair(job, chunk));
      return catalog->PutAll(entries);
    };
    durable = storage::DurableOptions{.job = name_, .life = life_, .record = record};
  }
  const storage::StateLayout layout(wanted.optimizer, around_.working_copies);
  return std::make_shared<storage::ChunkStore>(around_.tiers, layout, around_.compute, std::move(durable));
}

// The request for a plan of the chunks that are missing from the store.
storage::PlanRequest Job::PlanOf(const NewChunks& wanted, const storage::ChunkStore& store,
                                 const std::vector<storage::ChunkToAdd>& missing, const storage::TierBytes& returned) {
  storage::PlanRequest plan{.free = Free(*around_.tiers, returned),
                            .elements = {},
                            .layout = store.layout(),
                            .provisional_bytes_per_element = SliceBytesPerElement(wanted),
                            .staging_bytes = store.staging_bytes_missing(),
                            .flush_buffer_bytes = store.flush_buffer_bytes_missing(),
                            .placed = store.placed(),
                            .shape = ShapeOf(store)};
  for (const storage::ChunkToAdd& chunk : missing) {
    plan.elements.push_back(chunk.elements);
    // The extent of an earlier run is taken already.
    if (chunk.durable.has_value()) plan.free.nvme += chunk.durable->bytes;
    plan.nvme_fixed_bytes += chunk.aside_bytes;
  }
  uint64_t segment_bytes = 0;
  bool recovering = false;
  if (plan.provisional_bytes_per_element > 0) plan.read_back = wanted.read_back();
  {
    absl::MutexLock lock(&mu_);
    recovering = recovering_;
    if (journal_ != nullptr) segment_bytes = journal_->log().segment_bytes();
    if (read_back_ != nullptr && plan.read_back.has_value()) {
      plan.read_back->buffer_bytes_min = plan.read_back->buffer_bytes_max = 0;
    }
  }
  // A log under replay keeps its size.
  const uint64_t log_bytes = recovering ? journal_bytes_ : JournalSizeOf(wanted, segment_bytes).bytes();
  const uint64_t log_bytes_missing = log_bytes - std::min(log_bytes, journal_bytes_);
  if (wanted.logged()) {
    plan.nvme_fixed_bytes += log_bytes_missing;
  } else if (plan.read_back.has_value()) {
    plan.read_back->spill_bytes = log_bytes_missing;
  }
  if (!wanted.durable()) return plan;
  plan.durable = true;
  plan.nvme_fixed_bytes += store.spare_bytes_missing(plan.elements);
  plan.shape.logged = wanted.logged();
  if (!wanted.logged()) plan.shape.flushed_share = 1.0 / static_cast<double>(wanted.spec.pin_interval());
  return plan;
}

storage::StepShape Job::ShapeOf(const storage::ChunkStore& store) const {
  absl::MutexLock lock(&mu_);
  const uint64_t interval = plan_ == nullptr ? 0 : plan_->open().spec().pin_interval();
  return {.machine = around_.machine,
          .threads = around_.compute->threads(),
          .staging_bytes = store.slot_memory_bytes(),
          .durable = store.durable(),
          .logged = interval == 0,
          .flushed_share = interval == 0 ? Journal::kFlushedShare : 1.0 / static_cast<double>(interval),
          .read_back_share = read_back_share_};
}

void Job::NotePlan(const storage::Plan& plan, const storage::PlanRequest& request, bool dry_run) {
  const std::string text = plan.Explain();
  if (dry_run) {
    planned_.set_plan(text);
    for (int i = 0; i < storage::kTierKinds; ++i) {
      const auto kind = static_cast<storage::TierKind>(i);
      v1::PlannedTier* tier = planned_.add_tiers();
      tier->set_tier(storage::TierName(kind));
      tier->set_state_bytes(plan.state[kind] + (kind == storage::TierKind::kNvme ? plan.durable_bytes : 0));
      tier->set_working_bytes(plan.working[kind]);
      if (kind == storage::TierKind::kDram) {
        tier->set_other_bytes(plan.slice_bytes + (plan.state.nvme > 0 ? request.staging_bytes : 0));
      } else if (kind == storage::TierKind::kNvme) {
        tier->set_other_bytes(request.nvme_fixed_bytes + plan.spill_bytes);
      }
    }
    if (plan.prediction.has_value()) *planned_.mutable_prediction() = PredictionMessage(*plan.prediction);
    return;
  }
  spdlog::info("job '{}': {}", name_, text);
  absl::MutexLock lock(&mu_);
  prediction_ = plan.prediction;
}

// A server without chunks of the job keeps promises and decisions all the same.
absl::Status Job::EnsureJournalWithoutChunks(const NewChunks& wanted) {
  {
    absl::MutexLock lock(&mu_);
    if (journal_ != nullptr) return absl::OkStatus();
  }
  absl::MutexLock planning(around_.planning);
  return EnsureJournal(wanted);
}

// For the slices as this epoch cuts them.
absl::Status Job::EnsureSpill(const model::EpochPlan& plan, absl::Span<const std::shared_ptr<HeldChunk>> chunks,
                              NewChunks wanted) {
  if (wanted.logged()) return absl::OkStatus();
  const std::vector<uint64_t> mine = ChunksOf(plan, around_.server_id);
  wanted.spilt_slices.clear();
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i]->logged) wanted.AddSpilt(plan, mine[i]);
  }
  if (wanted.spilt_slices.empty()) return absl::OkStatus();
  absl::MutexLock planning(around_.planning);
  return EnsureJournal(wanted);
}

void Job::NoteLeastDram(uint64_t more) {
  least_dram_ += more;
  {
    absl::MutexLock lock(&mu_);
    if (recovering_) return;  // least_dram_ is still partial: until it is complete, the catalog's number stands
  }
  if (const absl::Status written = WriteLeastDram(around_.catalog, name_, least_dram_); !written.ok()) {
    spdlog::error(
        "job '{}' goes on until it next needs the catalog, which takes no more writes; jobs that come back before it "
        "after a restart may leave it too little DRAM: {}",
        name_, std::string(written.message()));
  }
}

absl::Status Job::AddChunks(const NewChunks& wanted, std::vector<std::shared_ptr<HeldChunk>>* chunks) {
  const kernels::OptimizerSpec& optimizer = wanted.optimizer;
  const std::vector<uint64_t>& elements = wanted.elements;
  const bool dry_run = wanted.dry_run;
  bool logged = false;  // the slices of the new chunks
  std::shared_ptr<storage::ChunkStore> store, old_store;
  std::shared_ptr<SliceMemory> memory;
  std::vector<std::shared_ptr<HeldChunk>> spares, old_spares;  // old parts are destroyed without the lock
  storage::TierBytes freed;                                    // dry run: freed by a real Open that replaces the store
  bool aside = false;                                          // a dry run that must not touch the job's chunks
  bool unlogged = false;                                       // there is a log, and none is wanted
  {
    absl::MutexLock lock(&mu_);
    // A refused Open may have left a store and a log for its own needs.
    const bool adopted = plan_ != nullptr || !chunks_.empty();
    const bool misfit =
        journal_ != nullptr && !adopted && journal_->log().segment_bytes() != JournalSizeOf(wanted, 0).segment_bytes;
    const bool other =
        store_ != nullptr && (!(store_->layout().optimizer() == optimizer) || store_->durable() != wanted.durable() ||
                              store_->records() != wanted.logged() || misfit);
    unlogged = !dry_run && !adopted && durable_ && !wanted.logged();
    if (other && adopted) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec,
                          absl::StrCat("job '", name_, "' has state for ", model::Show(store_->layout().optimizer()),
                                       " on server '", around_.server_id, "', and this Open is for ",
                                       model::Show(optimizer), "; take the spec from GetJob, or drop the job"));
    }
    if (other && !dry_run) {
      // The store was made for an Open that was then refused.
      old_store = std::exchange(store_, nullptr);
      moves_ = nullptr;
      old_spares.swap(spares_);
    }
    if (other && dry_run) freed = TakenBy(*store_, *memory_);
    aside = dry_run && (other || store_ == nullptr);
    if (store_ == nullptr || other) {
      store = MakeStore(wanted);
      memory = std::make_shared<SliceMemory>(around_.tiers);
    } else {
      store = store_;
      memory = memory_;
      spares.swap(spares_);
    }
    if (!dry_run) {
      store_ = store;
      if (memory_ != memory) read_back_ = nullptr;
      memory_ = memory;
    }
  }
  old_spares.clear();
  if (old_store != nullptr) {
    // The catalog never recorded anything of the old store.
    least_dram_ = 0;
    old_store->Discard();
    old_store.reset();
    unlogged = true;
  }
  if (unlogged) {
    // The catalog's entry of the log goes first: a crash then leaves a file that the next Open makes anew.
    BALLAST_RETURN_IF_ERROR(around_.catalog->ErasePrefix(absl::StrCat(CatalogPrefix(name_), kCatalogLog)));
    BALLAST_RETURN_IF_ERROR(RemoveJournal());
  }
  std::vector<std::shared_ptr<HeldChunk>> taken(elements.size());
  std::vector<storage::ChunkToAdd> missing;
  for (size_t i = 0; i < elements.size(); ++i) {
    // The disk knows a durable chunk by its id, so only the very same Open can take the chunk.
    const auto spare = std::find_if(spares.begin(), spares.end(), [&](const auto& s) {
      return s->elements == elements[i] && (!wanted.durable() || s->id == wanted.ids[i]);
    });
    if (spare == spares.end()) {
      missing.push_back({.elements = elements[i], .id = wanted.ids[i], .durable = TakeDurable(wanted.ids[i])});
      if (wanted.durable() && !wanted.logged()) {
        missing.back().aside_bytes = AsideBytes(wanted.ids[i], store->layout().StateBytes(elements[i]));
      }
    } else {
      taken[i] = *spare;
      spares.erase(spare);
    }
  }
  absl::Status status = absl::OkStatus();
  uint64_t next = store->chunk_count();
  planned_.Clear();
  if (missing.empty()) planned_.set_plan("All of the job's chunks have their places here already.");
  if (!missing.empty()) {
    absl::MutexLock planning(around_.planning);
    const storage::PlanRequest request = PlanOf(wanted, *store, missing, freed);
    const absl::StatusOr<storage::Plan> plan = storage::MakePlan(request);
    status = plan.status();
    if (status.ok()) NotePlan(*plan, request, dry_run);
    if (status.ok() && !dry_run && wanted.logged()) status = EnsureJournal(wanted);
    if (status.ok() && !dry_run) status = memory->Reserve(plan->slice_bytes);
    if (status.ok() && !dry_run) {
      logged = plan->reads_back;
      const bool first = request.read_back.has_value() && request.read_back->buffer_bytes_min > 0;
      if (logged) status = TakeReadBack(wanted, plan->slice_bytes - request.read_back->shared_bytes);
      if (status.ok()) status = store->Add(missing, *plan);
      if (!status.ok()) {
        absl::MutexLock lock(&mu_);
        if (first) read_back_ = nullptr;
        memory->Unreserve(plan->slice_bytes);
      }
      if (status.ok() && wanted.durable()) NoteLeastDram(storage::LeastDram(request));
    }
  }
  if (missing.empty() && !dry_run && wanted.logged()) status = EnsureJournalWithoutChunks(wanted);
  if (!status.ok() || dry_run) {
    for (const auto& chunk : taken) {
      if (chunk != nullptr) spares.push_back(chunk);
    }
    absl::MutexLock lock(&mu_);
    if (!aside) spares_ = std::move(spares);
    if (!absl::IsResourceExhausted(status)) return status;
    return model::Annotate(status, absl::StrCat("job '", name_, "' does not fit on server '", around_.server_id, "'"));
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    if (taken[i] == nullptr) {
      taken[i] = std::make_shared<HeldChunk>(memory, next++, wanted.ids[i], elements[i], optimizer.gradient, logged);
      const auto restored = std::find_if(missing.begin(), missing.end(),
                                         [&](const auto& m) { return m.id == wanted.ids[i] && m.durable.has_value(); });
      if (restored != missing.end()) taken[i]->version = restored->durable->version;
    }
    chunks->push_back(taken[i]);
  }
  absl::MutexLock lock(&mu_);
  spares_ = std::move(spares);
  return absl::OkStatus();
}

}  // namespace ballast::services
