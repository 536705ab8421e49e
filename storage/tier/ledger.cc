#include "ballast/storage/tier/ledger.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {

BudgetLease& BudgetLease::operator=(BudgetLease&& other) noexcept {
  if (this != &other) {
    Release();
    ledger_ = std::exchange(other.ledger_, nullptr);
    tier_ = other.tier_;
    bytes_ = std::exchange(other.bytes_, 0);
    part_ = other.part_;
    share_ = other.share_;
    account_ = std::move(other.account_);
  }
  return *this;
}

void BudgetLease::Release() {
  if (ledger_ != nullptr) ledger_->Return(tier_, bytes_, part_, share_, account_.get());
  ledger_ = nullptr;
  account_.reset();
  bytes_ = 0;
}

void BudgetLease::Mark(TierPart part) {
  if (ledger_ != nullptr) ledger_->Remark(tier_, bytes_, part_, part, account_.get());
  part_ = part;
}

void BudgetLease::Charge(std::shared_ptr<Account> account) {
  if (ledger_ == nullptr) return;
  ledger_->Charge(tier_, bytes_, part_, account_.get(), account.get());
  account_ = std::move(account);
}

TierBytes Ledger::budget() const {
  absl::MutexLock lock(&mutex_);
  return budget_;
}

Ledger::Ledger(const TierBytes& budget, const std::vector<NvmeShare>& shares) : budget_(budget) {
  absl::MutexLock lock(&mutex_);
  for (const NvmeShare& share : shares) shares_.push_back({share, share.bytes, 0});
}

void Ledger::SetBudget(const TierBytes& budget) {
  absl::MutexLock lock(&mutex_);
  budget_ = budget;
  uint64_t configured = 0, given = 0;
  for (const Share& share : shares_) configured += share.configured.bytes;
  for (Share& share : shares_) {
    const auto scaled =
        static_cast<unsigned __int128>(share.configured.bytes) * budget.nvme / std::max(configured, uint64_t{1});
    share.budget = static_cast<uint64_t>(scaled);
    given += share.budget;
  }
  if (!shares_.empty()) shares_.back().budget += budget.nvme - given;  // what rounding left
}

void Ledger::DropShare(size_t share) {
  absl::MutexLock lock(&mutex_);
  if (shares_.empty()) return;
  budget_.nvme -= std::exchange(shares_[share].budget, 0);
  shares_[share].configured.bytes = 0;
}

uint64_t Ledger::NvmeFree(size_t share) const {
  absl::MutexLock lock(&mutex_);
  const uint64_t free = budget_.nvme - std::min(budget_.nvme, used_.nvme);
  if (shares_.empty()) return free;
  const Share& of = shares_[share];
  return std::min(free, of.budget - std::min(of.budget, of.used));
}

TierBytes Ledger::used() const {
  absl::MutexLock lock(&mutex_);
  return used_;
}

TierUsage Ledger::usage() const {
  absl::MutexLock lock(&mutex_);
  TierUsage usage{budget_, used_, parts_, {}};
  for (const Share& share : shares_) usage.nvme.push_back({share.configured.path, share.budget, share.used});
  return usage;
}

absl::Status Ledger::Take(TierKind tier, uint64_t bytes, absl::string_view what, TierPart part, size_t share,
                          Account* account) {
  absl::MutexLock lock(&mutex_);
  const auto check = [&](uint64_t budget, uint64_t used, absl::string_view name) -> absl::Status {
    const uint64_t free = budget - std::min(budget, used);
    if (bytes <= free) return absl::OkStatus();
    return model::Error(
        absl::StatusCode::kResourceExhausted, model::kBudget,
        absl::StrCat(name, " is short of ", bytes - free, " bytes: ", what, " needs ", bytes, ", ", free, " of ",
                     budget, " are free; raise the ", name, " budget by at least ", bytes - free, " bytes"));
  };
  BALLAST_RETURN_IF_ERROR(check(budget_[tier], used_[tier], TierName(tier)));
  if (Shared(tier)) {
    Share& of = shares_[share];
    BALLAST_RETURN_IF_ERROR(check(of.budget, of.used, absl::StrCat(TierName(tier), " in ", of.configured.path)));
    of.used += bytes;
  }
  used_[tier] += bytes;
  parts_[static_cast<size_t>(part)][tier] += bytes;
  if (account != nullptr) account->parts[static_cast<size_t>(part)][tier] += bytes;
  return absl::OkStatus();
}

void Ledger::Return(TierKind tier, uint64_t bytes, TierPart part, size_t share, Account* account) {
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
  if (Shared(tier)) shares_[share].used -= bytes;
  if (account != nullptr) account->parts[static_cast<size_t>(part)][tier] -= bytes;
}

void Ledger::Remark(TierKind tier, uint64_t bytes, TierPart from, TierPart to, Account* account) {
  absl::MutexLock lock(&mutex_);
  const auto move = [&](PartBytes* parts) {
    (*parts)[static_cast<size_t>(from)][tier] -= bytes;
    (*parts)[static_cast<size_t>(to)][tier] += bytes;
  };
  move(&parts_);
  if (account != nullptr) move(&account->parts);
}

void Ledger::Charge(TierKind tier, uint64_t bytes, TierPart part, Account* from, Account* to) {
  absl::MutexLock lock(&mutex_);
  if (from != nullptr) from->parts[static_cast<size_t>(part)][tier] -= bytes;
  if (to != nullptr) to->parts[static_cast<size_t>(part)][tier] += bytes;
}

PartBytes Ledger::taken(const Account& account) const {
  absl::MutexLock lock(&mutex_);
  return account.parts;
}

BudgetLease Ledger::LeaseBeyond(TierKind tier, uint64_t bytes, TierPart part) {
  absl::MutexLock lock(&mutex_);
  used_[tier] += bytes;
  parts_[static_cast<size_t>(part)][tier] += bytes;
  return BudgetLease(this, tier, bytes, part);
}

absl::StatusOr<BudgetLease> Ledger::Lease(TierKind tier, uint64_t bytes, absl::string_view what, TierPart part,
                                          size_t share) {
  BALLAST_RETURN_IF_ERROR(Take(tier, bytes, what, part, share));
  return BudgetLease(this, tier, bytes, part, share);
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
