// How a group comes to own a job: fence, resolve, open (rules 9-11 of services/step/README.md), and what all ranks must
// agree on first.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/group.h"
#include "ballast/client/router.h"
#include "ballast/client/session.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {

// The spec of a new job as the user gave it.
v1::JobSpec MakeSpec(const SessionOptions& options, const std::vector<TensorSpec>& tensors);
v1::TensorSpec ToProto(const TensorSpec& tensor);

// OK if `given` (one registration) has `job`'s optimizer and names exactly its live tensors, all alike. BAD_SPEC says
// what differs; TENSORS_DIFFER, where only the names do, has all that differ in its details.
absl::Status CheckSameSpec(const v1::JobSpec& given, const v1::JobSpec& job);

// A version, and how many of the servers have it pinned durably.
struct PinnedOn {
  int64_t version = 0;
  uint32_t servers = 0;
};
// Ascending.
absl::StatusOr<std::vector<PinnedOn>> AskPins(Router* router, const std::string& job, absl::Time deadline);

class Opening {
 public:
  // Borrows both.
  Opening(Router* router, Group* group, Split split) : router_(router), group_(group), split_(split) {}

  // COLLECTIVE. Opens `options.job` with `spec` (a new job's) or the job's own, for this group's world size. On return
  // the router's servers are in the order of the members, and it knows the Open.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Open(const SessionOptions& options, const v1::JobSpec& spec);

  // COLLECTIVE. A new epoch of an open job, with `added` tensors, perhaps none, registered at its version. ABORTED: the
  // old epoch is over all the same; any other error leaves it as it was.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Extend(const v1::OpenRequest& current, int64_t version,
                                                                const std::vector<TensorSpec>& added,
                                                                absl::Duration timeout);

 private:
  absl::StatusOr<v1::OpenRequest> OpenAsFirst(const SessionOptions& options, const v1::JobSpec& spec);
  absl::StatusOr<v1::OpenRequest> ExtendAsFirst(const v1::OpenRequest& current, int64_t version,
                                                const std::vector<TensorSpec>& added, absl::Duration timeout);
  absl::StatusOr<std::vector<v1::GetJobResponse>> Fence(const std::string& job, const v1::Epoch& epoch,
                                                        bool expect_empty, absl::Time deadline);
  // Whether all servers would find space for it. Changes nothing.
  absl::Status TryOpen(v1::OpenRequest open, absl::Time deadline);
  absl::Status SendOpen(const v1::OpenRequest& open, absl::Time deadline);
  // A job's first: servers write its log in full once, which takes a disk minutes if it is large. `timeout` is for
  // servers that are down; one that answers that it is at work is waited for, however long.
  absl::Status SendFirstOpen(const v1::OpenRequest& open, absl::Duration timeout);
  // Durable pins that not all servers have cannot be restored: whoever made them died amid it. Nobody else pins yet.
  absl::Status DropPartialPins(const v1::OpenRequest& open, absl::Time deadline);
  // Fence and Open of `open`, which must start at `version`.
  absl::Status MoveEpoch(v1::OpenRequest* open, int64_t version, absl::Time deadline);
  // Puts the router's servers into the order of `open`'s members.
  absl::Status MatchMembers(const v1::OpenRequest& open, absl::Span<const std::string> server_ids);
  absl::Status MatchMembersByAsking(const v1::OpenRequest& open, absl::Time deadline);
  // Rank 0's Open, or its error, on all ranks.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Share(absl::StatusOr<v1::OpenRequest> open, bool match_members,
                                                               absl::Duration timeout);

  v1::Tiling MakeTiling(const model::Layout& layout) const;

  Router* router_;
  Group* group_;
  Split split_;
};

}  // namespace ballast::client
