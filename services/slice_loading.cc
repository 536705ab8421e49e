// How class Job reads slices of a step back from its log into the chunks' intakes, at recovery.
#include <spdlog/spdlog.h>

#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/replaying.h"
#include "ballast/storage/io/seeded_bugs.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::services {
namespace {

// Slices that are read together: of chunks that the last step's update is through with, while it goes on.
constexpr size_t kLoadsMax = 16;

}  // namespace

// A slice on its way from the log to its chunk.
struct Job::SliceLoad {
  const v1::PushRequest* header = nullptr;  // of the log's record
  std::shared_ptr<HeldChunk> chunk;
  Intake::Receipt receipt;
  storage::PayloadPlace payload;
  absl::Status status;
};

absl::Status Job::LoadSlices(uint64_t attempt, int64_t step, LostSlice lost, Replaying* replaying) {
  using Place = std::tuple<int, uint32_t, uint64_t>;
  const auto place = [](const v1::PushRequest& slice) { return Place(slice.kind(), slice.unit(), slice.begin()); };
  // One whose bytes were lost before was pushed again: the last record counts.
  std::map<Place, const Replaying::Slice*> newest;
  for (const Replaying::Slice& slice : replaying->slices) {
    if (slice.header.attempt() == attempt && slice.header.step() == step) newest[place(slice.header)] = &slice;
  }
  std::vector<SliceLoad> loads;
  for (const Replaying::Slice& slice : replaying->slices) {
    if (slice.header.attempt() != attempt || slice.header.step() != step) continue;
    if (newest[place(slice.header)] != &slice) continue;
    uint32_t index = 0;
    SliceLoad load;
    load.header = &slice.header;
    load.payload = slice.payload;
    bool busy = false;
    {
      absl::MutexLock lock(&mu_);
      load.chunk = FindSliceChunk(slice.header, &index);
      if (load.chunk == nullptr) {
        return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                            absl::StrCat("the log of job '", name_, "' holds a slice of step ", step,
                                         " that its epoch's tiling does not give to this server"));
      }
      if (*load.chunk->version >= step && !Seeded(storage::StorageBug::kReplayedTwice)) continue;
      const uint64_t start = load.chunk->layout.range.begin;
      busy = load.chunk->intake.Busy({slice.header.begin() - start, slice.header.end() - start});
    }
    // Values and gradients of the same elements, one after the other.
    if (busy || loads.size() == kLoadsMax) BALLAST_RETURN_IF_ERROR(ReadSlices(lost, &loads, replaying));
    BALLAST_RETURN_IF_ERROR(BeginLoad(index, &load, replaying));
    loads.push_back(std::move(load));
  }
  return ReadSlices(lost, &loads, replaying);
}

absl::Status Job::BeginLoad(uint32_t slice, SliceLoad* load, Replaying* replaying) {
  Intake& intake = load->chunk->intake;
  absl::StatusOr<Intake::Receipt> receipt;
  {
    absl::MutexLock lock(&mu_);
    const auto free = [&] {
      mu_.AssertHeld();
      return load->chunk->updates_pending == 0 || !replaying->updating;
    };
    mu_.Await(absl::Condition(&free));
    receipt = intake.BeginReceive(slice, load->header->kind(), load->header->attempt());
  }
  if (absl::IsResourceExhausted(receipt.status())) {
    // As for a push, buffers that no slice is in make room, once the last step's update is through with its own.
    BALLAST_RETURN_IF_ERROR(replaying->FinishUpdates());
    absl::MutexLock lock(&mu_);
    for (const auto& other : chunks_) other->intake.ReleaseIdle();
    receipt = intake.BeginReceive(slice, load->header->kind(), load->header->attempt());
  }
  BALLAST_RETURN_IF_ERROR(receipt.status());
  load->receipt = *std::move(receipt);
  return absl::OkStatus();
}

absl::Status Job::ReadSlices(LostSlice lost, std::vector<SliceLoad>* loads, Replaying* replaying) {
  const uint64_t gradient_bytes = loads->empty() ? 0 : store_->layout().gradient_element_bytes();
  const auto read = [&](uint64_t i) {
    SliceLoad& load = (*loads)[i];
    const bool value = load.receipt.kind == v1::SLICE_KIND_VALUE;
    const uint64_t bytes = load.receipt.range.size() * (value ? sizeof(float) : gradient_bytes);
    load.status = load.payload.bytes == bytes
                      ? storage::ReadPayload(*replaying->file, load.payload, {load.receipt.to, bytes})
                      : model::Error(absl::StatusCode::kDataLoss, model::kBadLength,
                                     absl::StrCat("a slice in the log of job '", name_, "' has ", load.payload.bytes,
                                                  " bytes, expected ", bytes));
  };
  // Several at a time: one is checked while others are on their way from the disk.
  around_.compute->ParallelFor(loads->size(), read);
  absl::Status status;
  absl::MutexLock lock(&mu_);
  for (const SliceLoad& load : *loads) {
    replaying->payload_bytes += load.payload.bytes;
    if (load.status.ok()) {
      load.chunk->intake.EndRestore(load.receipt);
      continue;
    }
    load.chunk->intake.EndReceive(load.receipt, /*ok=*/false);
    if (lost == LostSlice::kRefused || !absl::IsDataLoss(load.status)) {
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
