// How a group comes to own a job: fence, resolve, open (rules 9-11 of services/step/README.md), and the checks that all
// ranks agree.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/group/fencing.h"
#include "ballast/client/group/group.h"
#include "ballast/client/group/tensor_union.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {

// A version, and the number of servers that keep it on the disk.
struct PinnedOn {
  KeptVersion kept;
  uint32_t servers = 0;
  bool differs = false;  // two servers keep different states under this number
};
// Versions of a job on its servers.
struct Pins {
  uint64_t life = 0;               // as KeptVersion's
  std::vector<PinnedOn> versions;  // ascending
};
absl::StatusOr<Pins> AskPins(Router* router, const std::string& job, absl::Time deadline);

class Opening {
 public:
  // Borrows both arguments.
  Opening(Router* router, Group* group, Split split) : router_(router), group_(group), split_(split) {}

  // COLLECTIVE. Opens `options.job` for this group's world size, with `tensors` if the job is new, else with the job's
  // own spec. On return the router's servers are in the order of the members, and the router has the Open.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Open(const SessionOptions& options,
                                                              const std::vector<TensorSpec>& tensors);

  // COLLECTIVE. Opens a new epoch of an open job and registers `added` tensors (perhaps none) at its version. `mine`:
  // an error of this rank, which all ranks then get. ABORTED: the old epoch is over, and the group must start again.
  // After any different error the old epoch goes on.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Extend(const v1::OpenRequest& current, int64_t version,
                                                                const std::vector<TensorSpec>& added,
                                                                const absl::Status& mine, absl::Duration timeout);

 private:
  // COLLECTIVE. Compares what ranks name: all of it, or with kPlaced all but the tensors, whose union is returned.
  absl::StatusOr<TensorUnion> Unite(const std::string& what, const absl::Status& mine, const v1::OpenRequest& named);
  absl::StatusOr<v1::OpenRequest> OpenAsFirst(const SessionOptions& options, const v1::JobSpec& spec);
  absl::StatusOr<v1::OpenRequest> ExtendAsFirst(const v1::OpenRequest& current, int64_t version,
                                                absl::Duration timeout);
  // Asks every server for its id and protocol version. Every rank asks: its own list of servers may differ from rank
  // 0's in order, and its own version from rank 0's.
  absl::Status Identify(absl::Time deadline);
  // Asks whether all servers would find space for the job. Changes nothing.
  absl::Status TryOpen(v1::OpenRequest open, absl::Time deadline);
  absl::Status SendOpen(const v1::OpenRequest& open, absl::Time deadline);
  // Sends a job's first Open. Servers reserve the job's log, which can take a disk minutes. `timeout` applies to
  // servers that are down; a server at work is waited for without limit.
  absl::Status SendFirstOpen(const v1::OpenRequest& open, absl::Duration timeout);
  // Drops kept versions that some server lacks: no restore can use them, because the rank that pinned them died amid
  // it. No rank of this group pins yet.
  absl::Status DropPartialPins(const v1::OpenRequest& open, absl::Time deadline);
  // Fences, then sends `open`, which must start at `version`.
  absl::Status MoveEpoch(Fencing fencing, v1::OpenRequest* open, int64_t version, absl::Time deadline);
  // Drops servers that were found in a registry and are none of the job's `members`. INVALID_ARGUMENT (BAD_SPEC) if a
  // member was not found.
  absl::Status LeaveOthersOut(const std::string& job, const google::protobuf::RepeatedPtrField<v1::Member>& members);
  // Goes by the job's key, if there is one. Errors: those of CheckServers and LeaveOthersOut.
  absl::Status FollowKey(const std::string& job, const JobKey& key);
  // The servers that are left, as identified.
  std::vector<v1::Member> Members() const;
  // FAILED_PRECONDITION (OTHER_SERVER) if an answer came from a server that was not identified.
  absl::Status CheckAnswers(const std::vector<v1::GetJobResponse>& answers) const;
  // Puts the router's servers into the order of `open`'s members.
  absl::Status MatchMembers(const v1::OpenRequest& open, absl::Span<const std::string> server_ids);
  // Returns rank 0's Open, or rank 0's error, on all ranks.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Share(absl::StatusOr<v1::OpenRequest> open,
                                                               bool match_members);

  v1::Tiling MakeTiling(const model::Layout& layout) const;
  // Divides the tensors of `open`'s spec among the ranks.
  absl::Status Divide(v1::OpenRequest* open) const;

  Router* router_;
  Group* group_;
  Split split_;
  TensorUnion union_;
  std::vector<v1::Peer> peers_;
  std::vector<std::string> server_ids_;           // in the router's order, until that becomes the members'
  std::map<std::string, uint64_t> budget_bytes_;  // by server id
  std::map<std::string, v1::Member> identified_;  // by server id: without weights
};

}  // namespace ballast::client
