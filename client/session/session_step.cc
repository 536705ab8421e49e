// The session's transactions: what ranks agree on, seal and decide.
#include <algorithm>
#include <cmath>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/session/session_impl.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// An offer is a seal in the making: `job` names the call, the header's presence and the one blob are the rank's own.
std::string DifferenceOf(const v1::SealRequest& other, const v1::SealRequest& first) {
  if (other.job() != first.job()) return absl::StrCat("called ", other.job(), " against ", first.job());
  if (other.step() != first.step()) return absl::StrCat("is at step ", other.step(), " against ", first.step());
  if (other.attempt() != first.attempt()) {
    return absl::StrCat("has dropped ", other.attempt(), " time(s) against ", first.attempt());
  }
  if (other.header().value_presence() != first.header().value_presence()) return "has written other tensors";
  if (other.header().value_array() != first.header().value_array()) return "writes another array";
  const auto& steps = first.header().value_tensor_steps();
  if (!std::equal(steps.begin(), steps.end(), other.header().value_tensor_steps().begin(),
                  other.header().value_tensor_steps().end())) {
    return "writes other step counts";
  }
  const int groups = std::min(other.header().groups_size(), first.header().groups_size());
  for (int i = 0; i < groups; ++i) {
    if (other.header().groups(i).SerializeAsString() != first.header().groups(i).SerializeAsString()) {
      return absl::StrCat("has other hyper-parameters for group ", i, ": ", other.header().groups(i).ShortDebugString(),
                          " against ", first.header().groups(i).ShortDebugString());
    }
  }
  return absl::StrCat("has another header: groups, gradient_scale, max_norm = ", other.header().groups_size(), ", ",
                      other.header().gradient_scale(), ", ", other.header().max_norm(), " against ",
                      first.header().groups_size(), ", ", first.header().gradient_scale(), ", ",
                      first.header().max_norm());
}

// `places`: ranks have different tensors, and each offers values of its own.
absl::Status CheckSameOffers(const std::vector<v1::SealRequest>& offers, bool places) {
  const auto common = [places](v1::SealRequest offer) {
    offer.clear_rank();
    offer.clear_blobs();
    offer.mutable_header()->clear_gradient_presence();
    if (places) {
      offer.mutable_header()->clear_value_presence();
      offer.mutable_header()->clear_value_tensor_steps();
    }
    return offer.SerializeAsString();
  };
  const std::string first = common(offers[0]);
  for (size_t r = 1; r < offers.size(); ++r) {
    if (common(offers[r]) == first) continue;
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kPlanMismatch,
                        absl::StrCat("rank ", r, " ", DifferenceOf(offers[r], offers[0]),
                                     " on rank 0; nothing was sealed: all ranks must make the same calls with the same "
                                     "options"));
  }
  return absl::OkStatus();
}

void AddBits(const std::string& bits, std::string* to) {
  for (size_t i = 0; i < to->size() && i < bits.size(); ++i) (*to)[i] = static_cast<char>((*to)[i] | bits[i]);
}

// Adds the tensors of whose values `other` tells, with their step counts.
void AddValues(const v1::StepHeader& other, v1::StepHeader* to) {
  for (int i = 0; i < other.value_tensor_steps_size() && i < to->value_tensor_steps_size(); ++i) {
    if (model::HasBit(other.value_presence(), i)) to->set_value_tensor_steps(i, other.value_tensor_steps(i));
  }
  AddBits(other.value_presence(), to->mutable_value_presence());
}

bool AnyBit(const std::string& bitmap) {
  return std::any_of(bitmap.begin(), bitmap.end(), [](char c) { return c != '\0'; });
}

}  // namespace

