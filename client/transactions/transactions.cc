#include "ballast/client/transactions/transactions.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/step_header.h"

namespace ballast::client {

v1::SealRequest Transactions::Offer(const std::string& what, v1::StepHeader header, const std::string& blob) const {
  const Seat& seat = job_->seat();
  v1::SealRequest offer;
  offer.set_job(what);
  *offer.mutable_epoch() = seat.epoch();
  offer.set_step(seat.version + 1);
  offer.set_attempt(seat.attempt);
  offer.set_rank(seat.rank());
  *offer.mutable_header() = std::move(header);
  offer.mutable_header()->set_gradient_presence(gradients_->presence());
  offer.add_blobs(blob);
  return offer;
}

absl::StatusOr<Agreement> Transactions::Settle(const std::string& what, absl::Status mine, v1::StepHeader header,
                                               const std::string& blob, const Values::Source* source) {
  const bool places = job_->places();
  if (mine.ok()) mine = gradients_->Flush();
  const v1::SealRequest own = Offer(what, std::move(header), blob);
  BALLAST_ASSIGN_OR_RETURN(const auto said, job_->group()->Agree(what, mine, own.SerializeAsString()));
  BALLAST_ASSIGN_OR_RETURN(const Offers offers, ParseOffers(said));
  if (const absl::Status same = CheckSameOffers(offers, places); !same.ok()) {
    // Brings ranks that dropped less often to the highest attempt; otherwise no step would ever be agreed on. Servers
    // ask again for slices of an older attempt.
    for (const v1::SealRequest& other : offers) job_->CatchUp(other.attempt());
    return same;
  }
  Agreement agreed = Join(offers, places);
  if (places && agreed.header.kind() == v1::STEP_KIND_VALUES && !AnyBit(agreed.header.value_presence())) {
    return Precondition(absl::StrCat("nothing was written on any rank; Write comes before ", what));
  }
  // All ranks come to the same answer, before any push for the step: no rank seals a step that another refuses.
  const Seat& seat = job_->seat();
  if (source != nullptr) {
    BALLAST_RETURN_IF_ERROR(model::CheckHeader(seat.units->plan(), seat.version + 1, agreed.header, agreed.blobs));
  }
  // Everyone can tell whether anyone still has something to push; only then must all hear how it went.
  const bool writes = source != nullptr && AnyBit(agreed.header.value_presence());
  if (!writes && !GradientsDiffer(offers, agreed.header)) return agreed;
  mine = places ? CheckWritten(*seat.units, own.header(), agreed.header) : absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(PushRest(what, agreed.header, std::move(mine), source));
  return agreed;
}

absl::Status Transactions::PushRest(const std::string& what, const v1::StepHeader& agreed, absl::Status mine,
                                    const Values::Source* source) {
  if (mine.ok()) mine = gradients_->Cover(agreed.gradient_presence());
  std::exception_ptr thrown;  // by `source`, the caller's: the other ranks hear of it before the caller does
  try {
    if (mine.ok() && source != nullptr) mine = values_->Push(agreed.value_presence(), *source);
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    (void)values_->Wait();
    mine = Precondition(error.what());
  }
  const absl::Status pushed = job_->group()->Agree(what, mine);
  // Servers may have some of these values, and would refuse others in the same attempt.
  if (!pushed.ok() && source != nullptr && AnyBit(agreed.value_presence())) job_->NextAttempt();
  if (thrown != nullptr) std::rethrow_exception(thrown);
  return pushed;
}

v1::TrainerTimes Transactions::Spent() const {
  const double pull = parameters_->pull_seconds() - since_.pull_seconds;
  const double gather = parameters_->gather_seconds() - since_.gather_seconds;
  const double push = push_seconds() - since_.push_seconds;
  const double all = absl::ToDoubleSeconds(absl::Now() - since_.at);
  const auto us = [](double seconds) { return static_cast<uint64_t>(1e6 * std::max(0.0, seconds)); };
  v1::TrainerTimes times;
  times.set_compute_us(us(all - pull - gather - push));
  times.set_pull_wait_us(us(pull));
  times.set_gather_us(us(gather));
  times.set_push_wait_us(us(push));
  return times;
}

absl::Status Transactions::Resend(absl::Span<const OwnedSlice* const> missing, const v1::StepHeader& agreed,
                                  const Values::Source& source, absl::Status* refused) {
  // Slices may be on their way already: servers ask every second.
  if (!gradients_->idle() || !values_->idle()) return absl::OkStatus();
  for (const absl::Status& sent : {gradients_->Wait(), values_->Wait()}) {
    if (!sent.ok()) *refused = sent;
  }
  const Seat& seat = job_->seat();
  for (const OwnedSlice* owned : missing) {
    if (seat.units->plan().Touches(owned->slice, agreed.value_presence())) {
      values_->Resend(*owned, agreed.value_presence(), source);
    }
    if (seat.units->plan().Touches(owned->slice, agreed.gradient_presence())) {
      BALLAST_RETURN_IF_ERROR(gradients_->Resend(*owned));
    }
    seat.router->push_admissions().Await();  // slices gathered for a push need memory beyond the bytes in flight
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Decision> Transactions::Seal(const Agreement& agreed, const Values::Source& source) {
  const Seat& seat = job_->seat();
  v1::SealRequest seal;
  seal.set_job(seat.job);
  *seal.mutable_epoch() = seat.epoch();
  seal.set_step(seat.version + 1);
  seal.set_attempt(seat.attempt);
  seal.set_rank(seat.rank());
  *seal.mutable_trainer_times() = spent_;
  seal.set_plan_hash(model::PlanHash(seat.units->plan(), seal.step(), seat.attempt, agreed.header, agreed.blobs));
  *seal.mutable_header() = agreed.header;
  if (seat.rank() == 0) seal.mutable_blobs()->Assign(agreed.blobs.begin(), agreed.blobs.end());  // the hash covers them
  absl::Status refused;
  const auto resend = [&](absl::Span<const OwnedSlice* const> missing) {
    return Resend(missing, agreed.header, source, &refused);
  };
  // The deadline counts from here: how long ranks wait for each other is the collective's to bound.
  auto decision = transaction_.SealAndDecide(seal, seat.Deadline(), resend);
  if (decision.ok() || refused.ok()) return decision;
  return model::Annotate(decision.status(), absl::StrCat("after a slice was refused (", refused.message(), ")"));
}

absl::StatusOr<StepReport> Transactions::Transact(const std::string& what, absl::Status mine, v1::StepHeader header,
                                                  const std::string& blob, const Values::Source& source) {
  const absl::Time start = absl::Now();
  spent_ = Spent();
  auto agreed = Settle(what, std::move(mine), std::move(header), blob, &source);
  if (!agreed.ok()) return job_->Conclude(agreed.status());
  auto report = Conduct(*agreed, blob, source);
  seal_seconds_ += absl::ToDoubleSeconds(absl::Now() - start);
  return report;
}

// Others may still decide a sealed step, so this group can neither go on nor take the seal back.
absl::Status Transactions::OutcomeUnknown(const absl::Status& why) const {
  return model::Annotate(
      why, absl::StrCat("step ", job_->seat().version + 1, " was sealed and its outcome is not known here (start the ",
                        "group again with resume=auto, which settles it",
                        job_->lends_masters()
                            ? ". If the job is then refused with STATE_LOST, the step was not decided while the "
                              "server had the parameters, which are their own masters in this job. Drop the "
                              "job, or take another name)"
                            : ")"));
}

absl::StatusOr<StepReport> Transactions::Conduct(const Agreement& agreed, const std::string& blob,
                                                 const Values::Source& source) {
  const auto decision = Seal(agreed, source);
  (void)values_->Wait();
  if (!decision.ok()) {
    job_->End(OutcomeUnknown(decision.status()));
    return job_->ended();
  }
  transaction_.Commit(*decision);
  job_->Advance(decision->step());
  sealed_blob_ = blob;
  since_ = {absl::Now(), parameters_->pull_seconds(), parameters_->gather_seconds(), push_seconds()};
  gradients_->Forget();
  values_->ReleaseBuffers();
  StepReport report;
  report.version = decision->step();
  report.skipped = decision->verdict().skip();
  report.norm = decision->verdict().norm();
  // A skipped step applied nothing: what the user wrote goes with the next.
  if (!report.skipped) values_->Forget(agreed.header.value_presence());
  return report;
}

}  // namespace ballast::client
