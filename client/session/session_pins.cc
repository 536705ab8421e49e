// Durable pins of a session, and the way back to one.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/client/session.h"
#include "ballast/client/session/session_impl.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// A version has no state of tensors that got their values later, and a job forgets none.
absl::Status CheckRegistrations(const v1::JobSpec& spec, const v1::PinResponse& pin, int64_t version) {
  const auto had = static_cast<int>(pin.registration_count());
  if (had >= spec.registrations_size()) return absl::OkStatus();
  const auto& since = spec.registrations(had).tensors();
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kBadSpec,
      absl::StrCat("version ", version, " was pinned before tensor '", since.empty() ? "" : since.at(0).name(),
                   "' had values, and has no state of it: of this job only versions can be restored that are pinned ",
                   "after Initialise has given values to all tensors"));
}

std::string Show(const v1::Epoch& epoch) {
  return absl::StrCat(epoch.counter(), "-", absl::Hex(epoch.nonce(), absl::kZeroPad16));
}

// The number, and what is known beside it.
std::string Show(const KeptVersion& kept) {
  std::string text = absl::StrCat(kept.version);
  if (kept.life != 0) absl::StrAppend(&text, " of life ", absl::Hex(kept.life, absl::kZeroPad16));
  if (kept.decided_by.counter() != 0) absl::StrAppend(&text, " decided in epoch ", Show(kept.decided_by));
  return text;
}

}  // namespace

absl::Status Session::PinDurably() {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  v1::PinRequest request;
  request.set_job(impl_->seat.job);
  request.set_version(version());
  request.set_durable(true);
  *request.mutable_epoch() = impl_->open->epoch();
  const auto answers = impl_->router->CallAll<v1::PinRequest, v1::PinResponse>(
      &Transport::Pin, absl::StrCat("Durable pin of version ", version()), request, impl_->seat.Deadline());
  if (answers.ok()) return absl::OkStatus();
  // A pin that some servers have is of no use and takes their space.
  if (absl::IsResourceExhausted(answers.status())) (void)UnpinDurably(version());
  return impl_->Conclude(answers.status());
}

absl::Status Session::UnpinDurably(int64_t version) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  v1::UnpinRequest request;
  request.set_job(impl_->seat.job);
  request.set_version(version);
  request.set_durable(true);
  *request.mutable_epoch() = impl_->open->epoch();
  const auto answers = impl_->router->CallAll<v1::UnpinRequest, v1::UnpinResponse>(
      &Transport::Unpin, absl::StrCat("Unpin of version ", version), request, impl_->seat.Deadline());
  return impl_->Conclude(answers.status());
}

absl::StatusOr<Pins> Session::Impl::AskCommonPins() {
  BALLAST_RETURN_IF_ERROR(Usable());
  auto pins = AskPins(router.get(), seat.job, seat.Deadline());
  if (!pins.ok()) return Conclude(pins.status());
  std::erase_if(pins->versions,
                [&](const PinnedOn& pin) { return pin.differs || pin.servers < router->server_count(); });
  return pins;
}

absl::StatusOr<std::vector<KeptVersion>> Session::DurablePins() {
  BALLAST_ASSIGN_OR_RETURN(const Pins pins, impl_->AskCommonPins());
  std::vector<KeptVersion> kept;
  for (const PinnedOn& pin : pins.versions) kept.push_back(pin.kept);
  return kept;
}

absl::Status Session::CheckKept(const KeptVersion& wanted) {
  BALLAST_ASSIGN_OR_RETURN(const Pins pins, impl_->AskCommonPins());
  const std::string& job = impl_->seat.job;
  if (wanted.life != 0 && pins.life != 0 && wanted.life != pins.life) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kBadSpec,
        absl::StrCat("version ", wanted.version, " is of an earlier job '", job,
                     "', which was dropped or whose data directories were removed: it is of life ",
                     absl::Hex(wanted.life, absl::kZeroPad16), ", and the job of that name now of life ",
                     absl::Hex(pins.life, absl::kZeroPad16),
                     ". The version went with the earlier job: bring its directories back, or take a state that has "
                     "the values themselves. Nothing was changed"));
  }
  const auto found = std::find_if(pins.versions.begin(), pins.versions.end(),
                                  [&](const PinnedOn& pin) { return pin.kept.version == wanted.version; });
  if (found == pins.versions.end()) {
    const auto number = [](std::string* out, const PinnedOn& pin) { absl::StrAppend(out, pin.kept.version); };
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kVersionGone,
        absl::StrCat("version ", wanted.version, " of job '", job, "' is not kept by all servers; ",
                     pins.versions.empty() ? "no version is"
                                           : absl::StrCat("these are: ", absl::StrJoin(pins.versions, ", ", number))));
  }
  if (model::MayBeSame(wanted.decided_by, found->kept.decided_by)) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kVersionGone,
      absl::StrCat(
          "version ", wanted.version, " of job '", job, "' is of another history than the one asked for: that ",
          "one was decided in epoch ", Show(wanted.decided_by), ", the servers keep the one of epoch ",
          Show(found->kept.decided_by),
          ". The servers' directories were replaced by an older copy, and the job went on from there: bring the "
          "directories back, or take a state that has the values themselves. Nothing was changed"));
}

