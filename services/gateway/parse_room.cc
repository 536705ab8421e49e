#include "ballast/services/gateway/parse_room.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {

absl::StatusOr<ParseRoom::Lease> ParseRoom::Take(uint64_t bytes) {
  if (bytes <= kSmallBytesMax) return Lease();
  absl::MutexLock lock(&mu_);
  returned_ = true;  // the bytes themselves, whatever becomes of them
  if (bytes > kBytesMax) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBadRequest,
                        absl::StrCat("a message takes at most ", kBytesMax,
                                     " bytes of memory once it is parsed; this "
                                     "one has more fields than that; send fewer, larger ones"));
  }
  if (bytes > kBytesMax - used_) return Busy(bytes);
  used_ += bytes;
  return Lease(this, bytes);
}

absl::Status ParseRoom::CheckFree(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (bytes <= kSmallBytesMax || bytes <= kBytesMax - used_) return absl::OkStatus();
  returned_ = true;
  return Busy(bytes);
}

absl::Status ParseRoom::Busy(uint64_t bytes) const {
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      absl::StrCat("the messages that are being answered take ", used_, " of ", kBytesMax,
                                   " bytes, and this one would take ", bytes, " or more; send it again"));
}

void ParseRoom::Return(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  used_ -= bytes;
  returned_ = true;
}

bool ParseRoom::TakeReturned() {
  absl::MutexLock lock(&mu_);
  return std::exchange(returned_, false);
}

}  // namespace ballast::services
