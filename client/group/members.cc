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
#include "ballast/client/transport/call_all.h"
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

// Whether the registry made the transport for a server that is no member of a job with places.
bool IsSpare(const JobKey& key, const Transport& transport) {
  const std::string target = transport.registered_as();
  const auto& members = key.value().table().members();
  return key.has_places() && !target.empty() &&
         std::none_of(members.begin(), members.end(), [&](const v1::Member& member) {
           return model::TargetOf(member.server_id(), member.disk()) == target;
         });
}

}  // namespace

absl::Status Members::Add(uint32_t server, const v1::IdentifyResponse& answer) {
  const std::string id = answer.server_id().empty() ? "" : absl::StrCat("'", answer.server_id(), "' at ");
  BALLAST_RETURN_IF_ERROR(
      model::CheckServerVersion(absl::StrCat(id, router_->name(server)), answer.protocol_version()));
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
  return absl::OkStatus();
}

absl::StatusOr<bool> Members::Take(const JobKey& key, Spares spares, uint32_t server,
                                   const absl::StatusOr<v1::IdentifyResponse>& answer) {
  // Protocol version 0 has no Identify.
  if (absl::IsUnimplemented(answer.status())) return Take(key, spares, server, v1::IdentifyResponse());
  const bool is_member = !key.has_places() || (answer.ok() && key.Has(answer->server_id(), answer->disk()));
  if (is_member) {
    BALLAST_RETURN_IF_ERROR(answer.status());
    BALLAST_RETURN_IF_ERROR(Add(server, *answer));
    return true;
  }
  if (answer.ok()) return spares == Spares::kConnect && Add(server, *answer).ok();
  if (IsSilence(answer.status()) || IsSpare(key, *router_->transport(server))) return false;
  return answer.status();
}

absl::StatusOr<std::vector<uint32_t>> Members::TakeAll(const JobKey& key, Spares spares,
                                                       const Answers<v1::IdentifyResponse>::All& answers) {
  servers_.clear();
  std::vector<uint32_t> stay;
  for (uint32_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].has_value()) continue;
    BALLAST_ASSIGN_OR_RETURN(const bool stays, Take(key, spares, i, *answers[i]));
    if (stays) stay.push_back(i);
  }
  return stay;
}

