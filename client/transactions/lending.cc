#include "ballast/client/transactions/lending.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/transport/tally.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

bool Lending::possible() const {
  const Router* router = job_->router();
  return job_->group()->world_size() == 1 && router->server_count() == 1 && router->transport(0)->TakesLoans();
}

bool Lending::of_values() const { return possible() && job_->open().spec().durability() != v1::DURABILITY_STEP; }

absl::Status Lending::Lend(std::vector<model::LentTensor> tensors) {
  const Seat& seat = job_->seat();
  // The server must be at version(), because the loan is for the following step.
  if (!transactions_->AwaitCommits(seat.Deadline())) {
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kBehind,
                        absl::StrCat("the server did not take the commit of step ", seat.version));
  }
  if (of_values()) {
    for (const auto& [tensor, written] : values_->Lend()) {
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
  auto lent = seat.router->transport(0)->Lend(request);
  if (!lent.ok()) {
    values_->EndLoan();
    return job_->Conclude(lent.status());
  }
  loan_ = *std::move(lent);
  return absl::OkStatus();
}

absl::Status Lending::Await(std::optional<uint32_t> unit) {
  const Seat& seat = job_->seat();
  auto tally = std::make_shared<Tally>();
  tally->Start();
  seat.router->transport(0)->AwaitApplied(seat.job, seat.version, unit, seat.Deadline(),
                                          [tally](const absl::Status& status) { tally->Finish(status); });
  return tally->Wait();
}

absl::Status Lending::AwaitApplied() {
  absl::Status applied = job_->Usable();
  if (applied.ok()) applied = Await(std::nullopt);
  End();
  return job_->Conclude(applied);
}

void Lending::End() {
  if (job_->forked()) return;
  // A decided step must be applied from lent memory, not from copies.
  if (loan_ != nullptr) (void)transactions_->AwaitCommits(job_->seat().Deadline());
  loan_.reset();
  values_->EndLoan();
}

}  // namespace ballast::client
