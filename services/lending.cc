// How class Job works in a trainer's memory. Lent slices are held like pushed slices, but without bytes: this file
// computes norms and checks values where the trainer has them, and the update reads them there.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/slices/lent_memory.h"

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
class JobLoan final : public model::Loan {
 public:
  JobLoan(std::weak_ptr<Job> job, std::shared_ptr<LentMemory> lent) : job_(std::move(job)), lent_(std::move(lent)) {}
  ~JobLoan() override {
    if (const std::shared_ptr<Job> job = job_.lock()) job->EndLoan(lent_);
    lent_->AwaitUnused();
  }

 private:
  const std::weak_ptr<Job> job_;
  const std::shared_ptr<LentMemory> lent_;
};

// Lent slices on their way to be held, and the norms to compute for them.
struct Job::LentSlices {
  std::vector<v1::PushRequest> headers;
  struct Segment {
    std::shared_ptr<HeldChunk> chunk;
    uint64_t generation = 0;
    size_t index = 0;
    v1::SliceKind kind = v1::SLICE_KIND_GRADIENT;
    kernels::Dtype dtype = kernels::Dtype::kF32;
    const std::byte* lent = nullptr;
    uint64_t elements = 0;
    kernels::NormResult norm;
  };
  std::vector<Segment> segments;
};

absl::StatusOr<std::unique_ptr<model::Loan>> Job::Lend(const model::LoanRequest& request) {
  absl::Status status;
  std::unique_ptr<model::Loan> loan;
  LentSlices slices;
  Locked([&](Replies*) {
    mu_.AssertHeld();
    status = CheckLoan(request);
    if (!status.ok()) return;
    lent_ = std::make_shared<LentMemory>(request, *plan_, store_->layout().optimizer());
    loan = std::make_unique<JobLoan>(weak_from_this(), lent_);
    status = BeginLend(&slices);
  });
  BALLAST_RETURN_IF_ERROR(status);
  ComputeLentNorms(&slices);
  Locked([&](Replies*) {
    mu_.AssertHeld();
    status = EndLend(slices);
  });
  BALLAST_RETURN_IF_ERROR(status);
  return loan;
}

absl::Status Job::CheckLoan(const model::LoanRequest& request) const {
  BALLAST_RETURN_IF_ERROR(Refusal());
  BALLAST_RETURN_IF_ERROR(machine_->CheckEpoch(request.epoch));
  if (store_->layout().working_copies()) return Unsupported("this server keeps working copies, and takes no loans");
  if (plan_->world_size() != 1 || chunks_.size() != plan_->layout().chunks().size()) {
    return Unsupported("memory is lent by the one rank of a job to its one server");
  }
  if (lent_ != nullptr && !lent_->applied) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                        absl::StrCat("memory is lent for step ", lent_->request().step, " already; end that loan"));
  }
  const size_t tensors = plan_->layout().tensors().size();
  if (request.tensors.size() != tensors) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("the job has ", tensors, " tensors, ", request.tensors.size(), " were lent"));
  }
  for (const model::LentTensor& tensor : request.tensors) {
    if (durable_ && (tensor.gradient != nullptr || tensor.value != nullptr)) {
      return Unsupported("with durability step gradients and values go to the log: they are pushed");
    }
    const kernels::Dtype working = store_->layout().optimizer().working;
    if (tensor.value != nullptr && tensor.value_dtype != kernels::Dtype::kF32 && tensor.value_dtype != working) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadDtype,
                          "lent values are neither fp32 nor of the job's working dtype");
    }
  }
  return absl::OkStatus();
}

