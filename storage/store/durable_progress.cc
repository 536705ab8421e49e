#include "ballast/storage/store/durable_progress.h"

namespace ballast::storage {

std::optional<int64_t> DurableProgress::recoverable_from() const {
  if (unrecorded_from_.has_value()) return unrecorded_from_;
  return dirty_ ? std::optional(needed_from_) : std::nullopt;
}

void DurableProgress::Update(int64_t version) {
  NeedFrom(version - 1);
  dirty_ = true;
}

bool DurableProgress::Store(int64_t version) {
  NeedFrom(version - 1);
  dirty_ = false;
  if (unrecorded_from_.has_value()) return false;
  unrecorded_from_ = needed_from_;
  return true;
}

void DurableProgress::Void() {
  dirty_ = false;
  unrecorded_from_.reset();
}

void DurableProgress::NeedFrom(int64_t version) {
  if (!dirty_) needed_from_ = version;
}

}  // namespace ballast::storage
