#include "ballast/client/discovery/job_key.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/registry/roster.h"

namespace ballast::client {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);

absl::Time Soon(absl::Time deadline) { return std::min(deadline, absl::Now() + kCallTimeout); }

bool IsMember(const std::vector<v1::Member>& members, const v1::Member& member) {
  return std::any_of(members.begin(), members.end(), [&](const v1::Member& one) {
    return one.server_id() == member.server_id() && one.disk() == member.disk();
  });
}

}  // namespace

absl::Status JobKey::Read(absl::Time deadline) {
  if (registry_ == nullptr) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(auto found, registry_->FindJob(job_, Soon(deadline)));
  revision_ = found.has_value() ? found->revision : 0;
  value_ = found.has_value() ? std::move(found->value) : v1::JobKey();
  return absl::OkStatus();
}

absl::Status JobKey::CheckSame(const std::vector<v1::Member>& members) const {
  const auto& named = value_.table().members();
  const bool same = static_cast<size_t>(named.size()) == members.size() &&
                    std::all_of(named.begin(), named.end(), [&](const auto& one) { return IsMember(members, one); });
  if (same) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kOtherServer,
                      absl::StrCat("another group made job '", job_, "' in the meantime, on ",
                                   registry::ShowMembers({named.begin(), named.end()}), ", and this group would use ",
                                   registry::ShowMembers(members), "; start this group again, and it goes by the key ",
                                   registry_->JobKeyName(job_), " of the other group"));
}

absl::Status JobKey::CheckServers(const std::vector<v1::Member>& servers) const {
  std::vector<v1::ServerEntry> entries;
  for (const v1::Member& server : servers) {
    v1::ServerEntry& entry = entries.emplace_back();
    entry.set_server_id(server.server_id());
    entry.set_disk(server.disk());
    entry.set_address(server.address());
  }
  return registry::CheckMembers(job_, value_, entries);
}

// The key as a group with `epoch` writes it.
v1::JobKey JobKey::ClaimedBy(const v1::Epoch& epoch, const std::vector<v1::Member>& members) const {
  v1::JobKey next;
  *next.mutable_claimed() = epoch;
  next.mutable_table()->set_replicas(1);
  for (const v1::Member& member : members) {
    v1::Member* const written = next.mutable_table()->add_members();
    *written = member;
    *written->mutable_since() = epoch;
    for (const v1::Member& known : value_.table().members()) {
      if (known.server_id() == member.server_id()) *written->mutable_since() = known.since();
    }
  }
  return next;
}

absl::StatusOr<v1::Epoch> JobKey::Claim(const std::vector<v1::Member>& members, const v1::Epoch& least,
                                        absl::Time deadline) {
  if (registry_ == nullptr) return least;
  registry::Pauses pauses;
  v1::Epoch epoch = least;
  for (;;) {
    if (exists()) BALLAST_RETURN_IF_ERROR(CheckSame(members));
    epoch.set_counter(std::max(epoch.counter(), value_.claimed().counter() + 1));
    v1::JobKey next = ClaimedBy(epoch, members);
    const absl::StatusOr<bool> put = registry_->PutJob(job_, next, revision_, Soon(deadline));
    if (!put.ok() && !absl::IsUnavailable(put.status())) return put.status();
    // Read back in any case but the plain one: an answer may have been lost, and the key may be another group's now.
    absl::Status trouble = put.status();
    if (trouble.ok() && !*put) {
      trouble = model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                             absl::StrCat("other groups keep writing ", registry_->JobKeyName(job_)));
    }
    if (trouble.ok()) {
      value_ = std::move(next);
      return epoch;
    }
    if (Read(deadline).ok() && exists() && model::Compare(value_.claimed(), epoch) == 0) return epoch;
    const absl::Duration pause = pauses.Next();
    if (absl::Now() + pause >= deadline) return trouble;
    absl::SleepFor(pause);
  }
}

}  // namespace ballast::client
