// How a session lends the trainer's memory to a server in its process.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/session/session_impl.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {

bool Session::Impl::takes_loans() const {
  return group.world_size() == 1 && router->server_count() == 1 && router->transport(0)->TakesLoans();
}

bool Session::Impl::lends_values() const { return takes_loans() && open->spec().durability() != v1::DURABILITY_STEP; }

bool Session::takes_loans() const { return impl_->takes_loans(); }
bool Session::lends_masters() const { return impl_->seat.optimizer.master == kernels::MasterFormat::kLent; }

absl::Status Session::Lend(std::vector<model::LentTensor> tensors) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.Usable());
  if (impl.loan != nullptr) return Precondition("memory is lent already; AwaitApplied or Drop ends that loan");
  if (tensors.size() != tensor_count()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("expected ", tensor_count(), " tensors, ", tensors.size(), " were lent"));
  }
  std::vector<uint32_t> gradients, values;
  for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (tensors[tensor].gradient != nullptr) gradients.push_back(tensor);
    if (tensors[tensor].value != nullptr) values.push_back(tensor);
  }
  if (values.empty()) BALLAST_RETURN_IF_ERROR(impl.CheckReadable(0));
  if (values != impl.without_values) {
    const uint32_t first = impl.without_values.empty() ? values[0] : impl.without_values[0];
    return Precondition(
        absl::StrCat("values are lent of all tensors that have none yet, and of no others (Write takes "
                     "those); see tensor '",
                     impl.seat.units->layout().tensors()[first].name, "'"));
  }
  if (!gradients.empty()) {
    BALLAST_RETURN_IF_ERROR(impl.gradients.CheckLend());
    for (const uint32_t tensor : gradients) {
      if (!impl.seat.units->layout().live(tensor)) return Precondition("a tensor that was replaced has no gradient");
    }
  }
  const absl::Time start = absl::Now();
  BALLAST_RETURN_IF_ERROR(impl.Lend(std::move(tensors)));
  if (!gradients.empty()) impl.gradients.Lend(model::MakeBitmap(tensor_count(), gradients));
  impl.push_seconds += absl::ToDoubleSeconds(absl::Now() - start);
  return absl::OkStatus();
}

absl::Status Session::Impl::Lend(std::vector<model::LentTensor> tensors) {
  // The server must be at version(), because the loan is for the following step.
  if (!transaction.AwaitCommits(seat.Deadline())) {
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kBehind,
                        absl::StrCat("the server did not take the commit of step ", seat.version));
  }
  if (lends_values()) {
    for (const auto& [tensor, written] : values.Lend()) {
      if (tensors[tensor].value != nullptr) continue;
      tensors[tensor].value = reinterpret_cast<const std::byte*>(written);
      tensors[tensor].value_dtype = kernels::Dtype::kF32;
    }
  }
  model::LoanRequest request{.job = seat.job,
                             .epoch = seat.epoch(),
                             .step = seat.version + 1,
                             .attempt = seat.attempt,
                             .tensors = std::move(tensors)};
  auto lent = router->transport(0)->Lend(request);
  if (!lent.ok()) {
    values.EndLoan();
    return Conclude(lent.status());
  }
  loan = *std::move(lent);
  return absl::OkStatus();
}

absl::Status Session::AwaitApplied() {
  if (impl_->Usable().ok() && !impl_->gradients.empty()) {
    return Precondition("gradients were given; Step or Drop comes before");
  }
  return impl_->AwaitApplied();
}

absl::Status Session::AwaitUnit(uint32_t unit) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.Usable());
  if (impl.loan == nullptr || !impl.gradients.empty())
    return Precondition("a unit is awaited after Step, and before AwaitApplied");
  return impl.Conclude(impl.Await(unit));
}

absl::Status Session::Impl::Await(std::optional<uint32_t> unit) {
  auto tally = std::make_shared<Tally>();
  tally->Start();
  router->transport(0)->AwaitApplied(seat.job, seat.version, unit, seat.Deadline(),
                                     [tally](const absl::Status& status) { tally->Finish(status); });
  return tally->Wait();
}

absl::Status Session::Impl::AwaitApplied() {
  absl::Status applied = Usable();
  if (applied.ok()) applied = Await(std::nullopt);
  EndLoan();
  return Conclude(applied);
}

bool Session::takes_gradients() const { return impl_->lends_values(); }

bool Session::needs_values(uint32_t tensor) const {
  return std::binary_search(impl_->without_values.begin(), impl_->without_values.end(), tensor);
}

bool Session::written(uint32_t tensor) const { return model::HasBit(impl_->values.presence(), tensor); }

}  // namespace ballast::client