absl::StatusOr<v1::PinResponse> Session::Impl::AskPin(int64_t pinned) {
  v1::PinRequest request;
  request.set_job(seat.job);
  request.set_version(pinned);
  request.set_durable(true);
  *request.mutable_epoch() = open->epoch();
  request.set_only_tell(true);
  BALLAST_ASSIGN_OR_RETURN(auto answers,
                           (router->CallAll<v1::PinRequest, v1::PinResponse>(
                               &Transport::Pin, absl::StrCat("Pin of version ", pinned), request, seat.Deadline())));
  return std::move(answers.front());
}

absl::StatusOr<StepReport> Session::Impl::BringBack(int64_t pinned, const v1::PinResponse& pin) {
  const std::string nothing =
      model::MakeBitmap(static_cast<uint32_t>(seat.units->layout().tensors().size()), std::vector<uint32_t>());
  Agreement agreed;
  agreed.header.set_kind(v1::STEP_KIND_RESTORE);
  agreed.header.set_gradient_scale(1);
  agreed.header.set_gradient_presence(nothing);
  agreed.header.set_value_presence(nothing);
  agreed.header.set_restored_version(pinned);
  agreed.blobs.assign(pin.blobs().begin(), pin.blobs().end());
  const auto rank = static_cast<size_t>(seat.rank());
  BALLAST_ASSIGN_OR_RETURN(
      const StepReport report,
      Conduct(agreed, rank < agreed.blobs.size() ? agreed.blobs[rank] : std::string(), Values::Source()));
  resumed_blobs = std::move(agreed.blobs);
  return report;
}

absl::Status Session::Impl::GoBack(int64_t pinned) {
  v1::PinResponse pin;
  absl::Status mine;
  if (seat.rank() == 0) {
    auto asked = AskPin(pinned);
    mine = asked.status();
    if (asked.ok()) pin = *std::move(asked);
  }
  BALLAST_ASSIGN_OR_RETURN(const auto shared, group.Agree("Restore", mine, pin.SerializeAsString()));
  if (!pin.ParseFromString(shared[0])) {
    return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "rank 0 sent no pin");
  }
  BALLAST_ASSIGN_OR_RETURN(const StepReport report, BringBack(pinned, pin));
  restored_version = pinned;
  if (options.progress != nullptr && seat.rank() == 0) {
    options.progress(absl::StrCat("a server had lost its state: job '", seat.job, "' goes on from that of version ",
                                  pinned, " as version ", report.version));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReport> Session::Restore(const KeptVersion& kept) {
  BALLAST_RETURN_IF_ERROR(impl_->Usable());
  Impl& impl = *impl_;
  const int64_t version = kept.version;
  absl::Status mine;
  if (impl.seat.version < 0) mine = Precondition("the job is new and has nothing to restore; Initialise comes first");
  if (!impl.gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before Restore");
  if (!impl.values.empty()) mine = Precondition("values were written; Step or CommitValues before Restore");
  BALLAST_ASSIGN_OR_RETURN(const auto wanted, impl.group.Agree("Restore", mine, Show(kept)));
  if (std::any_of(wanted.begin(), wanted.end(), [&](const std::string& theirs) { return theirs != wanted[0]; })) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("ranks restore different versions: ", absl::StrJoin(wanted, ", ")));
  }
  (void)impl.transaction.AwaitCommits(impl.seat.Deadline());
  // Before the fence: a version that is not there, or cannot be restored, must not cost the group its epoch.
  v1::PinResponse pin;
  if (rank() == 0) {
    mine = CheckKept(kept);
    if (mine.ok()) {
      auto asked = impl.AskPin(version);
      mine = asked.status();
      if (asked.ok()) pin = *std::move(asked);
    }
    if (mine.ok()) mine = CheckRegistrations(impl.open->spec(), pin, version);
  }
  auto shared = impl.group.Agree("Restore", mine, pin.SerializeAsString());
  if (!shared.ok()) return impl.Conclude(shared.status());
  if (!pin.ParseFromString((*shared)[0])) {
    return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "rank 0 sent no pin");
  }
  impl.parameters.Forget();
  auto open = Opening(impl.router.get(), &impl.group, impl.options.split)
                  .Extend(*impl.open, impl.seat.version, {}, absl::OkStatus(), impl.options.step_timeout);
  if (absl::IsAborted(open.status())) impl.finished = open.status();
  if (!open.ok()) return impl.Conclude(open.status());
  BALLAST_RETURN_IF_ERROR(impl.Adopt(*open));
  return impl.BringBack(version, pin);
}

}  // namespace ballast::client
