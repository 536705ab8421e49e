#include "ballast/client/transfers/leases.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

LeasedParts::LeasedParts(std::shared_ptr<Leases> leases, int64_t version, std::vector<UnitRange> ranges,
                         kernels::Dtype dtype)
    : of_session_(std::move(leases)),
      version_(version),
      ranges_(std::move(ranges)),
      dtype_(dtype),
      since_(absl::Now()),
      held_(ranges_.size()) {
  for (const UnitRange& range : ranges_) {
    parts_.push_back({.range = range, .bytes = {}});
    bytes_ += BytesOf(range);
  }
}

LeasedParts::~LeasedParts() {
  absl::MutexLock lock(&mutex_);
  if (copies_ != nullptr) of_session_->pool_->Return(std::move(copies_));
}

bool LeasedParts::Come(size_t i, model::LeasedBytes leased) {
  if (leased.held == nullptr || leased.bytes.size() != BytesOf(ranges_[i])) return false;
  absl::MutexLock lock(&mutex_);
  if (ended_) return true;
  of_session_->leased_bytes_ += leased.bytes.size();
  parts_[i].bytes = leased.bytes;
  held_[i] = std::move(leased.held);
  return true;
}

absl::Span<std::byte> LeasedParts::RoomFor(size_t i) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return {};
  if (copies_ == nullptr) copies_ = of_session_->pool_->Take(bytes_);
  uint64_t at = 0;
  for (size_t before = 0; before < i; ++before) at += BytesOf(ranges_[before]);
  const absl::Span<std::byte> room(copies_->data.get() + at, BytesOf(ranges_[i]));
  if (admitted_) leasing_ -= room.size();
  parts_[i].bytes = room;
  of_session_->copied_bytes_ += room.size();
  return room;
}

void LeasedParts::End() {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(ended_, true)) return;
    // Under the lock: whoever comes second finds the leases given back.
    held_.clear();
    parts_.clear();
  }
  of_session_->Ended(this);
}

absl::StatusOr<absl::Span<const LeasedPart>> LeasedParts::parts() const {
  absl::MutexLock lock(&mutex_);
  if (!ended_) return absl::MakeConstSpan(parts_);
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                      "the lease was given back: its session has ended");
}

absl::StatusOr<std::shared_ptr<LeasedParts>> Leases::Begin(int64_t version, std::vector<UnitRange> ranges,
                                                           kernels::Dtype dtype, uint64_t bytes_max,
                                                           absl::Duration age_max) {
  std::shared_ptr<LeasedParts> parts(new LeasedParts(shared_from_this(), version, std::move(ranges), dtype));
  absl::MutexLock lock(&mutex_);
  uint64_t abandoned = 0;
  std::erase_if(ended_, [&](const std::weak_ptr<LeasedParts>& ended) {
    const std::shared_ptr<LeasedParts> other = ended.lock();  // its calls hold it
    if (other == nullptr || other->tally_.idle()) return true;
    abandoned += other->bytes_;
    return false;
  });
  if (abandoned > bytes_max) {
    return model::Error(
        absl::StatusCode::kUnavailable, model::kBusy,
        absl::StrCat(abandoned, " bytes of leases that were given back have parts on their way; expected ", bytes_max,
                     " at most. Await a lease before you give it back"));
  }
  uint64_t bytes = 0;
  absl::Time oldest = absl::InfiniteFuture();
  for (const std::shared_ptr<LeasedParts>& other : live_) {
    if (other->leasing_ == 0) continue;
    bytes += other->leasing_;
    oldest = std::min(oldest, other->since_);
  }
  parts->admitted_ = bytes == 0 || (bytes + parts->bytes_ <= bytes_max && oldest + age_max > parts->since_);
  if (parts->admitted_) parts->leasing_ = parts->bytes_;
  live_.insert(parts);
  return parts;
}

void Leases::EndAll() {
  std::set<std::shared_ptr<LeasedParts>> live;
  {
    absl::MutexLock lock(&mutex_);
    live = live_;
  }
  for (const std::shared_ptr<LeasedParts>& parts : live) parts->End();
}

bool Leases::empty() const {
  absl::MutexLock lock(&mutex_);
  return live_.empty();
}

void Leases::Ended(const LeasedParts* parts) {
  std::shared_ptr<LeasedParts> gone;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = std::find_if(live_.begin(), live_.end(), [&](const auto& one) { return one.get() == parts; });
  if (found == live_.end()) return;
  gone = *found;
  live_.erase(found);
  if (!gone->tally_.idle()) ended_.push_back(gone);
}

}  // namespace ballast::client
