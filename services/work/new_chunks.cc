#include "ballast/services/work/new_chunks.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/update/log_reads.h"

namespace ballast::services {
namespace {

// Buffers for incoming slices: whole chunks as fp32, the largest slices. With 32 MiB in flight a disk writes at its
// full speed.
constexpr uint64_t kBuffersMax = 8;

// Buffers for logged values of frozen chunks: on their way in, and one that they are read back to.
constexpr uint64_t kValueBuffers = 5;

// The free part of the budgets, once `returned` has come back.
storage::TierBytes Free(const storage::Tiers& tiers, const storage::TierBytes& returned) {
  const auto [budget, used, parts, devices] = tiers.usage();
  storage::TierBytes free;
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    const uint64_t taken = used[kind] - std::min(used[kind], returned[kind]);
    free[kind] = budget[kind] > taken ? budget[kind] - taken : 0;
  }
  return free;
}

}  // namespace

std::vector<uint64_t> ChunksOf(const model::EpochPlan& plan, absl::string_view server_id) {
  std::vector<uint64_t> mine;
  const absl::StatusOr<uint32_t> member = plan.FindMember(server_id);
  if (!member.ok()) return mine;
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (plan.server_of(chunk.index) == *member) mine.push_back(chunk.index);
  }
  return mine;
}

uint64_t SliceBytesPerElement(const kernels::OptimizerSpec& optimizer) {
  return std::max<uint64_t>(sizeof(float), kernels::ElementBytes(optimizer.gradient) + 2);
}

LargestSlices::LargestSlices(const v1::JobSpec& spec, const kernels::OptimizerSpec& optimizer)
    : values_bytes(storage::AlignUp(spec.chunk_elements() * sizeof(float))),
      gradient_bytes(storage::AlignUp(spec.chunk_elements() * kernels::ElementBytes(optimizer.gradient))) {}

void NewChunks::AddSpilt(const model::EpochPlan& plan, uint64_t chunk) {
  std::vector<uint64_t>* const to = spilt.Of(plan.layout().chunks()[chunk]);
  for (const uint32_t slice : plan.slices_of_chunk(chunk)) to->push_back(plan.slices()[slice].range.size());
}

storage::PlanRequest::ReadBack NewChunks::read_back() const {
  const LargestSlices largest(spec, optimizer);
  return {.shared_bytes = shared_elements * kernels::ElementBytes(optimizer.gradient),
          .buffer_bytes_min = 2 * largest.values_bytes + largest.gradient_bytes,
          .buffer_bytes_max =
              (kBuffersMax + 1) * largest.values_bytes + storage::LogReads::kReadsMax * largest.gradient_bytes};
}

JournalSize NewChunks::journal_size(uint64_t segment_bytes) const {
  const Logged& takes = logged() ? all : spilt;
  return SizeJournal({.chunk_elements = spec.chunk_elements(),
                      .elements = takes.trained,
                      .frozen = takes.frozen,
                      .gradient_bytes = kernels::ElementBytes(optimizer.gradient),
                      .snapshot_bytes = logged() ? snapshot_bytes : 0,
                      .segment_bytes = segment_bytes,
                      .steps = logged() ? log_steps : Journal::kStepsSpilt,
                      .segments_reserved = logged() ? Journal::kSegmentsReserved : Journal::kSpillSegmentsReserved});
}

std::string NewChunks::ExplainLog() const {
  const auto disk = [this](uint64_t steps) {
    NewChunks of = *this;
    of.log_steps = steps;
    return absl::StrFormat("%.2f GiB of nvme", static_cast<double>(of.journal_size(0).bytes()) / (1 << 30));
  };
  std::string text = absl::StrFormat("The gradient log holds %d steps and takes %s", log_steps, disk(log_steps));
  if (log_steps_max > log_steps) {
    absl::StrAppendFormat(&text, "; while steps wait for flushes it gets longer, up to %d steps and %s", log_steps_max,
                          disk(log_steps_max));
  }
  return text + ".";
}

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

