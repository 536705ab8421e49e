#include "ballast/services/job/loans.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {
namespace {

// Norms of small segments are computed together, so that a thread's share is worth waking the thread.
constexpr uint64_t kNormElementsMin = uint64_t{1} << 16;

absl::Status Unsupported(absl::string_view message) {
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported, message);
}

constexpr v1::SliceKind kKinds[] = {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE};

v1::PushRequest HeaderOf(const model::LoanRequest& request, v1::SliceKind kind, const model::Slice& slice) {
  v1::PushRequest header;
  header.set_job(request.job);
  *header.mutable_epoch() = request.epoch;
  header.set_step(request.step);
  header.set_attempt(request.attempt);
  header.set_rank(slice.rank);
  header.set_kind(kind);
  header.set_unit(slice.unit);
  header.set_begin(slice.range.begin);
  header.set_end(slice.range.end);
  return header;
}

}  // namespace

// Tells the job, if it still exists, that the loan ends; waits for the job's updates in any case.
class Loans::Loan final : public model::Loan {
 public:
  Loan(Loans* loans, std::shared_ptr<LentMemory> lent)
      : loans_(loans), job_(loans->core_->owner()), lent_(std::move(lent)) {}
  ~Loan() override {
    if (const std::shared_ptr<const void> job = job_.lock()) loans_->End(lent_);
    lent_->AwaitUnused();
  }

 private:
  Loans* const loans_;  // a part of the job
  const std::weak_ptr<const void> job_;
  const std::shared_ptr<LentMemory> lent_;
};

absl::StatusOr<std::unique_ptr<model::Loan>> Loans::Lend(const model::LoanRequest& request) {
  absl::Status status;
  std::unique_ptr<model::Loan> loan;
  Slices slices;
  core_->Locked([&](Replies*) {
    core_->mu.AssertHeld();
    status = Check(request);
    if (!status.ok()) return;
    core_->state.Lend(
        std::make_shared<LentMemory>(request, *core_->state.plan(), core_->state.store()->layout().optimizer()));
    loan = std::make_unique<Loan>(this, core_->state.lent());
    status = Begin(&slices);
  });
  BALLAST_RETURN_IF_ERROR(status);
  ComputeNorms(&slices);
  core_->Locked([&](Replies*) {
    core_->mu.AssertHeld();
    status = Finish(slices);
  });
  BALLAST_RETURN_IF_ERROR(status);
  return loan;
}

absl::Status Loans::Check(const model::LoanRequest& request) const {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  BALLAST_RETURN_IF_ERROR(core_->machine->CheckEpoch(request.epoch));
  if (core_->state.store()->layout().working_copies())
    return Unsupported("this server keeps working copies, and takes no loans");
  if (core_->state.plan()->world_size() != 1 || core_->state.plan()->open().has_table() ||
      core_->state.chunks().size() != core_->state.plan()->layout().chunks().size()) {
    return Unsupported("memory is lent by the one rank of a job to its one server");
  }
  if (core_->state.lent() != nullptr && !core_->state.lent()->applied) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kBadRequest,
        absl::StrCat("memory is lent for step ", core_->state.lent()->request().step, " already; end that loan"));
  }
  const size_t tensors = core_->state.plan()->layout().tensors().size();
  if (request.tensors.size() != tensors) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("the job has ", tensors, " tensors, ", request.tensors.size(), " were lent"));
  }
  for (const model::LentTensor& tensor : request.tensors) {
    if (core_->recoverable() && (tensor.gradient != nullptr || tensor.value != nullptr)) {
      return Unsupported("with durability step gradients and values go to the log: they are pushed");
    }
    if (core_->state.store()->layout().lends_master() && tensor.gradient != nullptr && tensor.working == nullptr) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                          "a gradient was lent without its parameter, which is its own master in this job");
    }
    const kernels::Dtype working = core_->state.store()->layout().optimizer().working;
    if (tensor.working != nullptr && kernels::GrainOf(working) > 1) {
      return Unsupported(absl::StrCat(model::NameOf(working), " working parameters are pulled: updates do not write ",
                                      "them to the trainer's memory. Lend gradients and values alone"));
    }
    if (tensor.value != nullptr && tensor.value_dtype != kernels::Dtype::kF32 && tensor.value_dtype != working) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadDtype,
                          "lent values are neither fp32 nor of the job's working dtype");
    }
  }
  return absl::OkStatus();
}

