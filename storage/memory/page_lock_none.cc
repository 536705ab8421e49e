#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/page_lock.h"

namespace ballast::storage {

absl::Status PageLock(absl::Span<std::byte>, int) {
  return model::Error(absl::StatusCode::kUnavailable, model::kUnsupported,
                      "this build has no CUDA to page-lock memory for");
}

void PageUnlock(absl::Span<std::byte>, int) {}

}  // namespace ballast::storage