absl::StatusOr<Session::Impl::Agreement> Session::Impl::Settle(const std::string& what, absl::Status mine,
                                                               v1::StepHeader header, const std::string& blob,
                                                               const Values::Source* source) {
  if (mine.ok()) mine = gradients.Flush();
  v1::SealRequest offer;
  offer.set_job(what);
  *offer.mutable_epoch() = seat.epoch();
  offer.set_step(seat.version + 1);
  offer.set_attempt(seat.attempt);
  offer.set_rank(seat.rank());
  *offer.mutable_header() = std::move(header);
  offer.mutable_header()->set_gradient_presence(gradients.presence());
  offer.add_blobs(blob);
  BALLAST_ASSIGN_OR_RETURN(const auto parts, group.Agree(what, mine, offer.SerializeAsString()));

  std::vector<v1::SealRequest> offers(parts.size());
  for (size_t r = 0; r < parts.size(); ++r) {
    if (!offers[r].ParseFromString(parts[r]) || offers[r].blobs_size() != 1) {
      return model::Error(absl::StatusCode::kInternal, model::kBadRequest, absl::StrCat("rank ", r, " sent no offer"));
    }
  }
  if (const absl::Status same = CheckSameOffers(offers, places()); !same.ok()) {
    // Brings ranks that dropped less often to the highest attempt; otherwise no step would ever be agreed on. Servers
    // ask again for slices of an older attempt.
    for (const v1::SealRequest& other : offers) seat.attempt = std::max(seat.attempt, other.attempt());
    return same;
  }

  Agreement agreed{offers[0].header(), {}};
  const std::string& presence = agreed.header.gradient_presence();
  for (const v1::SealRequest& other : offers) {
    AddBits(other.header().gradient_presence(), agreed.header.mutable_gradient_presence());
    if (places()) AddValues(other.header(), &agreed.header);
    agreed.blobs.push_back(other.blobs(0));
  }
  const absl::Status written = places() ? CheckWritten(offers[seat.rank()].header(), agreed.header) : absl::OkStatus();
  if (places() && agreed.header.kind() == v1::STEP_KIND_VALUES && !AnyBit(agreed.header.value_presence())) {
    return Precondition(absl::StrCat("nothing was written on any rank; Write comes before ", what));
  }
  // All ranks come to the same answer, before any push for the step: no rank seals a step that another refuses.
  if (source != nullptr) {
    BALLAST_RETURN_IF_ERROR(model::CheckHeader(seat.units->plan(), seat.version + 1, agreed.header, agreed.blobs));
  }
  // Everyone can tell whether anyone still has something to push; only then must all hear how it went.
  const bool writes = source != nullptr && AnyBit(agreed.header.value_presence());
  bool more = writes;
  for (const v1::SealRequest& other : offers) more = more || other.header().gradient_presence() != presence;
  if (!more) return agreed;
  mine = written.ok() ? gradients.Cover(presence) : written;
  std::exception_ptr thrown;  // by `source`, the caller's: the other ranks hear of it before the caller does
  try {
    if (mine.ok() && source != nullptr) mine = values.Push(agreed.header.value_presence(), *source);
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    (void)values.Wait();
    mine = Precondition(error.what());
  }
  const absl::Status pushed = group.Agree(what, mine);
  // Servers may have some of these values, and would refuse others in the same attempt.
  if (!pushed.ok() && writes) ++seat.attempt;
  if (thrown != nullptr) std::rethrow_exception(thrown);
  BALLAST_RETURN_IF_ERROR(pushed);
  return agreed;
}

absl::Status Session::Impl::CheckWritten(const v1::StepHeader& own, const v1::StepHeader& agreed) const {
  for (const model::Tensor& tensor : seat.units->layout().tensors()) {
    const uint32_t i = tensor.index;
    if (seat.units->Held(i) == nullptr || !model::HasBit(agreed.value_presence(), i)) continue;
    const bool same_steps = agreed.value_tensor_steps_size() == 0 || agreed.value_tensor_steps(static_cast<int>(i)) ==
                                                                         own.value_tensor_steps(static_cast<int>(i));
    if (model::HasBit(own.value_presence(), i) && same_steps) continue;
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kPlanMismatch,
                        absl::StrCat("another rank has written values of tensor '", tensor.name,
                                     "' that this rank, which has a part of it, has not, or another step count; all "
                                     "ranks that have a tensor must write it"));
  }
  return absl::OkStatus();
}

v1::TrainerTimes Session::Impl::Spent() const {
  const double pull = parameters.pull_seconds() - since.pull_seconds;
  const double gather = parameters.gather_seconds() - since.gather_seconds, push = push_seconds - since.push_seconds;
  const double all = absl::ToDoubleSeconds(absl::Now() - since.at);
  const auto us = [](double seconds) { return static_cast<uint64_t>(1e6 * std::max(0.0, seconds)); };
  v1::TrainerTimes times;
  times.set_compute_us(us(all - pull - gather - push));
  times.set_pull_wait_us(us(pull));
  times.set_gather_us(us(gather));
  times.set_push_wait_us(us(push));
  return times;
}

