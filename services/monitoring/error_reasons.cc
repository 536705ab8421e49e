#include "ballast/services/monitoring/error_reasons.h"

#include "ballast/proto/base/status.h"

namespace ballast::services {

const std::vector<std::pair<Call, std::string>>& ExpectedErrors() {
  static const auto* const kErrors = [] {
    // Any call of a trainer.
    const std::vector<std::string> common = {model::kBusy,       model::kServerDown, model::kUnknownJob,
                                             model::kStaleEpoch, model::kBadRequest, model::kStateLost,
                                             model::kIo,         "CANCELLED",        "DEADLINE_EXCEEDED"};
    const std::vector<std::pair<Call, std::vector<std::string>>> further = {
        {Call::kFence, {model::kBudget, model::kLimit}},
        {Call::kOpen, {model::kBudget, model::kLimit, model::kDiskFull, model::kBadSpec, model::kTensorsDiffer}},
        {Call::kPush,
         {model::kChecksum, model::kBudget, model::kNotOpen, model::kBehind, model::kOldStep, model::kStaleAttempt,
          model::kAlreadySealed, model::kDigestConflict, model::kBadRange, model::kBadLength}},
        {Call::kNorm, {model::kIncomplete, model::kNotOpen, model::kStaleAttempt}},
        {Call::kSeal,
         {model::kPlanMismatch, model::kNotOpen, model::kBehind, model::kOldStep, model::kStaleAttempt,
          model::kBudget}},
        {Call::kCommit, {model::kDiverged, model::kNotOpen, model::kBehind}},
        {Call::kPull, {model::kVersionGone, model::kNotFilled, model::kBadRange, model::kChecksum}},
        {Call::kPin, {model::kVersionGone, model::kBudget, model::kDiskFull}},
        {Call::kUnpin, {}},
        {Call::kExport, {model::kNotOpen, model::kNotFilled, model::kBehind, model::kOtherServer, model::kChecksum}},
    };
    auto* errors = new std::vector<std::pair<Call, std::string>>;
    for (const auto& [call, reasons] : further) {
      for (const std::string& reason : common) errors->emplace_back(call, reason);
      for (const std::string& reason : reasons) errors->emplace_back(call, reason);
    }
    for (const char* reason : {model::kBusy, model::kServerDown, model::kUnknownJob, model::kStaleEpoch, model::kIo}) {
      errors->emplace_back(Call::kDropJob, reason);
    }
    for (const char* reason : {model::kBusy, model::kServerDown, model::kBudget, model::kBadConfig}) {
      errors->emplace_back(Call::kSetBudget, reason);
    }
    return errors;
  }();
  return *kErrors;
}

}  // namespace ballast::services
