#include "ballast/client/versions.h"

#include <algorithm>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/client/group/pins.h"
#include "ballast/client/session/core.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
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
                   "' had values, and has no state of this tensor; restore a version that was pinned after ",
                   "Initialise gave values to all tensors"));
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

// Asks all servers to keep the version, or, with `only_tells`, to say what they keep.
absl::StatusOr<v1::PinResponse> AskPin(const OpenJob& job, const std::string& what, int64_t version, bool durable,
                                       bool only_tells) {
  v1::PinRequest request;
  request.set_job(job.seat().job);
  request.set_version(version);
  request.set_durable(durable);
  if (durable) *request.mutable_epoch() = job.open().epoch();
  request.set_only_tell(only_tells);
  BALLAST_ASSIGN_OR_RETURN(auto answers, (CallAll<v1::PinRequest, v1::PinResponse>(
                                             job.router(), &Transport::Pin, absl::StrCat(what, " of version ", version),
                                             request, job.seat().Deadline())));
  return std::move(answers.front());
}

absl::Status AskUnpin(const OpenJob& job, int64_t version, bool durable) {
  v1::UnpinRequest request;
  request.set_job(job.seat().job);
  request.set_version(version);
  request.set_durable(durable);
  if (durable) *request.mutable_epoch() = job.open().epoch();
  return CallAll<v1::UnpinRequest, v1::UnpinResponse>(job.router(), &Transport::Unpin,
                                                      absl::StrCat("Unpin of version ", version), request,
                                                      job.seat().Deadline())
      .status();
}

// Asks all servers, by this rank alone; returns the versions that all keep.
absl::StatusOr<Pins> AskCommonPins(OpenJob& job) {
  BALLAST_RETURN_IF_ERROR(job.Usable());
  const std::shared_ptr<const Routes> routes = job.router()->routes();
  auto pins = AskPins(job.router(), job.seat().job, routes->open().has_table(), job.seat().Deadline());
  if (!pins.ok()) return job.Conclude(pins.status());
  std::erase_if(pins->versions, [&](const PinnedOn& pin) {
    const bool everywhere = pin.servers >= pins->servers;
    return pin.differs || (!everywhere && !IsBeforeFill(pin.kept, routes->open().table()));
  });
  return pins;
}

// COLLECTIVE. What servers keep of a version: rank 0 asks, unless it comes with the error `mine`, and accepts the
// answer.
absl::StatusOr<v1::PinResponse> SharePin(OpenJob& job, absl::Status mine, int64_t pinned,
                                         absl::FunctionRef<absl::Status(const v1::PinResponse&)> accept) {
  v1::PinResponse pin;
  if (job.seat().rank() == 0 && mine.ok()) {
    auto asked = AskPin(job, "Pin", pinned, /*durable=*/true, /*only_tells=*/true);
    mine = asked.ok() ? accept(*asked) : asked.status();
    if (asked.ok()) pin = *std::move(asked);
  }
  BALLAST_ASSIGN_OR_RETURN(const auto shared, job.group()->Agree("Restore", mine, pin.SerializeAsString()));
  if (pin.ParseFromString(shared[0])) return pin;
  return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "rank 0 sent no pin");
}

}  // namespace

const std::vector<std::string>& Versions::resumed_blobs() const { return resumed_blobs_; }
int64_t Versions::restored_version() const { return restored_version_; }

void Versions::Resume(const v1::OpenRequest& open) {
  if (!open.has_base_decision()) return;
  const auto& blobs = open.base_decision().blobs();
  resumed_blobs_.assign(blobs.begin(), blobs.end());
  const auto rank = static_cast<size_t>(core_->job.group()->rank());
  if (rank < resumed_blobs_.size()) core_->transactions.Resume(resumed_blobs_[rank]);
}

absl::Status Versions::Pin() {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  const int64_t version = core_->job.seat().version;
  const auto pinned = AskPin(core_->job, "Pin", version, /*durable=*/false, /*only_tells=*/false);
  if (!pinned.ok()) return core_->job.Conclude(pinned.status());
  pinned_steps_[version].assign(pinned->tensor_steps().begin(), pinned->tensor_steps().end());
  return absl::OkStatus();
}

absl::Status Versions::Unpin(int64_t version) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  pinned_steps_.erase(version);
  return core_->job.Conclude(AskUnpin(core_->job, version, /*durable=*/false));
}

absl::Status Versions::PinDurably() {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  const int64_t version = core_->job.seat().version;
  const absl::Status pinned =
      AskPin(core_->job, "Durable pin", version, /*durable=*/true, /*only_tells=*/false).status();
  // A pin that some servers have is of no use and takes their space.
  if (absl::IsResourceExhausted(pinned)) (void)UnpinDurably(version);
  return core_->job.Conclude(pinned);
}

absl::Status Versions::UnpinDurably(int64_t version) {
  BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  return core_->job.Conclude(AskUnpin(core_->job, version, /*durable=*/true));
}

absl::StatusOr<std::vector<KeptVersion>> Versions::DurablePins() {
  BALLAST_ASSIGN_OR_RETURN(const Pins pins, AskCommonPins(core_->job));
  std::vector<KeptVersion> kept;
  for (const PinnedOn& pin : pins.versions) kept.push_back(pin.kept);
  return kept;
}

