#include "ballast/client/group/members.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/transport/tally.h"
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

absl::Status Members::Identify(absl::Time deadline) {
  struct State {
    Tally tally;
    std::vector<v1::IdentifyResponse> answers;
  };
  auto state = std::make_shared<State>();
  state->answers.resize(router_->server_count());
  state->tally.Start(static_cast<int>(router_->server_count()));
  const auto request = std::make_shared<const v1::IdentifyRequest>();
  for (uint32_t i = 0; i < router_->server_count(); ++i) {
    router_->Call<v1::IdentifyRequest, v1::IdentifyResponse>(
        &Transport::Identify, i, "Identify", request, deadline,
        [state, i](const absl::StatusOr<v1::IdentifyResponse>& answer) {
          if (answer.ok()) state->answers[i] = *answer;
          // Protocol version 0 has no Identify: the answer stays empty.
          state->tally.Finish(absl::IsUnimplemented(answer.status()) ? absl::OkStatus() : answer.status());
        });
  }
  BALLAST_RETURN_IF_ERROR(state->tally.Wait());
  servers_.clear();
  for (uint32_t i = 0; i < router_->server_count(); ++i) {
    const v1::IdentifyResponse& answer = state->answers[i];
    const std::string id = answer.server_id().empty() ? "" : absl::StrCat("'", answer.server_id(), "' at ");
    BALLAST_RETURN_IF_ERROR(model::CheckServerVersion(absl::StrCat(id, router_->name(i)), answer.protocol_version()));
    if (Find(answer.server_id()) != nullptr) {
      return BadSpec(absl::StrCat("server '", answer.server_id(), "' is named twice; name each server once"));
    }
    router_->transport(i)->MeanFor(model::TargetOf(answer.server_id(), answer.disk()));
    Server& server = servers_.emplace_back();
    server.member.set_server_id(answer.server_id());
    server.member.set_disk(answer.disk());
    server.member.set_address(router_->name(i));
    server.peer = MakePeer(answer, router_->name(i));
    server.budget_bytes = answer.budget_bytes();
  }
  return absl::OkStatus();
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
  if (!key.exists()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(key.CheckServers(all()));
  return LeaveOthersOut(job, key.value().table().members());
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
