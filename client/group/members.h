// The servers that a session reaches, with what they said of themselves, and their places as members of a job.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/router.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// What people need of a server: its id, and the address of its status page. `reached`: the address by which this rank
// reaches the server. The server says on which address its page listens. If it listens on all addresses, the result has
// the host of `reached`. If it listens on loopback and this rank reached the server otherwise, the result has no page.
v1::Peer MakePeer(const v1::IdentifyResponse& identity, absl::string_view reached);

// Whether a call's error means that the server is taken for dead, which errors of credentials or versions do not.
inline bool IsSilence(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// The deadline passed while the server was busy with the request, not while it was down.
inline bool IsAtWork(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) && model::ReasonOf(status) == model::kBusy;
}

// How long servers have to answer.
struct Patience {
  // For members, where others have all of their chunks.
  absl::Duration members;
  // For servers that may join, once all members have answered.
  absl::Duration spares;
};

class Members {
 public:
  // What the router is for. Calls alone need no memory that is shared with servers on this host.
  enum class Uses { kSlices, kCalls };
  // Borrows `router`; Match brings the router's servers into the job's order.
  explicit Members(Router* router, Uses uses = Uses::kSlices) : router_(router), uses_(uses) {}

  // Asks every server for its id and protocol version. Every rank asks for itself, because its list may have another
  // order than rank 0's, and its program another version. `key`, as read: if it says where chunks are, servers that do
  // not answer within `patience` are left out as soon as each chunk is on a member that answered. A member that is
  // registered and recovers is waited for: UNAVAILABLE if it still does at the deadline. Servers that are not the key's
  // members stay if they answer well, or with kPassOver are left out.
  absl::Status Identify(const JobKey& key, Spares spares, const Patience& patience, absl::Time deadline);
  // How many servers were asked; of a job that has places: its members.
  uint32_t asked() const { return asked_; }
  // By which table they were asked; without members if the job has no places.
  const v1::Table& asked_by() const { return asked_by_; }
  // Valid until Match, in the router's order. `all`: the members of a new job. A member's weight is its budget in GiB;
  // if any server does not report its budget, all weights are 1. `ids`: their ids. `peers`: ids with the addresses of
  // their status pages.
  std::vector<v1::Member> all() const;
  std::vector<std::string> ids() const;
  std::vector<v1::Peer> peers() const;
  bool Has(absl::string_view server_id) const { return Find(server_id) != nullptr; }
  // Servers that are not members of a key that has places, as model::TargetOf names them.
  std::vector<std::string> spares(const JobKey& key) const;
  // Ids of registered servers that are no members of such a key and did not say who they are, or were not asked.
  const std::set<std::string>& away() const { return away_; }
  void AddAway(const std::string& server_id) { away_.insert(server_id); }
  // Of an Open without a table.
  google::protobuf::RepeatedPtrField<v1::Member> Weighed() const;

  // The session stops using servers that it found in the registry and that are not among the job's `members`.
  // INVALID_ARGUMENT (BAD_SPEC) if the registry does not have one of the members.
  absl::Status LeaveOthersOut(const std::string& job, const google::protobuf::RepeatedPtrField<v1::Member>& members);
  // If the job has a key in the registry, checks the servers against it, and stops using those that it does not name.
  // Errors: those of CheckServers and LeaveOthersOut. Does nothing for a key that says where chunks are: Identify has
  // left out other servers, and members may be missing.
  absl::Status FollowKey(const std::string& job, const JobKey& key);
  // Which members of the key's table are among the servers, by index.
  std::vector<bool> There(const JobKey& key) const;
  // Under the names of which members another data directory answers.
  std::vector<bool> Lost(const JobKey& key) const;
  // FAILED_PRECONDITION (STALE_EPOCH) if `now` has members that `before` has not, and that are not among the servers:
  // another group has just made them members, and this one would wait for none of them.
  absl::Status CheckNoneIsNew(const std::string& job, const v1::Table& before, const v1::Table& now) const;
  // Stops using all other servers, whoever named them, or this one. The order stays.
  void KeepOnly(const std::vector<std::string>& server_ids);
  void LeaveOut(absl::string_view server_id);
  // Brings the members of `table` first, in its order; others stay behind them. REQUIRES: Has each.
  void PutFirst(const v1::Table& table);
  // FAILED_PRECONDITION (OTHER_SERVER) if an answer came from a server that was not identified.
  absl::Status CheckAnswers(const std::vector<v1::GetJobResponse>& answers) const;
  // Puts the router's servers into the order of the members in `open`.
  absl::Status Match(const v1::OpenRequest& open);

 private:
  struct Server {
    v1::Member member;
    v1::Peer peer;
    uint64_t budget_bytes = 0;
  };
  const Server* Find(absl::string_view server_id) const;
  v1::IdentifyRequest Question() const;
  std::shared_ptr<Answers<v1::IdentifyResponse>> AskWhoTheyAre(const JobKey& key, absl::Time deadline) const;
  // OK if the group can do without those that have not answered: each chunk is on a member, and nobody recovers.
  absl::Status CheckEnough(const JobKey& key, absl::Time deadline) const;
  // Takes a server's answer; false: the server is left out.
  absl::StatusOr<bool> Take(const JobKey& key, Spares spares, uint32_t server,
                            const absl::StatusOr<v1::IdentifyResponse>& answer);
  // Takes all answers anew; returns the servers that stay.
  absl::StatusOr<std::vector<uint32_t>> TakeAll(const JobKey& key, Spares spares,
                                                const Answers<v1::IdentifyResponse>::All& answers);
  absl::Status Add(uint32_t server, const v1::IdentifyResponse& answer);
  void Reorder(const std::vector<uint32_t>& order);

  Router* router_;
  Uses uses_;
  uint32_t asked_ = 0;
  v1::Table asked_by_;
  std::vector<Server> servers_;
  std::set<std::string> away_;
};

}  // namespace ballast::client