absl::StatusOr<v1::Decision> Session::Impl::SealAgreed(const Agreement& agreed, absl::Time deadline,
                                                       const Values::Source& source) {
  v1::SealRequest seal;
  seal.set_job(seat.job);
  *seal.mutable_epoch() = seat.epoch();
  seal.set_step(seat.version + 1);
  seal.set_attempt(seat.attempt);
  seal.set_rank(seat.rank());
  *seal.mutable_trainer_times() = spent;
  seal.set_plan_hash(model::PlanHash(seat.units->plan(), seal.step(), seat.attempt, agreed.header, agreed.blobs));
  *seal.mutable_header() = agreed.header;
  if (seat.rank() == 0) seal.mutable_blobs()->Assign(agreed.blobs.begin(), agreed.blobs.end());  // the hash covers them
  absl::Status refused;  // the servers' last refusal of a resent slice
  const auto resend = [&](absl::Span<const OwnedSlice* const> missing) -> absl::Status {
    // Slices may be on their way already: servers ask every second.
    if (!gradients.idle() || !values.idle()) return absl::OkStatus();
    for (const absl::Status& sent : {gradients.Wait(), values.Wait()}) {
      if (!sent.ok()) refused = sent;
    }
    const std::string& written = agreed.header.value_presence();
    for (const OwnedSlice* owned : missing) {
      if (seat.units->plan().Touches(owned->slice, written)) values.Resend(*owned, written, source);
      if (seat.units->plan().Touches(owned->slice, agreed.header.gradient_presence())) {
        BALLAST_RETURN_IF_ERROR(gradients.Resend(*owned));
      }
      seat.router->AwaitAdmission();  // slices gathered for a push need memory beyond the bytes in flight
    }
    return absl::OkStatus();
  };
  auto decision = transaction.SealAndDecide(seal, deadline, resend);
  if (decision.ok() || refused.ok()) return decision;
  return model::Annotate(decision.status(), absl::StrCat("after a slice was refused (", refused.message(), ")"));
}

absl::StatusOr<StepReport> Session::Impl::Transact(const std::string& what, absl::Status mine, v1::StepHeader header,
                                                   const std::string& blob, const Values::Source& source) {
  const absl::Time start = absl::Now();
  spent = Spent();
  auto agreed = Settle(what, std::move(mine), std::move(header), blob, &source);
  if (!agreed.ok()) return Conclude(agreed.status());
  auto report = Conduct(*agreed, blob, source);
  seal_seconds += absl::ToDoubleSeconds(absl::Now() - start);
  return report;
}

absl::StatusOr<StepReport> Session::Impl::Conduct(const Agreement& agreed, const std::string& blob,
                                                  const Values::Source& source) {
  // Counted from here: how long ranks wait for each other is the collective's to bound.
  auto decision = SealAgreed(agreed, seat.Deadline(), source);
  (void)values.Wait();
  if (!decision.ok()) {
    // A sealed step may still be decided by others, so this group can neither go on nor take the seal back.
    const bool lends_masters = seat.optimizer.master == kernels::MasterFormat::kLent;
    finished = model::Annotate(
        decision.status(),
        absl::StrCat("step ", seat.version + 1, " was sealed and its outcome is not known here (start the group again ",
                     "with resume=auto: that settles it",
                     lends_masters ? ". If the job is then refused with STATE_LOST, the step was not decided while the "
                                     "server had the parameters, which are their own masters in this job: drop the "
                                     "job, or take another name)"
                                   : ")"));
    return finished;
  }
  transaction.Commit(*decision);
  seat.version = decision->step();
  seat.attempt = 0;
  sealed_blob = blob;
  since = {absl::Now(), parameters.pull_seconds(), parameters.gather_seconds(), push_seconds};
  gradients.Forget();
  values.ReleaseBuffers();
  without_values = model::TensorsWithoutValues(seat.units->plan(), seat.version);
  StepReport report;
  report.version = seat.version;
  report.skipped = decision->verdict().skip();
  report.norm = decision->verdict().norm();
  // A skipped step applied nothing: what the user wrote goes with the next.
  if (!report.skipped) values.Forget(agreed.header.value_presence());
  return report;
}

