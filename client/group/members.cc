#include "ballast/client/group/members.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"

namespace ballast::client {
namespace {

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

}  // namespace

v1::Peer MakePeer(const v1::IdentifyResponse& identity, absl::string_view reached) {
  v1::Peer peer;
  peer.set_server_id(identity.server_id());
  const auto page = model::ParseAddress(identity.page(), model::AddressUse::kConnect);
  const auto server = model::ParseAddress(reached, model::AddressUse::kConnect);
  if (!page.ok() || !server.ok()) return peer;  // no page, or a server in the trainer's process
  if (page->host == "0.0.0.0" || page->host == "::") {
    peer.set_page(model::FormatAddress({server->host, page->port}));
  } else if (!IsLoopback(page->host) || IsLoopback(server->host)) {
    peer.set_page(identity.page());
  }
  return peer;
}

namespace {

// The answers to Identify, as they come.
class Identities {
 public:
  explicit Identities(uint32_t servers) : answers_(servers) {}

  void Add(uint32_t server, absl::StatusOr<v1::IdentifyResponse> answer) {
    absl::MutexLock lock(&mutex_);
    // Protocol version 0 has no Identify: the answer stays empty.
    answers_[server] = absl::IsUnimplemented(answer.status()) ? v1::IdentifyResponse() : std::move(answer);
  }
  // Waits until all have answered, or until `until`. Empty where a server has not answered.
  std::vector<std::optional<absl::StatusOr<v1::IdentifyResponse>>> Await(absl::Time until) {
    const auto all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::all_of(answers_.begin(), answers_.end(), [](const auto& answer) { return answer.has_value(); });
    };
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(&all), until);
    return answers_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::optional<absl::StatusOr<v1::IdentifyResponse>>> answers_ ABSL_GUARDED_BY(mutex_);
};

// A server is taken for dead by these errors, not by those of credentials or versions.
bool IsSilence(const absl::Status& status) { return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status); }

}  // namespace

absl::StatusOr<bool> Members::Take(const JobKey& key, uint32_t server, const v1::IdentifyResponse& answer) {
  const std::string id = answer.server_id().empty() ? "" : absl::StrCat("'", answer.server_id(), "' at ");
  BALLAST_RETURN_IF_ERROR(
      model::CheckServerVersion(absl::StrCat(id, router_->name(server)), answer.protocol_version()));
  if (key.has_places() && !key.Has(answer.server_id(), answer.disk())) return false;
  if (Find(answer.server_id()) != nullptr) {
    return BadSpec(absl::StrCat("server '", answer.server_id(), "' is named twice; name each server once"));
  }
  router_->transport(server)->MeanFor(model::TargetOf(answer.server_id(), answer.disk()));
  Server& known = servers_.emplace_back();
  known.member.set_server_id(answer.server_id());
  known.member.set_disk(answer.disk());
  known.member.set_address(router_->name(server));
  known.peer = MakePeer(answer, router_->name(server));
  known.budget_bytes = answer.budget_bytes();
  return true;
}

absl::Status Members::Identify(const JobKey& key, absl::Duration patience, absl::Time deadline) {
  asked_ = router_->server_count();
  const auto identities = std::make_shared<Identities>(asked_);
  const auto request = std::make_shared<const v1::IdentifyRequest>();
  for (uint32_t i = 0; i < asked_; ++i) {
    router_->Call<v1::IdentifyRequest, v1::IdentifyResponse>(
        &Transport::Identify, i, "Identify", request, deadline,
        [identities, i](const absl::StatusOr<v1::IdentifyResponse>& answer) { identities->Add(i, answer); });
  }
  if (key.has_places()) deadline = std::max(deadline, absl::Now() + patience);
  absl::Time until = key.has_places() ? absl::Now() + patience : absl::InfiniteFuture();
  for (;;) {
    const auto answers = identities->Await(until);
    servers_.clear();
    std::vector<uint32_t> stay;
    absl::Status silence;
    bool all = true;
    for (uint32_t i = 0; i < asked_; ++i) {
      all = all && answers[i].has_value();
      if (!answers[i].has_value()) continue;
      const absl::StatusOr<v1::IdentifyResponse>& answer = *answers[i];
      if (key.has_places() && IsSilence(answer.status())) {
        silence.Update(answer.status());
        continue;
      }
      BALLAST_RETURN_IF_ERROR(answer.status());
      BALLAST_ASSIGN_OR_RETURN(const bool stays, Take(key, i, *answer));
      if (stays) stay.push_back(i);
    }
    if (stay.size() == asked_) return absl::OkStatus();
    const absl::Status enough = CheckEnough(key, deadline);
    if (enough.ok()) {
      router_->Reorder(stay);
      return absl::OkStatus();
    }
    if (all || absl::Now() >= deadline) {
      return silence.ok() ? enough : model::Annotate(enough, std::string(silence.message()));
    }
    until = std::min(deadline, absl::Now() + absl::Seconds(1));
  }
}

absl::Status Members::CheckEnough(const JobKey& key, absl::Time deadline) const {
  const std::vector<bool> there = There(key);
  BALLAST_RETURN_IF_ERROR(key.CheckEnough(there));
  const std::string recovering = key.WhoRecovers(there, std::max(deadline, absl::Now() + absl::Seconds(1)));
  if (recovering.empty()) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kUnavailable, model::kServerDown,
      absl::StrCat("server '", recovering, "' recovers its jobs and does not answer yet: wait until it ",
                   "is ready, and start the group again, or give a longer open_timeout"));
}

