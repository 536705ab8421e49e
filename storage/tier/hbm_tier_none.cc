#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

absl::StatusOr<std::unique_ptr<HbmTier>> OpenHbmTier(int device, Ledger* ledger) {
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadConfig,
      absl::StrCat("an hbm budget of ", ledger->budget().hbm, " bytes was given, but this build has no CUDA; ",
                   "set it to 0, or build with -DBALLAST_CUDA=ON"));
}

}  // namespace ballast::storage
