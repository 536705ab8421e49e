#include "ballast/storage/tier/processor_check.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {

absl::Status CheckProcessor(const kernels::Processor& processor, absl::string_view name) {
  const std::string mismatch = DigestMismatch(DigestsOf(processor));
  if (mismatch.empty()) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInternal, model::kWrongBits,
      absl::StrCat("self-test: ", name,
                   " does not compute this release's bits, so that its state could not be recovered on ",
                   "another: ", mismatch, "; use another machine or build, and report this"));
}

}  // namespace ballast::storage
