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
    part_ = other.part_;
  }
  return *this;
}

void BudgetLease::Release() {
  if (ledger_ != nullptr) ledger_->Return(tier_, bytes_, part_);
  ledger_ = nullptr;
  bytes_ = 0;
}

void BudgetLease::Mark(TierPart part) {
  if (ledger_ != nullptr) ledger_->Remark(tier_, bytes_, part_, part);
  part_ = part;
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
  return {budget_, used_, parts_};
}

absl::Status Ledger::Take(TierKind tier, uint64_t bytes, absl::string_view what, TierPart part) {
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
  parts_[static_cast<size_t>(part)][tier] += bytes;
  return absl::OkStatus();
}

void Ledger::Return(TierKind tier, uint64_t bytes, TierPart part) {
  absl::MutexLock lock(&mutex_);
  uint64_t& of_part = parts_[static_cast<size_t>(part)][tier];
  if (bytes > of_part) {
    std::fprintf(stderr, "%s budget, %s: %llu bytes returned, %llu were taken\n", TierName(tier),
                 kTierPartNames[static_cast<size_t>(part)], static_cast<unsigned long long>(bytes),
                 static_cast<unsigned long long>(of_part));
    std::abort();
  }
  used_[tier] -= bytes;
  of_part -= bytes;
}

void Ledger::Remark(TierKind tier, uint64_t bytes, TierPart from, TierPart to) {
  absl::MutexLock lock(&mutex_);
  parts_[static_cast<size_t>(from)][tier] -= bytes;
  parts_[static_cast<size_t>(to)][tier] += bytes;
}

BudgetLease Ledger::LeaseBeyond(TierKind tier, uint64_t bytes, TierPart part) {
  absl::MutexLock lock(&mutex_);
  used_[tier] += bytes;
  parts_[static_cast<size_t>(part)][tier] += bytes;
  return BudgetLease(this, tier, bytes, part);
}

absl::StatusOr<BudgetLease> Ledger::Lease(TierKind tier, uint64_t bytes, absl::string_view what, TierPart part) {
  BALLAST_RETURN_IF_ERROR(Take(tier, bytes, what, part));
  return BudgetLease(this, tier, bytes, part);
}

void Ledger::CountTraffic(TierKind tier, uint64_t read, uint64_t written) {
  read_[static_cast<int>(tier)].fetch_add(read, std::memory_order_relaxed);
  written_[static_cast<int>(tier)].fetch_add(written, std::memory_order_relaxed);
}

void Ledger::CountMove(TierKind from, TierKind to, MoveReason why, uint64_t bytes) {
  moved_[static_cast<int>(from)][static_cast<int>(to)][static_cast<int>(why)].fetch_add(bytes,
                                                                                        std::memory_order_relaxed);
}

MovedBytes Ledger::moved() const {
  MovedBytes moved = {};
  for (size_t from = 0; from < kTierKinds; ++from) {
    for (size_t to = 0; to < kTierKinds; ++to) {
      for (size_t why = 0; why < kMoveReasons; ++why) {
        moved[from][to][why] = moved_[from][to][why].load(std::memory_order_relaxed);
      }
    }
  }
  return moved;
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