absl::Status Versions::CheckKept(const KeptVersion& wanted) {
  BALLAST_ASSIGN_OR_RETURN(const Pins pins, AskCommonPins(core_->job));
  const std::string& job = core_->job.seat().job;
  if (wanted.life != 0 && pins.life != 0 && wanted.life != pins.life) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kBadSpec,
        absl::StrCat("version ", wanted.version, " is of an earlier job '", job,
                     "', which was dropped or whose data directories were removed. The version has life ",
                     absl::Hex(wanted.life, absl::kZeroPad16), ", the job that now has this name has life ",
                     absl::Hex(pins.life, absl::kZeroPad16),
                     ". Bring the earlier job's directories back, or load a state that has "
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
          "version ", wanted.version, " of job '", job, "' is of another history: you asked for the one ",
          "decided in epoch ", Show(wanted.decided_by), ", and the servers keep the one of epoch ",
          Show(found->kept.decided_by),
          ". The servers' directories were replaced by an older copy, and the job went on from there. Bring the "
          "directories back, or load a state that has the values themselves. Nothing was changed"));
}

absl::StatusOr<StepReport> Versions::Restore(const KeptVersion& kept) {
  OpenJob& job = core_->job;
  BALLAST_RETURN_IF_ERROR(job.Usable());
  absl::Status mine;
  if (job.seat().version < 0) mine = Precondition("the job is new and has nothing to restore; Initialise comes first");
  if (!core_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before Restore");
  if (!core_->values.empty()) mine = Precondition("values were written; Step or CommitValues before Restore");
  BALLAST_ASSIGN_OR_RETURN(const auto wanted, job.group()->Agree("Restore", mine, Show(kept)));
  if (std::any_of(wanted.begin(), wanted.end(), [&](const std::string& theirs) { return theirs != wanted[0]; })) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("ranks restore different versions: ", absl::StrJoin(wanted, ", ")));
  }
  (void)core_->transactions.AwaitCommits(job.seat().Deadline());
  // Before the fence: a version that is not there, or cannot be restored, must not cost the group its epoch.
  if (job.seat().rank() == 0) mine = CheckKept(kept);
  const auto pin = SharePin(job, mine, kept.version, [&](const v1::PinResponse& told) {
    return CheckRegistrations(job.open().spec(), told, kept.version);
  });
  if (!pin.ok()) return job.Conclude(pin.status());
  BALLAST_RETURN_IF_ERROR(core_->Extend({}, absl::OkStatus()));
  return BringBack(kept.version, *pin);
}

absl::StatusOr<StepReport> Versions::BringBack(int64_t pinned, const v1::PinResponse& pin) {
  const std::string nothing = model::MakeBitmap(core_->job.tensor_count(), {});
  Agreement agreed;
  agreed.header.set_kind(v1::STEP_KIND_RESTORE);
  agreed.header.set_gradient_scale(1);
  agreed.header.set_gradient_presence(nothing);
  agreed.header.set_value_presence(nothing);
  agreed.header.set_restored_version(pinned);
  agreed.blobs.assign(pin.blobs().begin(), pin.blobs().end());
  const uint32_t rank = core_->job.seat().rank();
  BALLAST_ASSIGN_OR_RETURN(
      const StepReport report,
      core_->transactions.Conduct(agreed, rank < agreed.blobs.size() ? agreed.blobs[rank] : "", Values::Source()));
  resumed_blobs_ = std::move(agreed.blobs);
  return report;
}

absl::Status Versions::GoBack(int64_t pinned) {
  OpenJob& job = core_->job;
  BALLAST_ASSIGN_OR_RETURN(const v1::PinResponse pin,
                           SharePin(job, absl::OkStatus(), pinned, [](const auto&) { return absl::OkStatus(); }));
  BALLAST_ASSIGN_OR_RETURN(const StepReport report, BringBack(pinned, pin));
  restored_version_ = pinned;
  if (job.options().progress != nullptr && job.seat().rank() == 0) {
    job.options().progress(absl::StrCat("a server had lost its state, so job '", job.seat().job,
                                        "' goes on from version ", pinned, " as version ", report.version));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Versions::TensorSteps(absl::string_view tensor, int64_t version) {
  const OpenJob& job = core_->job;
  BALLAST_RETURN_IF_ERROR(job.CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, job.layout().FindTensor(tensor));
  if (version != job.seat().version) {
    const auto pinned = pinned_steps_.find(version);
    if (pinned != pinned_steps_.end() && index < pinned->second.size()) return pinned->second[index];
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kVersionGone,
        absl::StrCat("step counts of tensor '", tensor, "' at version ", version, " are not known: this ",
                     "session is at version ", job.seat().version, " and did not pin ", version));
  }
  if (known_version_ == version && index < known_steps_.size()) return known_steps_[index];
  // Step counts come from the servers, which are at the version once they took its commit.
  for (const bool again : {false, true}) {
    if (again) core_->transactions.CommitAgain();
    (void)core_->transactions.AwaitCommits(job.seat().Deadline());
    v1::GetJobRequest ask;
    ask.set_job(job.seat().job);
    ask.set_without_open(true);
    BALLAST_ASSIGN_OR_RETURN(const auto answers,
                             (CallAll<v1::GetJobRequest, v1::GetJobResponse>(job.router(), &Transport::GetJob, "GetJob",
                                                                             ask, job.seat().Deadline())));
    for (const v1::GetJobResponse& answer : answers) {
      if (answer.committed() != version || static_cast<int>(index) >= answer.tensor_steps_size()) continue;
      known_version_ = version;
      known_steps_.assign(answer.tensor_steps().begin(), answer.tensor_steps().end());
      return known_steps_[index];
    }
  }
  return model::Error(absl::StatusCode::kUnavailable, model::kBehind,
                      absl::StrCat("no server is at version ", version, " yet; ask again"));
}

}  // namespace ballast::client