namespace {

// The first error of a server that is taken for dead.
absl::Status FirstSilence(const Answers<v1::IdentifyResponse>::All& answers) {
  for (const auto& answer : answers) {
    if (answer.has_value() && IsSilence(answer->status())) return answer->status();
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Members::Identify(const JobKey& key, Spares spares, const Patience& patience, absl::Time deadline) {
  const uint32_t servers = router_->server_count();
  asked_ = key.has_places() ? static_cast<uint32_t>(key.value().table().members_size()) : servers;
  asked_by_ = key.has_places() ? key.value().table() : v1::Table();
  if (!key.has_places()) {
    const auto identities = AskAll<v1::IdentifyRequest, v1::IdentifyResponse>(router_, &Transport::Identify, "Identify",
                                                                              Question(), deadline);
    return TakeAll(key, spares, identities->Await(absl::InfiniteFuture())).status();
  }
  std::vector<bool> needed;  // who may join cannot help
  for (uint32_t i = 0; i < servers; ++i) needed.push_back(!IsSpare(key, *router_->transport(i)));
  const auto identities = AskWhoTheyAre(key, deadline);
  const auto settled = [&](const Answers<v1::IdentifyResponse>::All& answers) {
    for (uint32_t i = 0; i < servers; ++i) {
      if (!answers[i].has_value() && needed[i]) return false;
    }
    return true;
  };
  // The router asks whether it is interrupted while something waits.
  const Router::Watch watch(router_, "servers that may join, to say who they are");
  deadline = std::max(deadline, absl::Now() + patience.members);
  absl::Time until = absl::Now() + patience.members;
  for (;;) {
    const auto answers = identities->Await(needed, patience.spares, until);
    BALLAST_ASSIGN_OR_RETURN(const std::vector<uint32_t> stay, TakeAll(key, spares, answers));
    const absl::Status enough = CheckEnough(key, deadline);
    if (enough.ok()) {
      for (uint32_t i = 0; i < servers; ++i) {
        const std::string target = router_->transport(i)->registered_as();
        const bool silent = !answers[i].has_value() || IsSilence(answers[i]->status());
        if (silent && !needed[i]) away_.insert(target.substr(0, target.rfind('/')));
      }
      if (stay.size() < servers) router_->Reorder(stay);
      return absl::OkStatus();
    }
    if (settled(answers) || absl::Now() >= deadline) {
      const absl::Status silence = FirstSilence(answers);
      return silence.ok() ? enough : model::Annotate(enough, std::string(silence.message()));
    }
    until = std::min(deadline, absl::Now() + absl::Seconds(1));
  }
}

v1::IdentifyRequest Members::Question() const {
  v1::IdentifyRequest question;
  question.set_shares_memory(uses_ == Uses::kSlices);
  return question;
}

// A server that may join is asked once: one that has just died is registered for some seconds yet, and must not hold up
// a change.
std::shared_ptr<Answers<v1::IdentifyResponse>> Members::AskWhoTheyAre(const JobKey& key, absl::Time deadline) const {
  const uint32_t servers = router_->server_count();
  const auto identities = std::make_shared<Answers<v1::IdentifyResponse>>(servers);
  for (uint32_t i = 0; i < servers; ++i) {
    Transport* const server = router_->transport(i);
    Callback<v1::IdentifyResponse> done = [identities, i](absl::StatusOr<v1::IdentifyResponse> answer) {
      identities->Add(i, std::move(answer));
    };
    if (IsSpare(key, *server)) {
      server->Identify(Question(), deadline, std::move(done));
    } else {
      router_->Call<v1::IdentifyRequest, v1::IdentifyResponse>(&Transport::Identify, server, "Identify",
                                                               std::make_shared<v1::IdentifyRequest>(Question()),
                                                               deadline, std::move(done));
    }
  }
  return identities;
}

absl::Status Members::CheckEnough(const JobKey& key, absl::Time deadline) const {
  const std::vector<bool> there = There(key);
  if (std::all_of(there.begin(), there.end(), [](bool is) { return is; })) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(key.CheckEnough(there, Lost(key)));
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

std::vector<std::string> Members::spares(const JobKey& key) const {
  std::vector<std::string> spares;
  for (const Server& server : servers_) {
    const v1::Member& member = server.member;
    if (!key.has_places() || key.Has(member.server_id(), member.disk())) continue;
    spares.push_back(model::TargetOf(member.server_id(), member.disk()));
  }
  return spares;
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

std::vector<bool> Members::Lost(const JobKey& key) const {
  std::vector<bool> lost;
  for (const v1::Member& member : key.value().table().members()) {
    const Server* const known = Find(member.server_id());
    lost.push_back(known != nullptr && known->member.disk() != member.disk());
  }
  return lost;
}

absl::Status Members::CheckNoneIsNew(const std::string& job, const v1::Table& before, const v1::Table& now) const {
  for (const v1::Member& member : now.members()) {
    const bool was = std::any_of(before.members().begin(), before.members().end(), [&](const v1::Member& one) {
      return one.server_id() == member.server_id() && one.disk() == member.disk();
    });
    if (was || Has(member.server_id())) continue;
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch,
                        absl::StrCat("another group has just made server '", member.server_id(), "' a member of job '",
                                     job, "'; start this group again"));
  }
  return absl::OkStatus();
}

void Members::KeepOnly(const std::vector<std::string>& server_ids) {
  std::vector<uint32_t> stay;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const std::string& id = servers_[i].member.server_id();
    if (std::find(server_ids.begin(), server_ids.end(), id) != server_ids.end()) stay.push_back(i);
  }
  if (stay.size() < servers_.size()) Reorder(stay);
}

void Members::LeaveOut(absl::string_view server_id) {
  std::vector<uint32_t> stay;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    if (servers_[i].member.server_id() != server_id) stay.push_back(i);
  }
  if (stay.size() < servers_.size()) Reorder(stay);
}

void Members::PutFirst(const v1::Table& table) {
  std::vector<uint32_t> order;
  for (const v1::Member& member : table.members()) {
    order.push_back(static_cast<uint32_t>(Find(member.server_id()) - servers_.data()));
  }
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    if (std::find(order.begin(), order.end(), i) == order.end()) order.push_back(i);
  }
  Reorder(order);
}

void Members::Reorder(const std::vector<uint32_t>& order) {
  router_->Reorder(order);
  std::vector<Server> servers;
  for (const uint32_t i : order) servers.push_back(servers_[i]);
  servers_ = std::move(servers);
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
  bool discovered = false;
  for (uint32_t i = 0; i < servers_.size(); ++i) {
    const bool found = router_->transport(i)->registry() != nullptr;
    discovered = discovered || found;
    if (missing.erase(servers_[i].member.server_id()) == 0 && found) continue;
    stay.push_back(i);
  }
  if (discovered && !missing.empty()) {
    return BadSpec(absl::StrCat("job '", job, "' has chunks on server '", *missing.begin(),
                                "', which is not registered now (", absl::StrJoin(ids(), ", "),
                                " are); start it, or end the URL with ?servers=", members.size(), " to wait for all"));
  }
  if (stay.size() < servers_.size()) Reorder(stay);
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
  Reorder(order);
  return absl::OkStatus();
}

}  // namespace ballast::client
