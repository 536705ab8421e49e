// How a group comes to own a job: fence, resolve, open (rules 9-11 of services/step/README.md), and the checks that all
// ranks agree.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/group/change.h"
#include "ballast/client/group/fencing.h"
#include "ballast/client/group/group.h"
#include "ballast/client/group/members.h"
#include "ballast/client/group/sight.h"
#include "ballast/client/group/tensor_union.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {

class Opening {
 public:
  // Borrows both arguments.
  Opening(Router* router, Group* group, Split split)
      : router_(router), group_(group), split_(split), members_(router) {}

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
  // COLLECTIVE. Checks that all ranks ask for the same Open. With kPlaced the tensors may differ; returns their union.
  absl::StatusOr<TensorUnion> Unite(const std::string& what, const absl::Status& mine, const v1::OpenRequest& named);
  absl::StatusOr<v1::OpenRequest> OpenAsFirst(const SessionOptions& options, const v1::JobSpec& spec);
  absl::StatusOr<v1::OpenRequest> ExtendAsFirst(const v1::OpenRequest& current, int64_t version,
                                                absl::Duration timeout);
  // Asks all servers who they are; of a job with copies, some may be missing.
  absl::Status Identify(const SessionOptions& options);
  // Asks all servers before the fence, and stops using those that the job does not need. JOB_EXISTS, JOB_MISSING.
  absl::StatusOr<Sight> Look(const SessionOptions& options, const JobKey& key, const v1::JobSpec& spec, Change* change,
                             absl::Time deadline);
  // From the claim to the Opens, of a job whose servers never change, and of one that has a table. `is_new`: no server
  // had an Open before the claim.
  absl::Status OpenFixed(const SessionOptions& options, const v1::JobSpec& spec, const v1::Table& table, bool is_new,
                         Fencing* fencing, absl::Time deadline, v1::OpenRequest* open);
  absl::Status OpenByTable(const SessionOptions& options, const v1::JobSpec& spec, JobKey* key, Change* change,
                           absl::Time deadline, v1::OpenRequest* open);
  // Checks before the fence what can be checked there: a mistake must not end a group at work, and must not leave a job
  // without space on the servers.
  absl::Status CheckBeforeFence(const v1::JobSpec& spec, const Sight& sight, const JobKey& key, const v1::Table& table,
                                const v1::Epoch& epoch, absl::Time deadline);
  // The table for a job without a key: its members, and where each chunk is if the job is new and wants copies.
  absl::StatusOr<v1::Table> FirstTableOf(const SessionOptions& options, const v1::JobSpec& spec, bool is_new) const;
  // Sets spec, members (or the table, if it has places) and tiling of `open`: those of `newest`, the job's last Open,
  // or of a new job.
  absl::Status Lay(const v1::JobSpec& spec, const v1::OpenRequest* newest, const v1::Table& table,
                   v1::OpenRequest* open);
  // Claims the next epoch in the key of a job with a table, as the group that has the job. STALE_EPOCH: another group
  // has claimed it since.
  absl::Status ClaimNext(const v1::OpenRequest& current, Fencing* fencing, absl::Time deadline);
  // Fences, then sends `open`, which must start at `version`.
  absl::Status MoveEpoch(Fencing fencing, v1::OpenRequest* open, int64_t version, absl::Time deadline);
  // Returns rank 0's Open, or rank 0's error, on all ranks.
  absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Share(absl::StatusOr<v1::OpenRequest> open,
                                                               bool match_members);

  // Divides the tensors of `open`'s spec among the ranks.
  absl::Status Divide(v1::OpenRequest* open) const;

  Router* router_;
  Group* group_;
  Split split_;
  TensorUnion union_;
  Members members_;
  std::vector<std::string> spares_;  // Members::spares
  std::set<std::string> reached_;    // those that all ranks have
};

}  // namespace ballast::client
