// How class Job bounds the memory of slices that do not fit: each slice has a buffer until the log has it, and an
// update reads slices back into further buffers.
//
// The reservation is for all slices of the job. A push that finds no room waits while logged slices are on their way,
// or a decided step is applied: both give their buffers back without any further push. If there are neither, the push
// takes more of the budget or is refused. So no push waits for ever, in whatever order ranks push.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/update/log_reads.h"

namespace ballast::services {
namespace {

// Buffers for incoming slices: whole chunks as fp32, the largest slices. With 32 MiB in flight a disk writes at its
// full speed.
constexpr uint64_t kBuffersMax = 8;

// Memory for slices of a chunk: the gradient and 2 bytes beside it. A transaction of values alone, 4 bytes, always
// fits.
uint64_t BytesPerElement(const kernels::OptimizerSpec& optimizer) {
  return std::max<uint64_t>(sizeof(float), kernels::ElementBytes(optimizer.gradient) + 2);
}

struct LargestSlices {
  uint64_t values_bytes = 0;
  uint64_t gradient_bytes = 0;
};

LargestSlices LargestOf(const v1::JobSpec& spec, const kernels::OptimizerSpec& optimizer) {
  return {storage::AlignUp(spec.chunk_elements() * sizeof(float)),
          storage::AlignUp(spec.chunk_elements() * kernels::ElementBytes(optimizer.gradient))};
}

}  // namespace

uint64_t Job::SliceBytesPerElement(const NewChunks& wanted) const {
  return around_.working_copies || wanted.logged() ? BytesPerElement(wanted.optimizer) : 0;
}

storage::PlanRequest::ReadBack Job::NewChunks::read_back() const {
  const LargestSlices largest = LargestOf(spec, optimizer);
  return {.shared_bytes = shared_elements * kernels::ElementBytes(optimizer.gradient),
          .buffer_bytes_min = 2 * largest.values_bytes + largest.gradient_bytes,
          .buffer_bytes_max =
              (kBuffersMax + 1) * largest.values_bytes + storage::LogReads::kReadsMax * largest.gradient_bytes};
}

absl::Status Job::TakeReadBack(const NewChunks& wanted, uint64_t buffer_bytes) {
  std::shared_ptr<SliceMemory> memory;
  {
    absl::MutexLock lock(&mu_);
    if (read_back_ != nullptr) return absl::OkStatus();
    memory = memory_;
  }
  // Reads get half of the bytes beyond the minimum.
  const LargestSlices largest = LargestOf(wanted.spec, wanted.optimizer);
  const uint64_t more = buffer_bytes - wanted.read_back().buffer_bytes_min;
  const uint64_t reads = std::min(1 + more / 2 / largest.gradient_bytes, storage::LogReads::kReadsMax);
  BALLAST_ASSIGN_OR_RETURN(auto buffer,
                           SliceMemory::Allocate(memory, largest.values_bytes + reads * largest.gradient_bytes));
  absl::MutexLock lock(&mu_);
  read_back_ = std::move(buffer);
  return absl::OkStatus();
}

absl::Status Job::TakeSharedGradients(const model::EpochPlan& plan,
                                      absl::Span<const std::shared_ptr<HeldChunk>> chunks) {
  std::shared_ptr<storage::ChunkStore> store;
  std::shared_ptr<SliceMemory> memory;
  uint64_t needed = 0;
  {
    absl::MutexLock lock(&mu_);
    store = store_;
    memory = memory_;
    if (read_back_ == nullptr) return absl::OkStatus();
    needed = read_back_->bytes() + LargestOf(plan.open().spec(), store->layout().optimizer()).values_bytes;
    for (const auto& spare : spares_) {
      if (!spare->logged) needed += spare->elements * BytesPerElement(store->layout().optimizer());
    }
  }
  for (const auto& chunk : chunks) {
    if (!chunk->logged) {
      needed += chunk->elements * BytesPerElement(store->layout().optimizer());
    } else if (plan.slices_of_chunk(chunk->id).size() > 1) {
      needed += chunk->elements * store->layout().gradient_element_bytes();
    }
  }
  // Nobody may take meanwhile what moves give back.
  absl::MutexLock planning(around_.planning);
  while (memory->reserved_bytes() < needed) {
    const absl::Status reserved = memory->Reserve(needed - memory->reserved_bytes());
    if (reserved.ok()) break;
    BALLAST_ASSIGN_OR_RETURN(const bool moved, MoveOneDown(store.get()));
    if (!moved) return reserved;
  }
  return absl::OkStatus();
}

// Moves the last chunk in DRAM, which the next forward needs latest. False if there is none.
absl::StatusOr<bool> Job::MoveOneDown(storage::ChunkStore* store) {
  const std::vector<storage::PlacedChunk> placed = store->placed();
  const auto last = std::find_if(placed.rbegin(), placed.rend(), [](const storage::PlacedChunk& chunk) {
    return chunk.placement.state == storage::TierKind::kDram;
  });
  if (last == placed.rend()) return false;
  const auto chunk = static_cast<uint64_t>(placed.rend() - last) - 1;
  if (store->dirty(chunk)) BALLAST_RETURN_IF_ERROR(Flush(store, {&chunk, 1}, applied_));
  BALLAST_RETURN_IF_ERROR(store->Move(chunk, storage::TierKind::kNvme));
  spdlog::info("job '{}': chunk {} of its store moved to nvme, its ranks now share more chunks", name_, chunk);
  return true;
}

absl::Status Job::PrepareReadBack(StepWork* work) {
  std::vector<uint64_t> elements;
  for (const auto& chunk : work->touched) elements.push_back(chunk->elements);
  const storage::LogReads::Sizes sizes = storage::LogReads::SizesOf(work->updates, elements);
  if (sizes.bytes_min() == 0) return absl::OkStatus();
  std::shared_ptr<SliceMemory> memory;
  {
    absl::MutexLock lock(&mu_);
    work->read_back = read_back_;
    memory = memory_;
  }
  if (work->read_back != nullptr && work->read_back->bytes() >= sizes.bytes_min()) return absl::OkStatus();
  // In recovery every job's slices are in the log, and the memory for them is free.
  uint64_t reads = storage::LogReads::kReadsMax;
  const auto bytes = [&] { return sizes.values_bytes + reads * sizes.gradient_bytes; };
  while (reads > 1 && !memory->Fits(bytes())) reads /= 2;
  BALLAST_ASSIGN_OR_RETURN(work->read_back, SliceMemory::Allocate(memory, bytes()));
  return absl::OkStatus();
}

bool Job::TakesBuffer(const std::shared_ptr<HeldChunk>& chunk, uint32_t slice, v1::SliceKind kind) {
  if (buffers_returning_ == 0 || memory_->Fits(chunk->intake.BufferBytes(slice, kind))) return true;
  if (std::find(short_of_buffers_.begin(), short_of_buffers_.end(), chunk) == short_of_buffers_.end()) {
    short_of_buffers_.push_back(chunk);
  }
  return false;
}

void Job::BufferReturned(Replies* replies) {
  --buffers_returning_;
  while (!short_of_buffers_.empty()) {
    const std::shared_ptr<HeldChunk> chunk = short_of_buffers_.front();
    short_of_buffers_.pop_front();
    WakePushes(chunk.get(), replies);
    if (short_of_buffers_.empty() || short_of_buffers_.back() != chunk) continue;
    // Room is still short: the chunk stays first.
    short_of_buffers_.pop_back();
    short_of_buffers_.push_front(chunk);
    return;
  }
}

}  // namespace ballast::services
