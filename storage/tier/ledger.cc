#include "ballast/storage/tier/ledger.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::storage {

BudgetLease& BudgetLease::operator=(BudgetLease&& other) noexcept {
  if (this != &other) {
    Release();
    ledger_ = std::exchange(other.ledger_, nullptr);
    tier_ = other.tier_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void BudgetLease::Release() {
  if (ledger_ != nullptr) ledger_->Return(tier_, bytes_);
  ledger_ = nullptr;
  bytes_ = 0;
}

TierBytes Ledger::budget() const {
  absl::MutexLock lock(&mutex_);
  return budget_;
}

void Ledger::SetBudget(const TierBytes& budget) {
  absl::MutexLock lock(&mutex_);
  budget_ = budget;
}

TierBytes Ledger::used() const {
  absl::MutexLock lock(&mutex_);
  return used_;
}

TierUsage Ledger::usage() const {
  absl::MutexLock lock(&mutex_);
  return {budget_, used_};
}

absl::Status Ledger::Take(TierKind tier, uint64_t bytes, absl::string_view what) {
  absl::MutexLock lock(&mutex_);
  const uint64_t free = budget_[tier] - std::min(budget_[tier], used_[tier]);
  if (bytes > free) {
    const char* name = TierName(tier);
    return model::Error(
        absl::StatusCode::kResourceExhausted, model::kBudget,
        absl::StrCat(name, " is short of ", bytes - free, " bytes: ", what, " needs ", bytes, ", ", free, " of ",
                     budget_[tier], " are free; raise the ", name, " budget by at least ", bytes - free, " bytes"));
  }
  used_[tier] += bytes;
  return absl::OkStatus();
}

void Ledger::Return(TierKind tier, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  if (bytes > used_[tier]) {
    std::fprintf(stderr, "%s budget: %llu bytes returned, %llu were taken\n", TierName(tier),
                 static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(used_[tier]));
    std::abort();
  }
  used_[tier] -= bytes;
}

BudgetLease Ledger::LeaseBeyond(TierKind tier, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  used_[tier] += bytes;
  return BudgetLease(this, tier, bytes);
}

absl::StatusOr<BudgetLease> Ledger::Lease(TierKind tier, uint64_t bytes, absl::string_view what) {
  BALLAST_RETURN_IF_ERROR(Take(tier, bytes, what));
  return BudgetLease(this, tier, bytes);
}

void Ledger::CountTraffic(TierKind tier, uint64_t read, uint64_t written) {
  read_[static_cast<int>(tier)].fetch_add(read, std::memory_order_relaxed);
  written_[static_cast<int>(tier)].fetch_add(written, std::memory_order_relaxed);
}

TierTraffic Ledger::traffic() const {
  TierTraffic traffic;
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    traffic.read[tier] = read_[static_cast<int>(tier)].load(std::memory_order_relaxed);
    traffic.written[tier] = written_[static_cast<int>(tier)].load(std::memory_order_relaxed);
  }
  return traffic;
}

}  // namespace ballast::storage