const Members::Server* Members::Find(absl::string_view server_id) const {
  const auto found = std::find_if(servers_.begin(), servers_.end(),
                                  [&](const Server& server) { return server.member.server_id() == server_id; });
  return found == servers_.end() ? nullptr : &*found;
}

std::vector<v1::Member> Members::all() const {
  const bool all_tell =
      std::all_of(servers_.begin(), servers_.end(), [](const Server& server) { return server.budget_bytes > 0; });
  std::vector<v1::Member> members;
  for (const Server& server : servers_) {
    members.push_back(server.member);
    members.back().set_weight(all_tell ? static_cast<double>(server.budget_bytes) / (1 << 30) : 1);
  }
  return members;
}

std::vector<std::string> Members::ids() const {
  std::vector<std::string> ids;
  for (const Server& server : servers_) ids.push_back(server.member.server_id());
  return ids;
}

std::vector<v1::Peer> Members::peers() const {
  std::vector<v1::Peer> peers;
  for (const Server& server : servers_) peers.push_back(server.peer);
  return peers;
}

google::protobuf::RepeatedPtrField<v1::Member> Members::Weighed() const {
  google::protobuf::RepeatedPtrField<v1::Member> members;
  for (const v1::Member& known : all()) {
    v1::Member* const member = members.Add();
    member->set_server_id(known.server_id());
    member->set_weight(known.weight());
  }
  return members;
}

absl::Status Members::FollowKey(const std::string& job, const JobKey& key) {
  if (!key.exists() || key.has_places()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(key.CheckServers(all()));
  return LeaveOthersOut(job, key.value().table().members());
}

std::vector<bool> Members::There(const JobKey& key) const {
  std::vector<bool> there;
  for (const v1::Member& member : key.value().table().members()) {
    const Server* const known = Find(member.server_id());
    there.push_back(known != nullptr && known->member.disk() == member.disk());
  }
  return there;
}

void Members::KeepOnly(const std::vector<std::string>& server_ids) {
  std::vector<uint32_t> stay;
  std::vector<Server> staying;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const std::string& id = servers_[i].member.server_id();
    if (std::find(server_ids.begin(), server_ids.end(), id) == server_ids.end()) continue;
    stay.push_back(i);
    staying.push_back(servers_[i]);
  }
  if (stay.size() == servers_.size()) return;
  router_->Reorder(stay);
  servers_ = std::move(staying);
}

absl::Status Members::CheckAnswers(const std::vector<v1::GetJobResponse>& answers) const {
  for (const v1::GetJobResponse& answer : answers) {
    const Server* const known = Find(answer.server_id());
    if (known != nullptr && known->member.disk() == answer.disk()) continue;
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kOtherServer,
        absl::StrCat("server '", answer.server_id(), "' with data directory number ", model::ShowDisk(answer.disk()),
                     " answered, but was not among the servers at the start of this call; a server was replaced ",
                     "meanwhile. Start again"));
  }
  return absl::OkStatus();
}

absl::Status Members::LeaveOthersOut(const std::string& job,
                                     const google::protobuf::RepeatedPtrField<v1::Member>& members) {
  absl::flat_hash_set<std::string> missing;
  for (const v1::Member& member : members) missing.insert(member.server_id());
  std::vector<uint32_t> stay;
  std::vector<Server> staying;
  bool discovered = false;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const bool found = router_->transport(i)->registry() != nullptr;
    discovered = discovered || found;
    if (missing.erase(servers_[i].member.server_id()) == 0 && found) continue;
    stay.push_back(i);
    staying.push_back(servers_[i]);
  }
  if (discovered && !missing.empty()) {
    return BadSpec(absl::StrCat("job '", job, "' has chunks on server '", *missing.begin(),
                                "', which is not registered now (", absl::StrJoin(ids(), ", "),
                                " are); start it, or end the URL with ?servers=", members.size(), " to wait for all"));
  }
  if (stay.size() == servers_.size()) return absl::OkStatus();
  router_->Reorder(stay);
  servers_ = std::move(staying);
  return absl::OkStatus();
}

absl::Status Members::Match(const v1::OpenRequest& open) {
  const std::vector<std::string> server_ids = ids();
  const auto& members = model::MembersOf(open);
  if (static_cast<size_t>(members.size()) != server_ids.size()) {
    return BadSpec(
        absl::StrCat("the job lies on ", members.size(), " servers, this session names ", server_ids.size()));
  }
  std::vector<uint32_t> order;
  for (const v1::Member& member : members) {
    const auto it = std::find(server_ids.begin(), server_ids.end(), member.server_id());
    if (it == server_ids.end()) {
      return BadSpec(absl::StrCat("the job has chunks on server '", member.server_id(),
                                  "', which is not among the servers of this session (",
                                  absl::StrJoin(server_ids, ", "),
                                  "): name that server in place of one that has nothing of the job; if it was named, "
                                  "its data directory was replaced, so put the old one back"));
    }
    order.push_back(static_cast<uint32_t>(it - server_ids.begin()));
  }
  router_->Reorder(order);
  return absl::OkStatus();
}

}  // namespace ballast::client
