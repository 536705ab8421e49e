// How a session lends the trainer's memory to a server in its process.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/session_impl.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {
namespace {

absl::Status Precondition(absl::string_view message) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, message);
}

}  // namespace

bool Session::takes_loans() const {
  return world_size() == 1 && impl_->router->server_count() == 1 && impl_->router->transport(0)->TakesLoans();
}

absl::Status Session::Lend(std::vector<model::LentTensor> tensors) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.CheckReadable(0));
  if (impl.loan != nullptr) return Precondition("memory is lent already; AwaitApplied or Drop ends that loan");
  if (tensors.size() != tensor_count()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("expected ", tensor_count(), " tensors, ", tensors.size(), " were lent"));
  }
  std::vector<uint32_t> present;
  for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (tensors[tensor].gradient == nullptr) continue;
    if (!impl.seat.units->layout().live(tensor)) return Precondition("a tensor that was replaced has no gradient");
    present.push_back(tensor);
  }
  if (!present.empty()) BALLAST_RETURN_IF_ERROR(impl.gradients.CheckLend());
  const absl::Time start = absl::Now();
  // The server must be at version(): what it is lent is for the step that follows.
  if (!impl.transaction.AwaitCommits(impl.seat.Deadline())) {
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kBehind,
                        absl::StrCat("the server did not take the commit of step ", impl.seat.version));
  }
  model::LoanRequest request{.job = impl.seat.job,
                             .epoch = impl.seat.epoch(),
                             .step = impl.seat.version + 1,
                             .attempt = impl.seat.attempt,
                             .tensors = std::move(tensors)};
  auto loan = impl.router->transport(0)->Lend(request);
  if (!loan.ok()) return impl.Conclude(loan.status());
  impl.loan = *std::move(loan);
  if (!present.empty()) impl.gradients.Lend(model::MakeBitmap(tensor_count(), present));
  impl.push_seconds += absl::ToDoubleSeconds(absl::Now() - start);
  return absl::OkStatus();
}

absl::Status Session::AwaitApplied() {
  Impl& impl = *impl_;
  absl::Status applied = impl.Usable();
  if (applied.ok() && !impl.gradients.empty()) return Precondition("gradients were given; Step or Drop comes before");
  if (applied.ok()) {
    auto tally = std::make_shared<Tally>();
    tally->Start();
    impl.router->transport(0)->AwaitApplied(impl.seat.job, impl.seat.version, impl.seat.Deadline(),
                                            [tally](const absl::Status& status) { tally->Finish(status); });
    applied = tally->Wait();
  }
  impl.EndLoan();
  return impl.Conclude(applied);
}

bool Session::takes_gradients() const {
  return takes_loans() && impl_->open->spec().durability() != v1::DURABILITY_STEP;
}

bool Session::written(uint32_t tensor) const { return model::HasBit(impl_->values.presence(), tensor); }

}  // namespace ballast::client
