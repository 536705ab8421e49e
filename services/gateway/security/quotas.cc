#include "ballast/services/gateway/security/quotas.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// A job that was fenced and never opened holds a name alone.
bool IsOpened(const v1::JobStatus& job) {
  const TierUse held = HeldBytes(job);
  return job.world_size() > 0 || std::any_of(held.begin(), held.end(), [](uint64_t bytes) { return bytes > 0; });
}

// A fence alone takes one of the server's 256 places for jobs. So many jobs may be between fence and Open, or left by
// groups that died there; more where more may be open.
constexpr uint64_t kUnopenedMin = 16;

absl::Status TooManyUnopened(const std::string& identity, const std::string& job, uint64_t unopened) {
  return model::Error(
      absl::StatusCode::kResourceExhausted, model::kQuota,
      absl::StrCat("job '", job, "' would be new, but '", identity, "' already has ", unopened,
                   " jobs that were fenced and never opened, as many as its quota allows; open or drop one of them"));
}

absl::Status OverQuota(const std::string& identity, const std::string& job, absl::string_view what, uint64_t asked,
                       uint64_t held, absl::string_view parts, uint64_t quota) {
  return model::Error(absl::StatusCode::kResourceExhausted, model::kQuota,
                      absl::StrCat("job '", job, "' asks for ", asked, " ", what, ". Jobs of '", identity,
                                   "' already hold ", held, parts, " on this server, and the quota is ", quota,
                                   "; drop a job or a kept version, or raise the quota in the server's rights file"));
}

size_t TierAt(absl::string_view name) {
  return static_cast<size_t>(std::find(kTierNames.begin(), kTierNames.end(), name) - kTierNames.begin());
}

// " (state 60, log 40)": what the `held` bytes of a tier are. Of an Open under way the parts are not known yet.
std::string PartsOf(const std::vector<const v1::JobStatus*>& jobs, size_t tier, uint64_t held) {
  std::map<std::string, uint64_t> parts;
  uint64_t known = 0;
  for (const v1::JobStatus* const job : jobs) {
    for (const v1::TierStatus& of : job->tiers()) {
      if (TierAt(of.tier()) != tier) continue;
      for (const v1::TierPart& part : of.parts()) {
        parts[part.part()] += part.bytes();
        known += part.bytes();
      }
    }
  }
  if (held > known) parts["being taken"] = held - known;
  std::vector<std::string> words;
  for (const auto& [part, bytes] : parts) words.push_back(absl::StrCat(part, " ", bytes));
  return words.empty() ? "" : absl::StrCat(" (", absl::StrJoin(words, ", "), ")");
}

// What an identity has on this server.
struct Holdings {
  std::map<std::string, TierUse> by_job;     // of jobs that are open, or will be
  std::vector<const v1::JobStatus*> opened;  // of these, what the server said
  uint64_t unopened = 0;                     // jobs that hold a name alone
};

Holdings HoldingsOf(const std::vector<v1::JobStatus>& jobs, const Quotas::IsMine& mine) {
  Holdings holdings;
  for (const v1::JobStatus& job : jobs) {
    if (!mine(job.name())) continue;
    if (!IsOpened(job)) {
      ++holdings.unopened;
      continue;
    }
    holdings.by_job[job.name()] = HeldBytes(job);
    holdings.opened.push_back(&job);
  }
  return holdings;
}

// May the identity have `job` beside its others?
absl::Status CheckJobs(const std::string& identity, const Quota& quota, const std::string& job,
                       const Holdings& holdings) {
  const size_t held = holdings.by_job.size();
  if (!quota.jobs.has_value() || holdings.by_job.contains(job) || held < *quota.jobs) return absl::OkStatus();
  return OverQuota(identity, job, "job", 1, held, "", *quota.jobs);
}

