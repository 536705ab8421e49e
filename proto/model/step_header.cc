#include "ballast/proto/model/step_header.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/field_hash.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::model {
namespace {

constexpr size_t kBlobBytesMax = 64 << 10;

absl::Status BadHeader(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadRequest, message);
}

// The kernels compute in fp32: what is finite in fp64 alone would be Inf there.
bool Finite(double x) { return std::isfinite(static_cast<float>(x)); }

bool AtLeastZero(double x) { return Finite(x) && x >= 0; }

bool IsBeta(double x) { return x >= 0 && x < 1; }

template <typename... Message>
absl::Status BadGroup(int group, const Message&... message) {
  return BadHeader(absl::StrCat("parameter group ", group, ": ", message...));
}

absl::Status CheckRanges(const v1::GroupHyper& hyper, int group) {
  if (!AtLeastZero(hyper.learning_rate()) || !IsBeta(hyper.beta1()) || !IsBeta(hyper.beta2()) ||
      !AtLeastZero(hyper.epsilon()) || !AtLeastZero(hyper.weight_decay())) {
    return BadGroup(
        group, "expected learning_rate, epsilon and weight_decay >= 0 and finite in fp32, and betas in [0, 1), got lr ",
        hyper.learning_rate(), ", betas ", hyper.beta1(), ", ", hyper.beta2(), ", epsilon ", hyper.epsilon(),
        ", weight_decay ", hyper.weight_decay());
  }
  if (!Finite(hyper.dampening()) || !AtLeastZero(hyper.learning_rate_decay()) ||
      !AtLeastZero(hyper.initial_accumulator())) {
    return BadGroup(
        group,
        "expected dampening, learning_rate_decay and initial_accumulator finite in fp32, the latter two >= 0, got ",
        hyper.dampening(), ", ", hyper.learning_rate_decay(), " and ", hyper.initial_accumulator());
  }
  if (!IsBeta(hyper.beta3()) || !AtLeastZero(hyper.alpha()) || !(hyper.average() >= 0 && hyper.average() <= 1)) {
    return BadGroup(group, "expected beta3 in [0, 1), alpha >= 0 and finite in fp32, and average in [0, 1], got ",
                    hyper.beta3(), ", ", hyper.alpha(), " and ", hyper.average());
  }
  return absl::OkStatus();
}