storage::PlanRequest ChunkPlans::RequestFor(const NewChunks& wanted, const storage::ChunkStore& store,
                                            const std::vector<storage::ChunkToAdd>& missing,
                                            const storage::TierBytes& returned) const {
  // Where slices are lent, they need no memory here.
  const bool pushed = core_->around.working_copies || wanted.logged();
  storage::PlanRequest plan{.free = Free(*core_->around.tiers, returned),
                            .elements = {},
                            .frozen = {},
                            .layout = store.layout(),
                            .provisional_bytes_per_element = pushed ? SliceBytesPerElement(wanted.optimizer) : 0,
                            .staging_bytes = store.staging_bytes_missing(),
                            .flush_buffer_bytes = store.flush_buffer_bytes_missing(),
                            .placed = store.placed(),
                            .shape = prediction_->ShapeOf(store)};
  if (core_->around.working_copies) {
    plan.pull = store.pull_memory_missing(wanted.spec.chunk_elements(), store.chunk_count() + missing.size());
  }
  for (const storage::ChunkToAdd& chunk : missing) {
    plan.elements.push_back(chunk.elements);
    plan.frozen.push_back(chunk.frozen);
    // The extent of an earlier run is taken already.
    if (chunk.durable.has_value()) plan.free.nvme += chunk.durable->bytes;
    plan.nvme_fixed_bytes += chunk.aside_bytes;
    if (!pushed || chunk.frozen == storage::Frozen::kNo) continue;
    if (wanted.logged()) {
      plan.value_buffer_bytes = kValueBuffers * LargestSlices(wanted.spec, wanted.optimizer).values_bytes;
    } else if (!chunk.durable.has_value()) {
      plan.passing_bytes += chunk.elements * sizeof(float);
    }
  }
  // A job has one set of these.
  const bool has_some = std::any_of(plan.placed.begin(), plan.placed.end(),
                                    [](const auto& chunk) { return chunk.frozen != storage::Frozen::kNo; });
  if (has_some) plan.value_buffer_bytes = 0;
  uint64_t segment_bytes = 0;
  bool recovering = false;
  if (pushed) plan.read_back = wanted.read_back();
  {
    JobMutexLock lock(&core_->mu);
    recovering = core_->recovering;
    segment_bytes = journal_->segment_bytes();
    if (room_->read_back() != nullptr && plan.read_back.has_value()) {
      plan.read_back->buffer_bytes_min = plan.read_back->buffer_bytes_max = 0;
    }
  }
  // A log under replay keeps its size.
  const uint64_t log_bytes = recovering ? journal_->bytes() : wanted.journal_size(segment_bytes).bytes();
  const uint64_t log_bytes_missing = log_bytes - std::min(log_bytes, journal_->bytes());
  if (wanted.logged()) {
    plan.nvme_fixed_bytes += log_bytes_missing;
  } else if (plan.read_back.has_value()) {
    plan.read_back->spill_bytes = log_bytes_missing;
  }
  if (!wanted.durable()) return plan;
  plan.durable = true;
  plan.nvme_fixed_bytes += store.spare_bytes_missing(missing);
  plan.shape.logged = wanted.logged();
  if (!wanted.logged()) plan.shape.flushed_share = 1.0 / static_cast<double>(wanted.spec.pin_interval());
  return plan;
}

void ChunkPlans::Note(const NewChunks& wanted, const storage::Plan& plan, const storage::PlanRequest& request,
                      v1::OpenResponse* answer) {
  if (answer == nullptr) {
    spdlog::info("job '{}': {}", core_->name, plan.Explain());
    JobMutexLock lock(&core_->mu);
    prediction_->Set(plan.prediction);
    return;
  }
  answer->set_plan(plan.Explain());
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::PlannedTier* tier = answer->add_tiers();
    tier->set_tier(storage::TierName(kind));
    tier->set_state_bytes(plan.state[kind] + (kind == storage::TierKind::kNvme ? plan.durable_bytes : 0));
    tier->set_working_bytes(plan.working[kind]);
    if (kind == storage::TierKind::kDram) {
      const uint64_t staging = plan.state.nvme > 0                     ? request.staging_bytes
                               : request.durable && plan.state.hbm > 0 ? request.flush_buffer_bytes
                                                                       : 0;
      tier->set_other_bytes(plan.slice_bytes + plan.pull.bytes() + staging + wanted.retiled.slice_bytes);
    } else if (kind == storage::TierKind::kNvme) {
      const bool counted = wanted.logged() || plan.spill_bytes > 0;
      tier->set_other_bytes(request.nvme_fixed_bytes + (counted ? plan.spill_bytes : wanted.retiled.journal_bytes));
    }
  }
  if (plan.prediction.has_value()) *answer->mutable_prediction() = PredictionMessage(*plan.prediction);
}

void ChunkPlans::NoteHeld(const NewChunks& wanted, v1::OpenResponse* answer) {
  answer->set_plan("All of the job's chunks have their places here already.");
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::PlannedTier* tier = answer->add_tiers();
    tier->set_tier(storage::TierName(kind));
    if (kind == storage::TierKind::kDram) tier->set_other_bytes(wanted.retiled.slice_bytes);
    if (kind == storage::TierKind::kNvme) tier->set_other_bytes(wanted.retiled.journal_bytes);
  }
}

}  // namespace ballast::services
