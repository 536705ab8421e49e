#include "ballast/services/job/logged_slices.h"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/storage/log/payload_reader.h"

namespace ballast::services {
namespace {

// Slices that are read together, for chunks that the last step's running update has finished.
constexpr size_t kLoadsMax = 16;

}  // namespace

absl::Status LoggedSlices::Find(SliceLoad* load) const {
  const v1::PushRequest& header = *load->header;
  load->chunk = core_->state.FindSlice(header, &load->slice);
  if (load->chunk == nullptr) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("the log of job '", core_->name, "' holds a slice of step ", header.step(),
                                     " that its epoch's tiling does not give to this server"));
  }
  if (*load->chunk->version() >= header.step()) {
    load->chunk = nullptr;
    return absl::OkStatus();
  }
  const bool value = header.kind() == v1::SLICE_KIND_VALUE;
  const uint64_t bytes = (header.end() - header.begin()) *
                         (value ? sizeof(float) : core_->state.store()->layout().gradient_element_bytes());
  if (load->payload.bytes == bytes) return absl::OkStatus();
  return model::Error(absl::StatusCode::kDataLoss, model::kBadLength,
                      absl::StrCat("a slice in the log of job '", core_->name, "' has ", load->payload.bytes,
                                   " bytes, expected ", bytes));
}

absl::Status LoggedSlices::Load(absl::Span<const LoggedSlice* const> slices, Use use, Replay* replay) {
  std::vector<SliceLoad> loads;
  for (const LoggedSlice* slice : slices) {
    SliceLoad load;
    load.header = &slice->header;
    load.payload = slice->payload;
    bool waits = false;
    {
      JobMutexLock lock(&core_->mu);
      BALLAST_RETURN_IF_ERROR(Find(&load));
      if (load.chunk == nullptr) {
        replay->Pass(load.payload.bytes);
        continue;
      }
      Intake& intake = load.chunk->intake;
      const v1::SliceKind kind = slice->header.kind();
      const Intake::Outlook outlook = intake.LookFor(load.slice, kind);
      if (use == Use::kDecided && (outlook.logged || (kind == v1::SLICE_KIND_GRADIENT && intake.HasOneSlice()))) {
        intake.HoldPlace(load.slice, kind, slice->header.attempt(), load.payload);
        continue;
      }
      // Values and gradients of the same elements are read in turn, and logged slices as far as memory allows.
      waits = outlook.busy || !room_->memory()->Fits(outlook.buffer_bytes);
    }
    if (waits || loads.size() == kLoadsMax) BALLAST_RETURN_IF_ERROR(Read(use, &loads, replay));
    BALLAST_RETURN_IF_ERROR(Begin(&load, replay));
    loads.push_back(std::move(load));
  }
  return Read(use, &loads, replay);
}

absl::Status LoggedSlices::Begin(SliceLoad* load, Replay* replay) {
  Intake& intake = load->chunk->intake;
  const v1::PushRequest& header = *load->header;
  absl::StatusOr<Intake::Receipt> receipt;
  {
    JobMutexLock lock(&core_->mu);
    const auto free = [&] {
      core_->mu.AssertHeld();
      return !load->chunk->awaits_update() || !replay->updating;
    };
    core_->mu.Await(absl::Condition(&free));
    receipt = intake.BeginReceive(load->slice, header.kind(), header.attempt());
  }
  if (absl::IsResourceExhausted(receipt.status())) {
    // As for a push, unused gradient buffers make room, once the last step's update has finished.
    BALLAST_RETURN_IF_ERROR(replay->FinishUpdates());
    JobMutexLock lock(&core_->mu);
    for (const auto& other : core_->state.chunks()) other->intake.ReleaseIdle();
    receipt = intake.BeginReceive(load->slice, header.kind(), header.attempt());
  }
  BALLAST_RETURN_IF_ERROR(receipt.status());
  load->receipt = *std::move(receipt);
  return absl::OkStatus();
}

absl::Status LoggedSlices::Read(Use use, std::vector<SliceLoad>* loads, Replay* replay) {
  const auto read = [&](uint64_t i) {
    SliceLoad& load = (*loads)[i];
    load.status = storage::ReadPayload(*replay->file, load.payload, {load.receipt.to, load.payload.bytes});
  };
  // Several at a time: some are checked while others are on their way from the disk.
  core_->around.compute->ParallelFor(loads->size(), read);
  absl::Status status;
  JobMutexLock lock(&core_->mu);
  for (const SliceLoad& load : *loads) {
    replay->Count(load.payload.bytes);
    if (load.status.ok()) {
      load.chunk->intake.EndRestore(load.receipt, load.payload);
      continue;
    }
    load.chunk->intake.Unlogged(load.receipt, /*taken=*/false);
    if (use != Use::kPushed) {
      status.Update(load.status);
      continue;
    }
    spdlog::warn("job '{}': a slice of step {}, which is not decided, is pushed again: {}", core_->name,
                 load.header->step(), std::string(load.status.message()));
    core_->machine->Lose(*load.header);
  }
  loads->clear();
  return status;
}

}  // namespace ballast::services