absl::Status Loans::Begin(Slices* slices) {
  const model::LoanRequest& request = core_->state.lent()->request();
  absl::Status status;
  for (const v1::SliceKind kind : kKinds) {
    for (const model::Slice& slice : core_->state.plan()->slices()) {
      if (!status.ok() || !core_->state.plan()->Touches(slice, core_->state.lent()->presence(kind))) continue;
      v1::PushRequest header = HeaderOf(request, kind, slice);
      const absl::StatusOr<StepMachine::Admission> admission =
          core_->machine->Admit(header, [](uint32_t) { return true; });
      status = admission.status();
      if (!status.ok() || *admission == StepMachine::Admission::kHeld) continue;
      slices->headers.push_back(std::move(header));
      status = core_->state.Held(slice.chunk).status();
    }
  }
  if (!status.ok()) {
    for (const v1::PushRequest& header : slices->headers) (void)core_->machine->EndPush(header, status);
    return status;
  }
  // A single rank has one slice of a chunk, with whole segments.
  for (const v1::PushRequest& header : slices->headers) {
    uint32_t slice = 0;
    const std::shared_ptr<HeldChunk> chunk = core_->state.FindSlice(header, &slice);
    chunk->intake.HoldLent(slice, header.kind(), request.attempt);
    for (size_t i = 0; i < chunk->layout().segments.size(); ++i) {
      const model::Segment& segment = chunk->layout().segments[i];
      const uint64_t at = segment.in_chunk.begin;
      const bool value = header.kind() == v1::SLICE_KIND_VALUE;
      const std::byte* const lent = value ? core_->state.lent()->Value(chunk->layout(), segment.tensor, at)
                                          : core_->state.lent()->Gradient(chunk->layout(), segment.tensor, at);
      if (lent == nullptr) continue;
      slices->segments.push_back({.chunk = chunk,
                                  .generation = chunk->intake.generation(),
                                  .index = i,
                                  .kind = header.kind(),
                                  .dtype = value ? core_->state.lent()->value_dtype(segment.tensor)
                                                 : core_->state.store()->layout().optimizer().gradient,
                                  .lent = lent,
                                  .elements = segment.in_chunk.size(),
                                  .norm = {}});
    }
  }
  return absl::OkStatus();
}

void Loans::ComputeNorms(Slices* slices) const {
  std::vector<size_t> ends;  // ends of the threads' shares
  uint64_t elements = 0;
  for (size_t i = 0; i < slices->segments.size(); ++i) {
    elements += slices->segments[i].elements;
    if (elements < kNormElementsMin && i + 1 < slices->segments.size()) continue;
    ends.push_back(i + 1);
    elements = 0;
  }
  core_->around.compute->ParallelFor(ends.size(), [&](uint64_t piece) {
    for (size_t i = piece == 0 ? 0 : ends[piece - 1]; i < ends[piece]; ++i) {
      Slices::Segment& segment = slices->segments[i];
      segment.norm = kernels::SquaredNorm(segment.dtype, segment.lent, segment.elements);
    }
  });
}

absl::Status Loans::Finish(const Slices& slices) {
  absl::Status status;
  for (const Slices::Segment& segment : slices.segments) {
    if (segment.kind == v1::SLICE_KIND_GRADIENT) {
      segment.chunk->intake.StoreLentNorm(segment.index, segment.generation, segment.norm);
    } else if (!segment.norm.finite) {
      const uint32_t tensor = segment.chunk->layout().segments[segment.index].tensor;
      status.Update(
          model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                       absl::StrCat("a value for tensor '", core_->state.plan()->layout().tensors()[tensor].name,
                                    "' is not finite; initial values and edits must be")));
    }
  }
  for (const v1::PushRequest& header : slices.headers) {
    status.Update(core_->machine->EndPush(header, absl::OkStatus()));
  }
  return status;
}

void Loans::End(const std::shared_ptr<LentMemory>& lent) {
  core_->Locked([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (core_->state.lent() != lent) return;
    if (!lent->applied) TakeBack(*lent, replies);
    core_->state.Lend(nullptr);
  });
}

void Loans::TakeBack(const LentMemory& lent, Replies* replies) {
  // Prepared, the step may be decided by whoever fences next.
  const bool prepared = core_->machine->Snapshot().has_prepared();
  absl::Status copied;
  if (prepared && core_->state.store()->layout().lends_master() &&
      lent.presence(v1::SLICE_KIND_GRADIENT).find_first_not_of('\0') != std::string::npos) {
    return core_->Fail(model::Error(absl::StatusCode::kFailedPrecondition, model::kStateLost,
                                    "the trainer took its parameters, which are their own masters in this job, back "
                                    "from a step that was prepared and not decided"),
                       absl::StrCat("Its state is lost: drop the job (", model::kHowToDrop, "), or take another name"),
                       replies);
  }
  for (const model::Slice& slice : core_->state.plan()->slices()) {
    for (const v1::SliceKind kind : kKinds) {
      if (!prepared && core_->state.plan()->Touches(slice, lent.presence(kind)))
        core_->machine->Lose(HeaderOf(lent.request(), kind, slice));
    }
  }
  for (const std::shared_ptr<HeldChunk>& chunk : core_->state.chunks()) {
    if (prepared) {
      copied.Update(chunk->intake.CopyLent(chunk->layout(), lent));
    } else {
      chunk->intake.VoidLent();
    }
  }
  if (!copied.ok()) {
    core_->Fail(
        model::Annotate(copied, "what a prepared step was lent could not be kept when its trainer took it back"),
        "Raise the dram budget, and start the job again", replies);
  }
}

}  // namespace ballast::services