absl::Status Job::BeginLend(LentSlices* slices) {
  const model::LoanRequest& request = lent_->request();
  absl::Status status;
  for (const v1::SliceKind kind : kKinds) {
    for (const model::Slice& slice : plan_->slices()) {
      if (!status.ok() || !plan_->Touches(slice, lent_->presence(kind))) continue;
      v1::PushRequest header = HeaderOf(request, kind, slice);
      const absl::StatusOr<StepMachine::Admission> admission = machine_->BeginPush(header);
      status = admission.status();
      if (!status.ok() || *admission == StepMachine::Admission::kHeld) continue;
      slices->headers.push_back(std::move(header));
    }
  }
  if (!status.ok()) {
    for (const v1::PushRequest& header : slices->headers) (void)machine_->EndPush(header, status);
    return status;
  }
  // A single rank has one slice of a chunk, with whole segments.
  for (const v1::PushRequest& header : slices->headers) {
    uint32_t slice = 0;
    const std::shared_ptr<HeldChunk> chunk = FindSliceChunk(header, &slice);
    chunk->intake.HoldLent(slice, header.kind(), request.attempt);
    for (size_t i = 0; i < chunk->layout.segments.size(); ++i) {
      const model::Segment& segment = chunk->layout.segments[i];
      const uint64_t at = segment.in_chunk.begin;
      const bool value = header.kind() == v1::SLICE_KIND_VALUE;
      const std::byte* const lent =
          value ? lent_->Value(chunk->layout, segment.tensor, at) : lent_->Gradient(chunk->layout, segment.tensor, at);
      if (lent == nullptr) continue;
      slices->segments.push_back(
          {.chunk = chunk,
           .generation = chunk->intake.generation(),
           .index = i,
           .kind = header.kind(),
           .dtype = value ? lent_->value_dtype(segment.tensor) : store_->layout().optimizer().gradient,
           .lent = lent,
           .elements = segment.in_chunk.size(),
           .norm = {}});
    }
  }
  return absl::OkStatus();
}

void Job::ComputeLentNorms(LentSlices* slices) {
  std::vector<size_t> ends;  // ends of the threads' shares
  uint64_t elements = 0;
  for (size_t i = 0; i < slices->segments.size(); ++i) {
    elements += slices->segments[i].elements;
    if (elements < kNormElementsMin && i + 1 < slices->segments.size()) continue;
    ends.push_back(i + 1);
    elements = 0;
  }
  around_.compute->ParallelFor(ends.size(), [&](uint64_t piece) {
    for (size_t i = piece == 0 ? 0 : ends[piece - 1]; i < ends[piece]; ++i) {
      LentSlices::Segment& segment = slices->segments[i];
      segment.norm = kernels::SquaredNorm(segment.dtype, segment.lent, segment.elements);
    }
  });
}

absl::Status Job::EndLend(const LentSlices& slices) {
  absl::Status status;
  for (const LentSlices::Segment& segment : slices.segments) {
    if (segment.kind == v1::SLICE_KIND_GRADIENT) {
      segment.chunk->intake.StoreLentNorm(segment.index, segment.generation, segment.norm);
    } else if (!segment.norm.finite) {
      const uint32_t tensor = segment.chunk->layout.segments[segment.index].tensor;
      status.Update(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                                 absl::StrCat("a value for tensor '", plan_->layout().tensors()[tensor].name,
                                              "' is not finite; initial values and edits must be")));
    }
  }
  for (const v1::PushRequest& header : slices.headers) {
    status.Update(machine_->EndPush(header, absl::OkStatus()));
  }
  return status;
}

void Job::EndLoan(const std::shared_ptr<LentMemory>& lent) {
  Locked([&](Replies* replies) {
    mu_.AssertHeld();
    if (lent_ != lent) return;
    if (!lent->applied) TakeBackLent(*lent, replies);
    lent_ = nullptr;
  });
}

void Job::TakeBackLent(const LentMemory& lent, Replies* replies) {
  // Prepared, the step may be decided by whoever fences next.
  const bool prepared = machine_->Snapshot().has_prepared();
  absl::Status copied;
  for (const model::Slice& slice : plan_->slices()) {
    for (const v1::SliceKind kind : kKinds) {
      if (!prepared && plan_->Touches(slice, lent.presence(kind)))
        machine_->Lose(HeaderOf(lent.request(), kind, slice));
    }
  }
  for (const std::shared_ptr<HeldChunk>& chunk : chunks_) {
    if (prepared) {
      copied.Update(chunk->intake.CopyLent(chunk->layout, lent));
    } else {
      chunk->intake.VoidLent();
    }
  }
  if (!copied.ok()) {
    Fail(model::Annotate(copied, "what a prepared step was lent could not be kept when its trainer took it back"),
         "Raise the dram budget, and start the job again", replies);
  }
}

}  // namespace ballast::services
