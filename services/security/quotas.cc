#include "ballast/services/security/quotas.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/status.h"

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
      absl::StrCat("job '", job, "' would be a new one beside ", unopened, " jobs of '", identity,
                   "' that were fenced and never opened, and all that its quota allows; open or drop one of them"));
}

absl::Status OverQuota(const std::string& identity, const std::string& job, absl::string_view what, uint64_t asked,
                       uint64_t held, absl::string_view parts, uint64_t quota) {
  return model::Error(absl::StatusCode::kResourceExhausted, model::kQuota,
                      absl::StrCat("job '", job, "' asks for ", asked, " ", what, ", beside ", held, parts,
                                   " that jobs of '", identity, "' hold on this server, and the quota is ", quota,
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

uint64_t Quotas::Now() const {
  absl::MutexLock lock(&mu_);
  return now_;
}

absl::StatusOr<Quotas::Lease> Quotas::Ask(const std::string& identity, const Quota& quota, const std::string& job,
                                          const TierUse& asked, const JobsAsOf& seen,
                                          const std::function<bool(absl::string_view job)>& mine) {
  absl::MutexLock lock(&mu_);
  if (seen.time != now_) return absl::AbortedError("an Open has ended meanwhile");
  std::map<std::string, TierUse> held;
  std::vector<const v1::JobStatus*> counted;
  uint64_t unopened = 0;
  bool is_new = true;
  for (const v1::JobStatus& known : seen.jobs) {
    if (known.name() == job) is_new = false;
    if (!mine(known.name())) continue;
    if (IsOpened(known)) {
      held[known.name()] = HeldBytes(known);
      counted.push_back(&known);
    } else {
      ++unopened;
    }
  }
  if (is_new && quota.jobs.has_value() && unopened >= std::max(kUnopenedMin, *quota.jobs)) {
    return TooManyUnopened(identity, job, unopened);
  }
  for (const auto& [name, opening] : openings_) {
    if (name == job || !mine(name)) continue;
    TierUse& of = held[name];
    for (size_t tier = 0; tier < of.size(); ++tier) of[tier] = std::max(of[tier], opening.bytes[tier]);
  }
  const uint64_t new_jobs = held.count(job) > 0 ? 0 : 1;
  if (new_jobs > 0 && quota.jobs.has_value() && held.size() + new_jobs > *quota.jobs) {
    return OverQuota(identity, job, "job", new_jobs, held.size(), "", *quota.jobs);
  }
  TierUse sum = {};
  for (const auto& [name, bytes] : held) {
    for (size_t tier = 0; tier < sum.size(); ++tier) sum[tier] += bytes[tier];
  }
  for (size_t tier = 0; tier < sum.size(); ++tier) {
    const std::optional<uint64_t>& limit = quota.bytes[tier];
    if (!limit.has_value() || asked[tier] == 0 || sum[tier] + asked[tier] <= *limit) continue;
    return OverQuota(identity, job, absl::StrCat("bytes of ", kTierNames[tier]), asked[tier], sum[tier],
                     PartsOf(counted, tier, sum[tier]), *limit);
  }
  Opening& opening = openings_[job];
  TierUse whole = held[job];
  for (size_t tier = 0; tier < whole.size(); ++tier) {
    whole[tier] += asked[tier];
    opening.bytes[tier] = std::max(opening.bytes[tier], whole[tier]);
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
