#include "ballast/client/loans.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/session/core.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

bool Loans::takes_loans() const { return core_->lending.possible(); }
bool Loans::takes_gradients() const { return core_->lending.of_values(); }
bool Loans::lends_masters() const { return core_->job.lends_masters(); }

absl::Status Loans::Lend(std::vector<model::LentTensor> tensors) {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  if (core_->lending.active()) return Precondition("memory is lent already; AwaitApplied or Drop ends that loan");
  if (tensors.size() != core_->job.tensor_count()) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadLength,
        absl::StrCat("expected ", core_->job.tensor_count(), " tensors, ", tensors.size(), " were lent"));
  }
  std::vector<uint32_t> gradients, values;
  for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (tensors[tensor].gradient != nullptr) gradients.push_back(tensor);
    if (tensors[tensor].value != nullptr) values.push_back(tensor);
  }
  if (values.empty()) BALLAST_RETURN_IF_ERROR(core_->job.CheckReadable(0));
  if (values != core_->job.without_values()) {
    const uint32_t first = core_->job.without_values().empty() ? values[0] : core_->job.without_values()[0];
    return Precondition(
        absl::StrCat("lend values of all tensors that have no values yet, and of no others (Write changes "
                     "those); see tensor '",
                     core_->job.layout().tensors()[first].name, "'"));
  }
  if (!gradients.empty()) {
    BALLAST_RETURN_IF_ERROR(core_->gradients.CheckLend());
    for (const uint32_t tensor : gradients) {
      if (!core_->job.layout().live(tensor)) return Precondition("a tensor that was replaced has no gradient");
    }
  }
  const absl::Time start = absl::Now();
  BALLAST_RETURN_IF_ERROR(core_->lending.Lend(std::move(tensors)));
  if (!gradients.empty()) core_->gradients.Lend(model::MakeBitmap(core_->job.tensor_count(), gradients));
  core_->transactions.CountPush(start);
  return absl::OkStatus();
}

absl::Status Loans::AwaitApplied() {
  if (core_->job.Usable().ok() && !core_->gradients.empty()) {
    return Precondition("gradients were given; Step or Drop comes before");
  }
  return core_->lending.AwaitApplied();
}

absl::Status Loans::AwaitUnit(uint32_t unit) {
  BALLAST_RETURN_IF_ERROR(core_->job.Usable());
  if (!core_->lending.active() || !core_->gradients.empty())
    return Precondition("await a unit after Step, and before AwaitApplied");
  return core_->job.Conclude(core_->lending.Await(unit));
}

}  // namespace ballast::client
