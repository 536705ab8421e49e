// Versions that servers keep for a session, and how the job goes back to one. A part of Session: session.h says how to
// use the parts, on which threads, and which errors end a session.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/client/session_types.h"

namespace ballast::client {

struct SessionCore;

class Versions {
 public:
  // After a resume or a Restore: the blobs sealed with the version found or restored, by rank of the group that sealed
  // it.
  const std::vector<std::string>& resumed_blobs() const;
  // If Open found that servers of a job with durability every-K had lost later versions: the version whose state, step
  // counts and blobs the session got. version() is then the number of the transaction that restored it. Else -1.
  int64_t restored_version() const;

  // Called by any one rank. Pin keeps version() readable by all ranks while training goes on; Unpin frees its space.
  absl::Status Pin();
  absl::Status Unpin(int64_t version);
  // Called by any one rank, for a job with durability `step` or `every-K`. PinDurably keeps version() on the disks of
  // all servers until UnpinDurably, whichever processes die. It is for Restore; Read needs Pin. Training waits while
  // servers write state that is not yet on disk at this version; step_timeout bounds that. BUDGET or DISK_FULL, with
  // the missing amount, if any server lacks the space; then the others give the version up. After any other error some
  // servers may keep it: call PinDurably again before the next step. Otherwise the next group's Open drops a version
  // that some server lacks.
  absl::Status PinDurably();
  absl::Status UnpinDurably(int64_t version);
  // Versions kept on the disk by all servers, ascending. Any step may remove versions that servers pinned by
  // themselves.
  absl::StatusOr<std::vector<KeptVersion>> DurablePins();
  // Called by any one rank. OK if all servers keep this version, and it has the state that `wanted` names; fields that
  // `wanted` leaves open are not compared. Errors: BAD_SPEC, the version belongs to another life of the job;
  // VERSION_GONE, no server keeps it, or it belongs to another history of this job.
  absl::Status CheckKept(const KeptVersion& wanted);
  // COLLECTIVE, between steps, with no push or write pending. Makes the next transaction: all state and step counts
  // become those of a kept version, and resumed_blobs() returns its blobs. version() goes up by one, as with any
  // transaction: no number ever names two states. With durability every-K servers can lose the restore, like any step,
  // until they pin a later version; call PinDurably to be safe. Servers read the kept version and write all state;
  // step_timeout bounds that.
  // Errors before any change: CheckKept's; BAD_SPEC, tensors got their first values since.
  // ABORTED: this group's epoch is over; the state is at the old version or restored.
  absl::StatusOr<StepReport> Restore(const KeptVersion& kept);
  // Optimizer step count t of a tensor at `version`: the current version or one pinned by this rank.
  absl::StatusOr<uint64_t> TensorSteps(absl::string_view tensor, int64_t version);

 protected:
  explicit Versions(SessionCore* core) : core_(core) {}
  ~Versions() = default;
  // After Open has adopted the job's last decision: takes its blobs.
  void Resume(const v1::OpenRequest& open);
  // COLLECTIVE. After an Open that found state lost.
  absl::Status GoBack(int64_t pinned);

 private:
  // COLLECTIVE. The transaction that restores a version, the first of its epoch.
  absl::StatusOr<StepReport> BringBack(int64_t pinned, const v1::PinResponse& pin);

  SessionCore* core_;
  std::vector<std::string> resumed_blobs_;
  int64_t restored_version_ = -1;
  // Step counts by tensor: of versions that this rank pinned, and of the version in the servers' last answer. Callers
  // ask for single tensors, and each answer has all.
  std::map<int64_t, std::vector<uint64_t>> pinned_steps_;
  int64_t known_version_ = -2;
  std::vector<uint64_t> known_steps_;
};

}  // namespace ballast::client
