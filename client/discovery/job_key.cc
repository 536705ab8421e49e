#include "ballast/client/discovery/job_key.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/registry/roster.h"

namespace ballast::client {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);

absl::Time Soon(absl::Time deadline) { return std::min(deadline, absl::Now() + kCallTimeout); }

bool IsMember(const google::protobuf::RepeatedPtrField<v1::Member>& members, const v1::Member& member) {
  return std::any_of(members.begin(), members.end(), [&](const v1::Member& one) {
    return one.server_id() == member.server_id() && one.disk() == member.disk();
  });
}

std::string ShowAny(const std::vector<v1::Member>& members) {
  return absl::StrJoin(members, " or ", [](std::string* out, const v1::Member& member) {
    absl::StrAppend(out, "'", member.server_id(), "'");
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

absl::StatusOr<v1::Wish> JobKey::ReadWish(absl::Time deadline) const {
  if (registry_ == nullptr) return v1::Wish();
  BALLAST_ASSIGN_OR_RETURN(const auto found, registry_->FindWish(job_, Soon(deadline)));
  return found.has_value() && found->value.life() == value_.table().life() ? found->value : v1::Wish();
}

absl::Status JobKey::CheckSame(const v1::Table& table) const {
  const auto& named = value_.table().members();
  const auto& members = table.members();
  const bool same = named.size() == members.size() &&
                    std::all_of(named.begin(), named.end(), [&](const auto& one) { return IsMember(members, one); });
  if (same) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kOtherServer,
                      absl::StrCat("another group made job '", job_, "' in the meantime, on ",
                                   registry::ShowMembers({named.begin(), named.end()}), ", and this group would use ",
                                   registry::ShowMembers({members.begin(), members.end()}),
                                   "; start this group again, and it goes by the key ", registry_->JobKeyName(job_),
                                   " of the other group"));
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
v1::JobKey JobKey::ClaimedBy(const v1::Epoch& epoch, const v1::Table& table) const {
  v1::JobKey next;
  *next.mutable_claimed() = epoch;
  *next.mutable_table() = exists() ? value_.table() : table;
  // Random, and no two jobs are made by one epoch.
  if (!exists() && !table.shards().empty()) next.mutable_table()->set_life(std::max<uint64_t>(1, epoch.nonce()));
  for (v1::Member& member : *next.mutable_table()->mutable_members()) {
    // The founders of a job with places are members since epoch 0: what they have, or have not yet, is all there is.
    if (!exists() && table.shards().empty()) *member.mutable_since() = epoch;
    for (const v1::Member& now : table.members()) {
      if (now.server_id() == member.server_id()) member.set_address(now.address());
    }
  }
  return next;
}

bool JobKey::Has(absl::string_view server_id, uint64_t disk) const {
  return std::any_of(value_.table().members().begin(), value_.table().members().end(), [&](const v1::Member& member) {
    return member.server_id() == server_id && member.disk() == disk;
  });
}

std::vector<v1::Member> JobKey::Members(const std::vector<uint32_t>& indices) const {
  std::vector<v1::Member> members;
  for (const uint32_t m : indices) members.push_back(value_.table().members(static_cast<int>(m)));
  return members;
}

absl::Status JobKey::CheckEnough(const std::vector<bool>& there, const std::vector<bool>& lost) const {
  const v1::Table& table = value_.table();
  const std::string lacking = model::ShardsWithout(table, there, model::Copies::kAny);
  if (lacking.empty()) return absl::OkStatus();
  std::vector<bool> may = there;  // once all have started whose directories may be left
  for (size_t m = 0; m < may.size(); ++m) may[m] = may[m] || !lost[m];
  const std::string gone = model::ShardsWithout(table, may, model::Copies::kAny);
  if (!gone.empty()) {
    std::vector<uint32_t> others;
    for (uint32_t m = 0; m < lost.size(); ++m) {
      if (lost[m]) others.push_back(m);
    }
    return model::Error(
        absl::StatusCode::kUnavailable, model::kServerDown,
        absl::StrCat("no server has ", gone, " of job '", job_, "' any more: ", registry::ShowMembers(Members(others)),
                     others.size() == 1 ? " answers" : " answer", " with another data directory than before, as after ",
                     "a restart with durability none. If the old one is left, start the server with it; if not, the ",
                     "job is lost: `ballastctl drop --job ", job_,
                     "`, with --lost and the ids of servers that will not come back"));
  }
  const model::Missing missing = model::FindMissing(table, there, lost);
  std::string start = "start them with their data directories";
  if (missing.members.size() == 1) {
    start = "start it with its data directory";
  } else if (!missing.enough_alone.empty()) {
    const bool all = missing.enough_alone.size() == missing.members.size();
    start = absl::StrCat("start ", all ? "one of them" : ShowAny(Members(missing.enough_alone)),
                         " with its data directory");
  }
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                      absl::StrCat("no server that answers holds ", lacking, " of job '", job_, "', which ",
                                   registry::ShowMembers(Members(missing.members)),
                                   missing.members.size() == 1 ? " has: " : " have: ", start,
                                   "; one that runs is out of reach, or too slow"));
}

std::string JobKey::WhoRecovers(const std::vector<bool>& there, absl::Time deadline) const {
  const auto entries = registry_->List(Soon(deadline), registry::Registry::OnUnreadable::kPassOver);
  if (!entries.ok()) return "";
  for (const v1::ServerEntry& entry : *entries) {
    if (entry.state() != v1::SERVER_STATE_RECOVERING) continue;
    for (size_t m = 0; m < there.size(); ++m) {
      const v1::Member& member = value_.table().members(static_cast<int>(m));
      if (!there[m] && member.server_id() == entry.server_id() && member.disk() == entry.disk()) {
        return member.server_id();
      }
    }
  }
  return "";
}

absl::Status JobKey::WriteTable(const v1::Table& table, const v1::Epoch& epoch, absl::Time deadline) {
  registry::Pauses pauses;
  for (;;) {
    absl::Status trouble = Read(deadline);
    if (trouble.ok()) {
      if (!exists() || model::Compare(value_.claimed(), epoch) != 0) {
        return model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch,
                            absl::StrCat("another group claimed job '", job_, "' before this one had opened it; start ",
                                         "this group again"));
      }
      if (value_.table().SerializeAsString() == table.SerializeAsString()) return absl::OkStatus();
      v1::JobKey next = value_;
      *next.mutable_table() = table;
      const absl::StatusOr<bool> put = registry_->PutJob(job_, next, revision_, Soon(deadline));
      if (!put.ok() && !absl::IsUnavailable(put.status())) return put.status();
      if (put.ok() && *put) {
        value_ = std::move(next);
        return absl::OkStatus();
      }
      trouble = put.status();  // read back in any case: an answer may have been lost
      if (trouble.ok()) continue;
    }
    const absl::Duration pause = pauses.Next();
    if (!absl::IsUnavailable(trouble) || absl::Now() + pause >= deadline) return trouble;
    absl::SleepFor(pause);
  }
}

namespace {

// Members and places, without addresses.
std::string PlacesOf(const v1::Table& table) {
  std::string places;
  for (const v1::Member& member : table.members())
    absl::StrAppend(&places, member.server_id(), "/", member.disk(), ";");
  for (const v1::Shard& shard : table.shards()) absl::StrAppend(&places, shard.SerializeAsString(), ";");
  return places;
}

}  // namespace

absl::Status JobKey::CheckClaimed(absl::Span<const v1::GetJobResponse> answers, absl::Time deadline) {
  if (!has_places() || CheckNewest(answers).ok()) return absl::OkStatus();
  // Somebody may have claimed, fenced and opened since the key was read.
  BALLAST_RETURN_IF_ERROR(Read(deadline));
  return CheckNewest(answers);
}

// Who fences claims first, and a table that a server has opened in the claimed epoch was in the key first.
absl::Status JobKey::CheckNewest(absl::Span<const v1::GetJobResponse> answers) const {
  for (const v1::GetJobResponse& answer : answers) {
    std::string older;
    if (model::Compare(answer.promised(), value_.claimed()) > 0) {
      older = absl::StrCat("promised epoch ", answer.promised().counter(), " of job '", job_, "', and the key ",
                           registry_->JobKeyName(job_), " knows epochs up to ", value_.claimed().counter());
    } else if (answer.has_open() && answer.open().has_table() &&
               model::Compare(answer.open().epoch(), value_.claimed()) == 0 &&
               PlacesOf(answer.open().table()) != PlacesOf(value_.table())) {
      older =
          absl::StrCat("opened job '", job_, "' by another table than the key ", registry_->JobKeyName(job_), " has");
    }
    if (older.empty()) continue;
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kKeyLost,
        absl::StrCat("server '", answer.server_id(), "' ", older, ": etcd has an older state than ",
                     "the job, perhaps from a backup, and its table may be old too. ", model::kHowToRestoreKey));
  }
  return absl::OkStatus();
}

absl::Status JobKey::CheckOwn(const v1::Epoch& own, const v1::Table& table) const {
  if (exists() && model::Compare(value_.claimed(), own) == 0 && PlacesOf(value_.table()) == PlacesOf(table)) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch,
                      absl::StrCat("another group has claimed job '", job_, "' (epoch ", value_.claimed().counter(),
                                   ", this group's is ", own.counter(), "), or its key is gone; end this group"));
}

absl::StatusOr<v1::Epoch> JobKey::Claim(const v1::Table& table, const v1::Epoch& least, absl::Time deadline,
                                        const v1::Epoch* own) {
  if (registry_ == nullptr) return least;
  registry::Pauses pauses;
  v1::Epoch epoch = least;
  for (;;) {
    if (own != nullptr) BALLAST_RETURN_IF_ERROR(CheckOwn(*own, table));
    if (exists() && !has_places()) BALLAST_RETURN_IF_ERROR(CheckSame(table));
    epoch.set_counter(std::max(epoch.counter(), value_.claimed().counter() + 1));
    v1::JobKey next = ClaimedBy(epoch, table);
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