absl::Status CheckBytes(const std::string& identity, const Quota& quota, const std::string& job, const TierUse& asked,
                        const Holdings& holdings) {
  for (size_t tier = 0; tier < asked.size(); ++tier) {
    const std::optional<uint64_t>& limit = quota.bytes[tier];
    if (!limit.has_value() || asked[tier] == 0) continue;
    uint64_t held = 0;
    for (const auto& [name, bytes] : holdings.by_job) held += bytes[tier];
    if (held + asked[tier] <= *limit) continue;
    return OverQuota(identity, job, absl::StrCat("bytes of ", kTierNames[tier]), asked[tier], held,
                     PartsOf(holdings.opened, tier, held), *limit);
  }
  return absl::OkStatus();
}

}  // namespace

TierUse HeldBytes(const v1::JobStatus& job) {
  TierUse held = {};
  for (const v1::TierStatus& tier : job.tiers()) {
    if (const size_t at = TierAt(tier.tier()); at < held.size()) held[at] += tier.used_bytes();
  }
  return held;
}

TierUse AskedBytes(const v1::OpenResponse& dry_run) {
  TierUse asked = {};
  for (const v1::PlannedTier& tier : dry_run.tiers()) {
    const size_t at = TierAt(tier.tier());
    if (at < asked.size()) asked[at] += tier.state_bytes() + tier.working_bytes() + tier.other_bytes();
  }
  return asked;
}

void LimitFree(const Quota& quota, const std::vector<v1::JobStatus>& jobs, const Quotas::IsMine& mine,
               v1::OpenResponse* dry_run) {
  const Holdings holdings = HoldingsOf(jobs, mine);
  for (v1::PlannedTier& tier : *dry_run->mutable_tiers()) {
    const size_t at = TierAt(tier.tier());
    if (at >= quota.bytes.size() || !quota.bytes[at].has_value() || !tier.has_free_bytes()) continue;
    uint64_t held = 0;
    for (const auto& [name, bytes] : holdings.by_job) held += bytes[at];
    tier.set_free_bytes(std::min(tier.free_bytes(), *quota.bytes[at] - std::min(*quota.bytes[at], held)));
  }
}

uint64_t Quotas::Now() const {
  absl::MutexLock lock(&mu_);
  return now_;
}

absl::StatusOr<Quotas::Lease> Quotas::Ask(const std::string& identity, const Quota& quota, const std::string& job,
                                          const TierUse& asked, const JobsAsOf& seen, const IsMine& mine) {
  absl::MutexLock lock(&mu_);
  if (seen.time != now_) return absl::AbortedError("an Open ended in the meantime");
  Holdings holdings = HoldingsOf(seen.jobs, mine);
  const auto is_job = [&](const v1::JobStatus& known) { return known.name() == job; };
  const bool is_new = std::none_of(seen.jobs.begin(), seen.jobs.end(), is_job);
  if (is_new && quota.jobs.has_value() && holdings.unopened >= std::max(kUnopenedMin, *quota.jobs)) {
    return TooManyUnopened(identity, job, holdings.unopened);
  }
  AddOthersUnderWay(job, mine, &holdings.by_job);
  BALLAST_RETURN_IF_ERROR(CheckJobs(identity, quota, job, holdings));
  BALLAST_RETURN_IF_ERROR(CheckBytes(identity, quota, job, asked, holdings));
  return Begin(job, holdings.by_job[job], asked);
}

void Quotas::AddOthersUnderWay(const std::string& job, const IsMine& mine, std::map<std::string, TierUse>* held) const {
  for (const auto& [name, opening] : openings_) {
    if (name == job || !mine(name)) continue;
    TierUse& of = (*held)[name];
    for (size_t tier = 0; tier < of.size(); ++tier) of[tier] = std::max(of[tier], opening.bytes[tier]);
  }
}

Quotas::Lease Quotas::Begin(const std::string& job, const TierUse& held, const TierUse& asked) {
  Opening& opening = openings_[job];
  for (size_t tier = 0; tier < held.size(); ++tier) {
    opening.bytes[tier] = std::max(opening.bytes[tier], held[tier] + asked[tier]);
  }
  ++opening.leases;
  return Lease(nullptr, [this, job](void*) { End(job); });
}

void Quotas::End(const std::string& job) {
  absl::MutexLock lock(&mu_);
  ++now_;
  const auto found = openings_.find(job);
  if (--found->second.leases == 0) openings_.erase(found);
}

}  // namespace ballast::services