// Hyper-parameters of another optimizer than the job's are zero.
absl::Status CheckOptimizers(const v1::GroupHyper& hyper, int group, const v1::JobSpec& spec) {
  if (hyper.dampening() != 0 && !spec.momentum()) {
    return BadGroup(group, "dampening is ", hyper.dampening(),
                    ", but the job's optimizer is not SGD with momentum; leave it 0");
  }
  if (hyper.dampening() != 0 && spec.nesterov()) {
    return BadGroup(group, "nesterov needs a dampening of 0, got ", hyper.dampening());
  }
  if ((hyper.learning_rate_decay() != 0 || hyper.initial_accumulator() != 0) &&
      spec.optimizer() != v1::OPTIMIZER_ADAGRAD) {
    return BadGroup(
        group,
        "learning_rate_decay and initial_accumulator are Adagrad's, which is not the job's optimizer; leave them 0, "
        "got ",
        hyper.learning_rate_decay(), " and ", hyper.initial_accumulator());
  }
  if ((hyper.beta3() != 0 || hyper.alpha() != 0) && spec.optimizer() != v1::OPTIMIZER_ADEMAMIX) {
    return BadGroup(group, "beta3 and alpha are AdEMAMix's, which is not the job's optimizer; leave them 0, got ",
                    hyper.beta3(), " and ", hyper.alpha());
  }
  if (hyper.average() != 0 && spec.optimizer() != v1::OPTIMIZER_ADAMW_SCHEDULE_FREE) {
    return BadGroup(group, "average is schedule-free AdamW's, which is not the job's optimizer; leave it 0, got ",
                    hyper.average());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPresence(const EpochPlan& plan, absl::string_view bitmap, absl::string_view name) {
  const size_t tensors = plan.layout().tensors().size();
  if (bitmap.size() != (tensors + 7) / 8) {
    return BadHeader(
        absl::StrCat(name, " must have ", (tensors + 7) / 8, " bytes for ", tensors, " tensors, got ", bitmap.size()));
  }
  for (uint32_t i = 0; i < bitmap.size() * 8; ++i) {
    if (!HasBit(bitmap, i)) continue;
    if (i >= tensors) return BadHeader(absl::StrCat(name, " names tensor ", i, "; the job has ", tensors));
    if (!plan.layout().live(i)) {
      return BadHeader(absl::StrCat(name, " names tensor ", i, " ('", plan.layout().tensors()[i].name,
                                    "'), which a later registration replaced"));
    }
  }
  return absl::OkStatus();
}

std::string PlanHash(const EpochPlan& plan, int64_t step, uint64_t attempt, const v1::StepHeader& header,
                     absl::Span<const std::string> blobs) {
  FieldHash hash = plan.tiling_hash();
  hash.Add(static_cast<uint64_t>(step));
  hash.Add(attempt);
  hash.Add(static_cast<uint64_t>(header.kind()));
  hash.Add(static_cast<uint64_t>(header.groups_size()));
  for (const v1::GroupHyper& group : header.groups()) {
    hash.Add(group.learning_rate());
    hash.Add(group.beta1());
    hash.Add(group.beta2());
    hash.Add(group.epsilon());
    hash.Add(group.weight_decay());
    hash.Add(group.dampening());
    hash.Add(group.learning_rate_decay());
    hash.Add(group.initial_accumulator());
    hash.Add(uint64_t{group.maximize()});
  }
  hash.Add(header.gradient_scale());
  hash.Add(header.max_norm());
  hash.Add(absl::string_view(header.gradient_presence()));
  hash.Add(absl::string_view(header.value_presence()));
  hash.Add(static_cast<uint64_t>(blobs.size()));
  for (const std::string& blob : blobs) hash.Add(absl::string_view(blob));
  // The kind, above, tells whether this follows.
  if (header.kind() == v1::STEP_KIND_RESTORE) hash.Add(static_cast<uint64_t>(header.restored_version()));
  if (header.kind() == v1::STEP_KIND_VALUES) {
    hash.Add(uint64_t{header.value_array()});
    hash.Add(static_cast<uint64_t>(header.value_tensor_steps_size()));
    for (const uint64_t steps : header.value_tensor_steps()) hash.Add(steps);
  }
  // Logs of version 0 hold Opens without a digest, and hashes that end here.
  if (!plan.open().spec_digest().empty()) hash.Add(absl::string_view(plan.open().spec_digest()));
  // Logs of versions before 5 hold Opens without a version, and hashes that end here.
  if (plan.open().protocol_version() != 0) hash.Add(uint64_t{plan.open().protocol_version()});
  // AdEMAMix and schedule-free AdamW alone have these; hashes of other optimizers end here.
  for (int i = 0; i < header.groups_size(); ++i) {
    const v1::GroupHyper& group = header.groups(i);
    if (group.beta3() == 0 && group.alpha() == 0 && group.average() == 0) continue;
    hash.Add(static_cast<uint64_t>(i));
    hash.Add(group.beta3());
    hash.Add(group.alpha());
    hash.Add(group.average());
  }
  return hash.Finish();
}

std::vector<uint32_t> TensorsWithoutValues(const EpochPlan& plan, int64_t version) {
  std::vector<uint32_t> tensors;
  uint32_t index = 0;
  for (const v1::Registration& registration : plan.open().spec().registrations()) {
    for (int i = 0; i < registration.tensors_size(); ++i, ++index) {
      if (registration.version() == version && plan.layout().live(index)) tensors.push_back(index);
    }
  }
  return tensors;
}

namespace {

bool IsStepKind(v1::StepKind kind) {
  return kind == v1::STEP_KIND_UPDATE || kind == v1::STEP_KIND_VALUES || kind == v1::STEP_KIND_RESTORE;
}

bool Any(absl::string_view bitmap) {
  return std::any_of(bitmap.begin(), bitmap.end(), [](char c) { return c != 0; });
}

absl::Status BadGroupCount(const EpochPlan& plan, const v1::StepHeader& header) {
  return BadHeader(absl::StrCat("expected hyper-parameters for ", plan.open().spec().group_count(),
                                " parameter group(s), got ", header.groups_size()));
}

absl::Status CheckRestore(int64_t step, const v1::StepHeader& header) {
  if (Any(header.gradient_presence()) || Any(header.value_presence())) {
    return BadHeader("a RESTORE step has no slices: both presences must be empty");
  }
  if (header.restored_version() >= 0 && header.restored_version() < step) return absl::OkStatus();
  return BadHeader(
      absl::StrCat("step ", step, " can restore versions 0 to ", step - 1, ", got ", header.restored_version()));
}

absl::Status CheckUpdate(const EpochPlan& plan, const v1::StepHeader& header) {
  const v1::JobSpec& spec = plan.open().spec();
  if (static_cast<uint32_t>(header.groups_size()) != spec.group_count()) return BadGroupCount(plan, header);
  for (int i = 0; i < header.groups_size(); ++i) {
    BALLAST_RETURN_IF_ERROR(CheckRanges(header.groups(i), i));
    BALLAST_RETURN_IF_ERROR(CheckOptimizers(header.groups(i), i, spec));
  }
  if (Finite(header.gradient_scale()) && std::isfinite(header.max_norm()) && header.max_norm() >= 0) {
    return absl::OkStatus();
  }
  return BadHeader(absl::StrCat("expected a gradient_scale that is finite in fp32 and a finite max_norm >= 0, got ",
                                header.gradient_scale(), " and ", header.max_norm()));
}

// Tensors that were registered last get their values now.
absl::Status CheckFirstValues(const EpochPlan& plan, int64_t step, const v1::StepHeader& header) {
  for (const uint32_t tensor : TensorsWithoutValues(plan, step - 1)) {
    if (HasBit(header.value_presence(), tensor) && header.value_array() == 0) continue;
    return BadHeader(absl::StrCat("tensor '", plan.layout().tensors()[tensor].name, "' was registered at version ",
                                  step - 1, " and has no values yet: step ", step, " must give its master weights"));
  }
  return absl::OkStatus();
}

// Checks the array of the value slices, and the step counts given with the slices.
absl::Status CheckValues(const EpochPlan& plan, const v1::StepHeader& header) {
  if (header.value_array() == 0 && header.value_tensor_steps().empty()) return absl::OkStatus();
  if (header.kind() != v1::STEP_KIND_VALUES) {
    return BadHeader("moments and step counts are written by VALUES steps only");
  }
  BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec optimizer, OptimizerOf(plan.open().spec()));
  const auto moments = static_cast<uint32_t>(kernels::MomentCount(optimizer));
  if (header.value_array() > moments) {
    return BadHeader(absl::StrCat("value_array is ", header.value_array(), "; the job's optimizer (", Show(optimizer),
                                  ") keeps ", moments, " moment(s)"));
  }
  const size_t tensors = plan.layout().tensors().size();
  const auto counts = static_cast<size_t>(header.value_tensor_steps_size());
  if (counts == 0 || counts == tensors) return absl::OkStatus();
  return BadHeader(
      absl::StrCat("value_tensor_steps must have an entry for each of ", tensors, " tensors or none, got ", counts));
}

// Assisted tensors have no moments.
absl::Status CheckAssisted(const EpochPlan& plan, const v1::StepHeader& header) {
  if (header.value_array() == 0) return absl::OkStatus();
  for (const Tensor& tensor : plan.layout().tensors()) {
    if (tensor.assist == v1::ASSIST_UNSPECIFIED || !HasBit(header.value_presence(), tensor.index)) continue;
    return BadHeader(absl::StrCat("value_presence names tensor '", tensor.name, "' with value_array ",
                                  header.value_array(), ": the trainer assists its updates, so it has no moments"));
  }
  return absl::OkStatus();
}

// Frozen tensors have values alone: neither gradients, nor moments, nor updates to count.
absl::Status CheckFrozen(const EpochPlan& plan, const v1::StepHeader& header) {
  for (const Tensor& tensor : plan.layout().tensors()) {
    if (tensor.frozen == v1::FROZEN_UNSPECIFIED) continue;
    if (HasBit(header.gradient_presence(), tensor.index)) {
      return BadHeader(absl::StrCat("gradient_presence names tensor '", tensor.name,
                                    "', which was registered as frozen: servers have its values alone, and take no "
                                    "gradient of it; to train it, make a job in which it is not frozen"));
    }
    const bool counts =
        header.value_tensor_steps_size() > 0 && header.value_tensor_steps(static_cast<int>(tensor.index)) > 0;
    if (HasBit(header.value_presence(), tensor.index) && (header.value_array() != 0 || counts)) {
      return BadHeader(absl::StrCat("tensor '", tensor.name,
                                    "' is frozen: it has values, and neither moments nor a count of updates"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlobs(const EpochPlan& plan, const v1::StepHeader& header, absl::Span<const std::string> blobs) {
  // A restore seals the blobs of the group that sealed the version; its number of ranks may differ.
  if (blobs.size() != plan.world_size() && header.kind() != v1::STEP_KIND_RESTORE) {
    return BadHeader(absl::StrCat("expected one blob per rank (", plan.world_size(), "), got ", blobs.size()));
  }
  size_t bytes = 0, largest = 0;
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    bytes += blobs[rank].size();
    if (blobs[rank].size() > blobs[largest].size()) largest = rank;
  }
  if (bytes <= kBlobBytesMax) return absl::OkStatus();
  return BadHeader(absl::StrCat(
      "the blobs of all ranks together may take ", kBlobBytesMax, " bytes, got ", bytes, " from ", blobs.size(),
      " ranks, the most (", blobs[largest].size(), ") from rank ", largest, "; if all ranks seal as much, each has ",
      kBlobBytesMax / blobs.size(),
      ". Keep what is larger (states of random generators, say) in files of the ranks, and seal the files' names"));
}

}  // namespace

absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header,
                         absl::Span<const std::string> blobs) {
  BALLAST_RETURN_IF_ERROR(CheckHeader(plan, step, header));
  return CheckBlobs(plan, header, blobs);
}

absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header) {
  if (!IsStepKind(header.kind())) {
    return BadHeader(
        absl::StrCat("step kind must be UPDATE, VALUES or RESTORE, got ", static_cast<int>(header.kind())));
  }
  // For every kind: every answer about the job repeats the header, and must fit into a message. The spec bounds its
  // lists.
  if (static_cast<uint32_t>(header.groups_size()) > plan.open().spec().group_count()) {
    return BadGroupCount(plan, header);
  }
  BALLAST_RETURN_IF_ERROR(CheckPresence(plan, header.gradient_presence(), "gradient_presence"));
  BALLAST_RETURN_IF_ERROR(CheckPresence(plan, header.value_presence(), "value_presence"));
  if (header.kind() == v1::STEP_KIND_RESTORE) BALLAST_RETURN_IF_ERROR(CheckRestore(step, header));
  if (header.kind() == v1::STEP_KIND_VALUES && (Any(header.gradient_presence()) || !Any(header.value_presence()))) {
    return BadHeader("a VALUES step needs at least one tensor in value_presence and none in gradient_presence");
  }
  BALLAST_RETURN_IF_ERROR(CheckValues(plan, header));
  BALLAST_RETURN_IF_ERROR(CheckFrozen(plan, header));
  BALLAST_RETURN_IF_ERROR(CheckAssisted(plan, header));
  if (header.kind() == v1::STEP_KIND_UPDATE) BALLAST_RETURN_IF_ERROR(CheckUpdate(plan, header));
  return CheckFirstValues(plan, step, header);
}

}  // namespace ballast::model
