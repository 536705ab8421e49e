// How class Job works in a trainer's memory. Lent slices are held like pushed slices, but without bytes: this file
// computes norms and checks values where the trainer has them, and the update reads them there.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/services/lent_memory.h"

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

LentMemory::LentMemory(model::LoanRequest request, const model::EpochPlan& plan,
                       const kernels::OptimizerSpec& optimizer)
    : request_(std::move(request)),
      gradient_bytes_(kernels::ElementBytes(optimizer.gradient)),
      working_bytes_(kernels::ElementBytes(optimizer.working)) {
  std::vector<uint32_t> gradients, values;
  for (uint32_t tensor = 0; tensor < request_.tensors.size(); ++tensor) {
    begins_.push_back(plan.layout().tensors()[tensor].range.begin);
    if (request_.tensors[tensor].gradient != nullptr) gradients.push_back(tensor);
    if (request_.tensors[tensor].value != nullptr) values.push_back(tensor);
  }
  const auto count = static_cast<uint32_t>(request_.tensors.size());
  gradient_presence_ = model::MakeBitmap(count, gradients);
  value_presence_ = model::MakeBitmap(count, values);
}

const std::byte* LentMemory::Gradient(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const {
  const std::byte* const begin = request_.tensors[tensor].gradient;
  return begin == nullptr ? nullptr : begin + (chunk.range.begin + at - begins_[tensor]) * gradient_bytes_;
}

std::byte* LentMemory::Working(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const {
  std::byte* const begin = request_.tensors[tensor].working;
  return begin == nullptr ? nullptr : begin + (chunk.range.begin + at - begins_[tensor]) * working_bytes_;
}

const std::byte* LentMemory::Value(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const {
  const std::byte* const begin = request_.tensors[tensor].value;
  const uint64_t width = kernels::ElementBytes(value_dtype(tensor));
  return begin == nullptr ? nullptr : begin + (chunk.range.begin + at - begins_[tensor]) * width;
}

std::shared_ptr<void> LentMemory::Use() {
  absl::MutexLock lock(&mutex_);
  ++uses_;
  return {nullptr, [self = shared_from_this()](void*) {
            absl::MutexLock end(&self->mutex_);
            --self->uses_;
          }};
}

void LentMemory::AwaitUnused() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* uses) { return *uses == 0; }, &uses_));
}

void Intake::HoldLent(uint32_t slice, v1::SliceKind kind, uint64_t attempt) {
  Slot& slot = slots_[static_cast<size_t>(FindSlot(slice) - slots_.begin())];
  slot.held(kind) = {.attempt = attempt, .buffer = nullptr, .place = std::nullopt, .lent = true};
  if (kind == v1::SLICE_KIND_VALUE) return;
  for (size_t i = 0; i < segments_.size(); ++i) {
    // A tensor without a gradient counts as if zeros had been pushed for it.
    if (model::Intersect(segments_[i].in_chunk, slot.range).size() > 0) norms_[i] = kernels::NormResult{0, true};
  }
}

void Intake::StoreLentNorm(size_t segment, uint64_t generation, const kernels::NormResult& norm) {
  if (generation == generation_) norms_[segment] = norm;
}

bool Intake::lent(v1::SliceKind kind) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.held(kind).lent; });
}

void Intake::VoidLent() {
  for (Slot& slot : slots_) {
    for (const v1::SliceKind kind : kKinds) {
      if (slot.held(kind).lent) slot.held(kind) = {};
    }
  }
}

absl::Status Intake::CopyLent(const model::Chunk& chunk, const LentMemory& lent) {
  if (this->lent(v1::SLICE_KIND_GRADIENT)) {
    if (gradient_ == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(gradient_, ProvisionalMemory::Allocate(memory_, elements_ * element_bytes()));
    }
    for (const model::Segment& segment : segments_) {
      std::byte* const to = gradient_->data() + segment.in_chunk.begin * element_bytes();
      const std::byte* const from = lent.Gradient(chunk, segment.tensor, segment.in_chunk.begin);
      if (from != nullptr) std::memcpy(to, from, segment.in_chunk.size() * element_bytes());
    }
    for (Slot& slot : slots_) slot.gradient.lent = false;
  }
  for (Slot& slot : slots_) {
    if (!slot.value.lent) continue;
    BALLAST_ASSIGN_OR_RETURN(slot.value.buffer,
                             ProvisionalMemory::Allocate(memory_, slot.range.size() * sizeof(float)));
    auto* const values = reinterpret_cast<float*>(slot.value.buffer->data());
    for (const model::Segment& segment : segments_) {
      const model::Range part = model::Intersect(segment.in_chunk, slot.range);
      const std::byte* const from = part.size() > 0 ? lent.Value(chunk, segment.tensor, part.begin) : nullptr;
      if (from == nullptr) continue;
      kernels::ToF32(lent.value_dtype(segment.tensor), from,
                     absl::MakeSpan(values + (part.begin - slot.range.begin), part.size()));
    }
    slot.value.lent = false;
  }
  return absl::OkStatus();
}

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