absl::Status Session::Initialise(
    absl::FunctionRef<void(absl::string_view tensor, uint64_t first, absl::Span<float> values)> fill) {
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  const model::Layout& layout = impl_->seat.units->layout();
  absl::Status mine;
  if (impl_->without_values.empty()) mine = Precondition("every tensor has values; Write changes them");
  if (!impl_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before Initialise");
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  header.set_value_presence(model::MakeBitmap(static_cast<uint32_t>(layout.tensors().size()), impl_->without_values));
  const Values::Source source = [&](uint32_t tensor, uint64_t first, absl::Span<float> to) {
    fill(layout.tensors()[tensor].name, first, to);
  };
  return impl_->Transact("Initialise", std::move(mine), std::move(header), impl_->sealed_blob, source).status();
}

absl::Status Session::Drop() {
  impl_->EndLoan();
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  impl_->gradients.Forget();
  ++impl_->seat.attempt;
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Session::Step(const StepOptions& options) {
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  absl::Status mine;
  if (!impl_->without_values.empty()) {
    mine = Precondition(absl::StrCat("tensor '", impl_->seat.units->layout().tensors()[impl_->without_values[0]].name,
                                     "' has no values yet; Initialise comes before Step"));
  }
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
  }
  header.set_gradient_scale(options.gradient_scale);
  header.set_max_norm(options.max_norm);
  header.set_value_presence(impl_->values.presence());
  return impl_->Transact("Step", std::move(mine), std::move(header), options.blob, impl_->values.written());
}

absl::Status Session::RefuseStep(const absl::Status& why) {
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  return impl_->Conclude(impl_->group.Agree("Step", why));
}

absl::Status Session::Write(absl::string_view tensor, absl::Span<const float> values,
                            absl::Span<const model::BoxRun> runs) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, impl_->seat.units->layout().FindTensor(tensor));
  const uint64_t elements = impl_->seat.units->layout().tensors()[index].range.size();
  BALLAST_ASSIGN_OR_RETURN(const std::vector<model::BoxRun> whole, WholeRuns(tensor));
  if (runs.empty()) runs = whole;
  if (values.size() != model::ElementsOf(runs) || !impl_->seat.units->Covers(index, runs)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("tensor '", tensor, "' has ", elements, " elements, got ", values.size(),
                                     ", which must be all, or at least this rank's part"));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("element ", i, " of the values for tensor '", tensor, "' is ", values[i],
                                     "; master weights must be finite"));
  }
  if (impl_->values.lent()) return Precondition("values are lent; Step and AwaitApplied, or Drop, come before Write");
  if (lends_masters() && impl_->seat.units->layout().tensors()[index].frozen == v1::FROZEN_UNSPECIFIED) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("the parameter '", tensor, "' is its own master: write to it"));
  }
  impl_->values.Write(index, values, runs);
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Session::CommitValues() {
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  absl::Status mine;
  if (!impl_->without_values.empty()) mine = Precondition("some tensors have no values yet; Initialise comes first");
  if (!impl_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before CommitValues");
  // A rank may have no part of what the others have written.
  if (impl_->values.empty() && !impl_->places()) {
    mine = Precondition("nothing was written; Write comes before CommitValues");
  }
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  header.set_value_presence(impl_->values.presence());
  if (mine.ok() && impl_->lends_values() && impl_->loan != nullptr) {
    mine = Precondition("memory is lent for a step; Step or Drop comes first");
  }
  const bool lends = mine.ok() && impl_->lends_values();
  if (lends) mine = impl_->Lend(std::vector<model::LentTensor>(tensor_count()));
  auto report =
      impl_->Transact("CommitValues", std::move(mine), std::move(header), impl_->sealed_blob, impl_->values.written());
  if (!lends) return report;
  const absl::Status applied = report.ok() ? impl_->AwaitApplied() : Drop();
  return report.ok() && !applied.ok() ? applied : report;
}

absl::Status Session::Register(const std::vector<TensorSpec>& tensors) {
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  absl::Status mine;
  if (impl_->seat.version < 0) mine = Precondition("the job is new: pass all tensors to Open, or Initialise first");
  if (!impl_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before Register");
  if (!impl_->values.empty()) mine = Precondition("values were written; Step or CommitValues before Register");
  if (tensors.empty() && impl_->options.split != Split::kPlaced) mine = Precondition("no tensors to register");
  (void)impl_->transaction.AwaitCommits(impl_->seat.Deadline());
  impl_->parameters.Forget();
  auto open = Opening(impl_->router.get(), &impl_->group, impl_->options.split)
                  .Extend(*impl_->open, impl_->seat.version, tensors, mine, impl_->options.step_timeout);
  if (absl::IsAborted(open.status())) impl_->finished = open.status();
  if (!open.ok()) return impl_->Conclude(open.status());
  return impl_->Adopt(*open);
}

}  // namespace ballast::client
