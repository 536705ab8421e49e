#include "ballast/client/steps.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/session/core.h"
#include "ballast/client/session/state.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

template <typename T>
absl::Span<const std::byte> GradientBytes(absl::Span<const T> values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

// Ends a push that began at `start`, once there is room, or without waiting.
absl::Status EndPush(SessionCore* core, absl::Time start, absl::Status status, Waiter* admitted) {
  Admissions& admissions = core->job.router()->push_admissions();
  if (admitted != nullptr) {
    *admitted = admissions.Waiter();
  } else if (status.ok()) {
    admissions.Await();
  }
  core->transactions.CountPush(start);
  return status;
}

absl::Status PushElements(SessionCore* core, uint32_t unit, absl::Span<const std::byte> gradient,
                          uint64_t element_bytes, absl::Span<const std::string> absent, Waiter* admitted) {
  BALLAST_RETURN_IF_ERROR(core->job.CheckReadable(unit));
  const uint64_t width = core->job.seat().gradient_bytes();
  if (element_bytes != width) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadDtype,
                        absl::StrCat("gradients of this job have ", width, " bytes an element, got ", element_bytes,
                                     "; SessionOptions::optimizer names their dtype"));
  }
  const absl::Time start = absl::Now();
  return EndPush(core, start, core->gradients.Push(unit, gradient, absent), admitted);
}

v1::StepHeader ValuesHeader() {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  return header;
}

v1::StepHeader UpdateHeader(const StepOptions& options) {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  for (const GroupHyper& group : options.groups) {
    v1::GroupHyper* hyper = header.add_groups();
    hyper->set_learning_rate(group.learning_rate);
    hyper->set_beta1(group.beta1);
    hyper->set_beta2(group.beta2);
    hyper->set_epsilon(group.epsilon);
    hyper->set_weight_decay(group.weight_decay);
    hyper->set_dampening(group.dampening);
    hyper->set_learning_rate_decay(group.learning_rate_decay);
    hyper->set_initial_accumulator(group.initial_accumulator);
    hyper->set_maximize(group.maximize);
    hyper->set_beta3(group.beta3);
    hyper->set_alpha(group.alpha);
    hyper->set_average(group.average);
  }
  header.set_gradient_scale(options.gradient_scale);
  header.set_max_norm(options.max_norm);
  return header;
}

}  // namespace

absl::Status Steps::Initialise(
    absl::FunctionRef<void(absl::string_view tensor, uint64_t first, absl::Span<float> values)> fill,
    const std::string& blob) {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  const model::Layout& layout = core_->job.layout();
  absl::Status mine;
  if (core_->job.without_values().empty()) mine = Precondition("every tensor has values; Write changes them");
  if (!core_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before Initialise");
  v1::StepHeader header = ValuesHeader();
  header.set_value_presence(model::MakeBitmap(core_->job.tensor_count(), core_->job.without_values()));
  const Values::Source source = [&](uint32_t tensor, uint64_t first, absl::Span<float> to) {
    fill(layout.tensors()[tensor].name, first, to);
  };
  return core_->transactions
      .Transact("Initialise", std::move(mine), std::move(header),
                blob.empty() ? core_->transactions.sealed_blob() : blob, source)
      .status();
}

absl::Status Steps::Push(uint32_t unit, absl::Span<const bf16> gradient, absl::Span<const std::string> absent,
                         Waiter* admitted) {
  return PushElements(core_, unit, GradientBytes(gradient), sizeof(bf16), absent, admitted);
}

absl::Status Steps::Push(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent,
                         Waiter* admitted) {
  return PushElements(core_, unit, GradientBytes(gradient), sizeof(float), absent, admitted);
}

absl::Status Steps::PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent,
                                 const std::shared_ptr<const void>& owner, Keep keep, Waiter* admitted) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(unit));
  const absl::Time start = absl::Now();
  return EndPush(core_, start, core_->gradients.PushBorrowed(unit, std::move(runs), absent, owner, keep), admitted);
}

void Steps::ReturnGradients() {
  if (!core_->job.forked()) core_->gradients.Return();
}

absl::StatusOr<double> Steps::Norm() {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  return core_->norms.Norm();
}

absl::Status Steps::Drop() { return core_->Drop(); }

absl::StatusOr<StepReport> Steps::Step(const StepOptions& options) {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  absl::Status mine;
  if (const std::vector<uint32_t>& without = core_->job.without_values(); !without.empty()) {
    mine = Precondition(absl::StrCat("tensor '", core_->job.layout().tensors()[without[0]].name,
                                     "' has no values yet; Initialise comes before Step"));
  }
  v1::StepHeader header = UpdateHeader(options);
  header.set_value_presence(core_->values.presence());
  return core_->transactions.Transact("Step", std::move(mine), std::move(header), options.blob,
                                      core_->values.written());
}

absl::Status Steps::RefuseStep(const absl::Status& why) {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  return core_->job.Conclude(core_->job.group()->Agree("Step", why));
}

absl::Status Steps::Write(absl::string_view tensor, absl::Span<const float> values,
                          absl::Span<const model::BoxRun> runs) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, core_->job.layout().FindTensor(tensor));
  const model::Tensor& found = core_->job.layout().tensors()[index];
  const std::vector<model::BoxRun> whole = WholeRuns(found);
  if (runs.empty()) runs = whole;
  if (values.size() != model::ElementsOf(runs) || !core_->job.seat().units->Covers(index, runs)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("tensor '", tensor, "' has ", found.range.size(), " elements, got ", values.size(),
                                     ", which must be all, or at least this rank's part"));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("element ", i, " of the values for tensor '", tensor, "' is ", values[i],
                                     "; master weights must be finite"));
  }
  if (core_->values.lent()) return Precondition("values are lent; Step and AwaitApplied, or Drop, come before Write");
  if (core_->job.lends_masters() && found.frozen == v1::FROZEN_UNSPECIFIED) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("the parameter '", tensor, "' is its own master: write to it"));
  }
  core_->values.Write(index, values, runs);
  return absl::OkStatus();
}

bool Steps::written(uint32_t tensor) const { return model::HasBit(core_->values.presence(), tensor); }

absl::StatusOr<StepReport> Steps::CommitValues() {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  absl::Status mine;
  if (!core_->job.without_values().empty())
    mine = Precondition("some tensors have no values yet; Initialise comes first");
  if (!core_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before CommitValues");
  // A rank may have no part of what the others have written.
  if (core_->values.empty() && !core_->job.places()) {
    mine = Precondition("nothing was written; Write comes before CommitValues");
  }
  if (mine.ok() && core_->lending.of_values() && core_->lending.active()) {
    mine = Precondition("memory is lent for a step; Step or Drop comes first");
  }
  v1::StepHeader header = ValuesHeader();
  header.set_value_presence(core_->values.presence());
  return core_->CommitValues("CommitValues", std::move(mine), std::move(header), core_->transactions.sealed_blob(),
                             core_->values.written(),
                             [&] { return std::vector<model::LentTensor>(core_->job.tensor_count()); });
}

absl::StatusOr<StepReport> Steps::CommitState(Content array, absl::Span<const TensorState> tensors,
                                              const std::string& blob) {
  return client::CommitState(*core_, array, tensors, blob);
}

}  // namespace ballast::client
