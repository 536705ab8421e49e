#include "ballast/services/space/new_chunks.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/store/log_reads.h"

namespace ballast::services {
namespace {

// Buffers for incoming slices: whole chunks as fp32, the largest slices. With 32 MiB in flight a disk writes at its
// full speed.
constexpr uint64_t kBuffersMax = 8;

}  // namespace

std::vector<uint64_t> ChunksOf(const model::EpochPlan& plan, absl::string_view server_id) {
  std::vector<uint64_t> mine;
  const absl::StatusOr<uint32_t> member = plan.FindMember(server_id);
  if (!member.ok()) return mine;
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (plan.Has(*member, chunk.index)) mine.push_back(chunk.index);
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
                      .steps = logged() ? log_steps : kStepsSpilt,
                      .segments_reserved = logged() ? kLogSegmentsReserved : kSpillSegmentsReserved});
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

}  // namespace ballast::services
