#include "ballast/client/reads.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/session/core.h"
#include "ballast/client/transport/forks.h"
#include "ballast/client/transport/tally.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/placement.h"

namespace ballast::client {
namespace {

v1::Content ToProto(Content content) {
  switch (content) {
    case Content::kWorking:
      return v1::CONTENT_WORKING;
    case Content::kMaster:
      return v1::CONTENT_MASTER;
    case Content::kMoment1:
      return v1::CONTENT_MOMENT1;
    case Content::kMoment2:
      return v1::CONTENT_MOMENT2;
    case Content::kMoment3:
      return v1::CONTENT_MOMENT3;
  }
  return v1::CONTENT_UNSPECIFIED;
}

void RequireWidth(uint64_t width, uint64_t element_bytes, const char* instead) {
  if (width == element_bytes) return;
  if (element_bytes == 0) instead = "kernels::ToF32 of bytes(), since they are blocks with scales";
  std::fprintf(stderr, "UnitLease: working parameters have %d bytes an element; use %s\n",
               static_cast<int>(element_bytes), instead);
  std::abort();
}

}  // namespace

void Reads::Prefetch(uint32_t unit) {
  if (core_->job.Usable().ok()) core_->parameters.Prefetch(unit);
}

absl::StatusOr<UnitLease> Reads::Acquire(uint32_t unit) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckHasValues(unit));
  auto buffer = core_->parameters.Acquire(unit);
  if (!buffer.ok()) {
    // The other ranks sit in the all-gather: any further collective call would meet them there.
    if (core_->job.group()->world_size() > 1) core_->job.End(buffer.status());
    return core_->job.Conclude(buffer.status());
  }
  const Seat& seat = core_->job.seat();
  const absl::Span<const std::byte> bytes((*buffer)->data.get(), seat.WorkingBytes(seat.units->unit(unit).elements));
  return UnitLease(core_, buffer->release(), bytes, kernels::ElementBytes(seat.optimizer.working));
}

absl::StatusOr<PendingPull> Reads::StartPull(uint32_t unit, absl::Span<const PullRun> runs) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckHasValues(unit));
  return PendingPull(core_, core_->parameters.StartPull(unit, runs));
}

absl::StatusOr<WorkingCopyLease> Reads::StartLease(uint32_t unit, absl::Span<const UnitRange> ranges) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckHasValues(unit));
  BALLAST_ASSIGN_OR_RETURN(auto parts, core_->parameters.StartLease(unit, ranges));
  return WorkingCopyLease(core_, std::move(parts));
}

absl::Status Reads::Read(absl::string_view tensor, Content content, int64_t version, absl::Span<float> to,
                         absl::Span<const model::BoxRun> runs) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, core_->job.layout().FindTensor(tensor));
  const model::Tensor& found = core_->job.layout().tensors()[index];
  const std::vector<model::BoxRun> whole = WholeRuns(found);
  if (runs.empty()) runs = whole;
  if (to.size() != model::ElementsOf(runs) || runs.back().in_tensor + runs.back().count > found.range.size()) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadLength,
        absl::StrCat("tensor '", tensor, "' has ", found.range.size(), " elements, got room for ", to.size()));
  }
  const Seat& seat = core_->job.seat();
  if (version > seat.version) {
    return Precondition(absl::StrCat("version ", version, " is not decided yet; this session is at ", seat.version));
  }
  const kernels::Dtype dtype = content == Content::kWorking ? seat.optimizer.working : kernels::Dtype::kF32;
  const uint64_t grain = kernels::GrainOf(dtype);
  std::vector<std::byte> read;
  std::vector<float> wide;
  for (const model::RunGroup& group : model::GroupRuns(runs, kGapElementsMax)) {
    const uint64_t first = group.range.begin / grain * grain;  // tensors begin at blocks
    const model::Range range{found.range.begin + first, found.range.begin + group.range.end};
    const bool direct = group.first + 1 == group.last && dtype == kernels::Dtype::kF32;
    absl::Span<std::byte> place;
    if (direct) {
      const absl::Span<float> part = to.subspan(runs[group.first].in_box, range.size());
      place = {reinterpret_cast<std::byte*>(part.data()), part.size() * sizeof(float)};
    } else {
      read.resize(kernels::BytesOf(dtype, range.size()));
      place = absl::MakeSpan(read);
    }
    BALLAST_RETURN_IF_ERROR(
        core_->job.Conclude(core_->parameters.Read(found.unit, range, ToProto(content), version, place)));
    if (direct) continue;
    wide.resize(range.size());
    kernels::ToF32(dtype, place.data(), absl::MakeSpan(wide));
    for (size_t i = group.first; i < group.last; ++i) {
      std::copy_n(wide.begin() + static_cast<std::ptrdiff_t>(runs[i].in_tensor - first), runs[i].count,
                  to.begin() + static_cast<std::ptrdiff_t>(runs[i].in_box));
    }
  }
  return absl::OkStatus();
}

