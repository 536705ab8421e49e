// How class Job finds slices of a step in its log at recovery. Slices of a decided step are taken by their places, and
// the update reads them. Several gradient slices of a chunk, values of chunks that are not logged, and all slices of an
// undecided step are read into the chunks' intakes.
#include <spdlog/spdlog.h>

#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/replaying.h"
#include "ballast/storage/faults/seeded_bugs.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::services {
namespace {

// Slices that are read together, for chunks that the last step's running update has finished.
constexpr size_t kLoadsMax = 16;

}  // namespace

// A slice on its way from the log to its chunk.
struct Job::SliceLoad {
  const v1::PushRequest* header = nullptr;  // of the log's record
  storage::PayloadPlace payload;
  std::shared_ptr<HeldChunk> chunk;  // null if no chunk needs the slice
  uint32_t slice = 0;                // index into the plan's
  model::Range range;                // in the chunk
  Intake::Receipt receipt;
  absl::Status status;
};

absl::Status Job::FindLoad(int64_t step, SliceLoad* load) const {
  const v1::PushRequest& header = *load->header;
  load->chunk = FindSliceChunk(header, &load->slice);
  if (load->chunk == nullptr) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("the log of job '", name_, "' holds a slice of step ", step,
                                     " that its epoch's tiling does not give to this server"));
  }
  const uint64_t start = load->chunk->layout.range.begin;
  load->range = {header.begin() - start, header.end() - start};
  if (*load->chunk->version >= step && !Seeded(storage::StorageBug::kReplayedTwice)) {
    load->chunk = nullptr;
    return absl::OkStatus();
  }
  const bool value = header.kind() == v1::SLICE_KIND_VALUE;
  const uint64_t bytes = load->range.size() * (value ? sizeof(float) : store_->layout().gradient_element_bytes());
  if (load->payload.bytes == bytes) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kDataLoss, model::kBadLength,
      absl::StrCat("a slice in the log of job '", name_, "' has ", load->payload.bytes, " bytes, expected ", bytes));
}

absl::Status Job::LoadSlices(uint64_t attempt, int64_t step, SliceUse use, Replaying* replaying) {
  using Place = std::tuple<int, uint32_t, uint64_t>;
  const auto place = [](const v1::PushRequest& slice) { return Place(slice.kind(), slice.unit(), slice.begin()); };
  // A slice whose bytes were lost before was pushed again: the last record counts.
  std::map<Place, const Replaying::Slice*> newest;
  for (const Replaying::Slice& slice : replaying->slices) {
    if (slice.header.attempt() == attempt && slice.header.step() == step) newest[place(slice.header)] = &slice;
  }
  std::vector<SliceLoad> loads;
  for (const Replaying::Slice& slice : replaying->slices) {
    if (slice.header.attempt() != attempt || slice.header.step() != step) continue;
    if (newest[place(slice.header)] != &slice) continue;
    SliceLoad load;
    load.header = &slice.header;
    load.payload = slice.payload;
    bool waits = false;
    {
      absl::MutexLock lock(&mu_);
      BALLAST_RETURN_IF_ERROR(FindLoad(step, &load));
      if (load.chunk == nullptr) continue;
      Intake& intake = load.chunk->intake;
      const v1::SliceKind kind = slice.header.kind();
      if (use == SliceUse::kDecided &&
          (intake.Logs(kind) || (kind == v1::SLICE_KIND_GRADIENT && intake.HasOneSlice()))) {
        intake.HoldPlace(load.slice, kind, attempt, load.payload);
        replaying->payload_bytes += load.payload.bytes;
        continue;
      }
      // Values and gradients of the same elements are read in turn, and logged slices as far as memory allows.
      waits = intake.Busy(load.range) || !memory_->Fits(intake.BufferBytes(load.slice, kind));
    }
    if (waits || loads.size() == kLoadsMax) BALLAST_RETURN_IF_ERROR(ReadSlices(use, &loads, replaying));
    BALLAST_RETURN_IF_ERROR(BeginLoad(&load, replaying));
    loads.push_back(std::move(load));
  }
  return ReadSlices(use, &loads, replaying);
}

absl::Status Job::BeginLoad(SliceLoad* load, Replaying* replaying) {
  Intake& intake = load->chunk->intake;
  const v1::PushRequest& header = *load->header;
  absl::StatusOr<Intake::Receipt> receipt;
  {
    absl::MutexLock lock(&mu_);
    const auto free = [&] {
      mu_.AssertHeld();
      return load->chunk->updates_pending == 0 || !replaying->updating;
    };
    mu_.Await(absl::Condition(&free));
    receipt = intake.BeginReceive(load->slice, header.kind(), header.attempt());
  }
  if (absl::IsResourceExhausted(receipt.status())) {
    // As for a push, unused gradient buffers make room, once the last step's update has finished.
    BALLAST_RETURN_IF_ERROR(replaying->FinishUpdates());
    absl::MutexLock lock(&mu_);
    for (const auto& other : chunks_) other->intake.ReleaseIdle();
    receipt = intake.BeginReceive(load->slice, header.kind(), header.attempt());
  }
  BALLAST_RETURN_IF_ERROR(receipt.status());
  load->receipt = *std::move(receipt);
  return absl::OkStatus();
}

absl::Status Job::ReadSlices(SliceUse use, std::vector<SliceLoad>* loads, Replaying* replaying) {
  const auto read = [&](uint64_t i) {
    SliceLoad& load = (*loads)[i];
    load.status = storage::ReadPayload(*replaying->file, load.payload, {load.receipt.to, load.payload.bytes});
  };
  // Several at a time: some are checked while others are on their way from the disk.
  around_.compute->ParallelFor(loads->size(), read);
  absl::Status status;
  absl::MutexLock lock(&mu_);
  for (const SliceLoad& load : *loads) {
    replaying->payload_bytes += load.payload.bytes;
    if (load.status.ok()) {
      load.chunk->intake.EndRestore(load.receipt, load.payload);
      continue;
    }
    load.chunk->intake.EndReceive(load.receipt, /*ok=*/false);
    // Whatever keeps its bytes from being read, its rank has them.
    if (use != SliceUse::kPushed) {
      status.Update(load.status);
      continue;
    }
    spdlog::warn("job '{}': a slice of step {}, which is not decided, is pushed again: {}", name_, load.header->step(),
                 std::string(load.status.message()));
    machine_->Lose(*load.header);
  }
  loads->clear();
  return status;
}

}  // namespace ballast::services
