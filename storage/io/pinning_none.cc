#include "ballast/proto/model/status.h"
#include "ballast/storage/io/pinning.h"

namespace ballast::storage {

absl::Status PinMemory(absl::Span<std::byte>, int) {
  return model::Error(absl::StatusCode::kUnavailable, model::kUnsupported,
                      "this build has no CUDA to page-lock memory for");
}

void UnpinMemory(absl::Span<std::byte>, int) {}

}  // namespace ballast::storage