absl::Status PendingPull::Await(absl::Duration waited) {
  if (tally_ == nullptr) return absl::OkStatus();
  const std::shared_ptr<Tally> tally = std::exchange(tally_, nullptr);
  return core_->job.Conclude(core_->parameters.AwaitPull(*tally, waited));
}

std::function<void()> PendingPull::Waiter() const {
  return [tally = tally_] {
    if (tally != nullptr) (void)tally->WaitUntil(absl::InfiniteFuture());
  };
}

WorkingCopyLease::WorkingCopyLease(SessionCore* core, std::shared_ptr<LeasedParts> parts)
    : core_(core), forks_(ForkCount()), parts_(std::move(parts)) {}

WorkingCopyLease::~WorkingCopyLease() {
  if (parts_ == nullptr) return;
  if (ForkCount() == forks_) {
    parts_->End();
  } else {
    // Another thread may have held a lock when this process was forked: the child never gives the object up.
    (void)new std::shared_ptr<LeasedParts>(std::move(parts_));
  }
}

int64_t WorkingCopyLease::version() const { return parts_->version(); }

absl::StatusOr<absl::Span<const LeasedPart>> WorkingCopyLease::Await(absl::Duration waited) {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  if (failed_.ok()) failed_ = core_->job.Conclude(core_->parameters.AwaitPull(parts_->tally(), waited));
  BALLAST_RETURN_IF_ERROR(failed_);
  return parts_->parts();
}

std::function<void()> WorkingCopyLease::Waiter() const {
  return [parts = parts_] { (void)parts->tally().WaitUntil(absl::InfiniteFuture()); };
}

UnitLease::UnitLease(SessionCore* core, void* buffer, absl::Span<const std::byte> bytes, uint64_t element_bytes)
    : core_(core), buffer_(buffer), bytes_(bytes), element_bytes_(element_bytes) {}

absl::Span<const bf16> UnitLease::parameters() const {
  RequireWidth(sizeof(bf16), element_bytes_, "parameters_f32()");
  return {reinterpret_cast<const bf16*>(bytes_.data()), bytes_.size() / sizeof(bf16)};
}

absl::Span<const float> UnitLease::parameters_f32() const {
  RequireWidth(sizeof(float), element_bytes_, "parameters()");
  return {reinterpret_cast<const float*>(bytes_.data()), bytes_.size() / sizeof(float)};
}

UnitLease::UnitLease(UnitLease&& other) noexcept
    : core_(std::exchange(other.core_, nullptr)),
      buffer_(std::exchange(other.buffer_, nullptr)),
      bytes_(std::exchange(other.bytes_, {})),
      element_bytes_(std::exchange(other.element_bytes_, 0)) {}

UnitLease& UnitLease::operator=(UnitLease&& other) noexcept {
  std::swap(core_, other.core_);
  std::swap(buffer_, other.buffer_);
  std::swap(bytes_, other.bytes_);
  std::swap(element_bytes_, other.element_bytes_);
  return *this;
}

UnitLease::~UnitLease() {
  if (buffer_ == nullptr) return;
  core_->parameters.Return(std::unique_ptr<UnitBuffer>(static_cast<UnitBuffer*>(buffer_)));
}

}  // namespace ballast::client
