// Versions of a job that stay on the disk for restores until they are unpinned: those that a request asked for, and
// with durability every-K the server's own (rule 14).
//
// Order of a pin: take the disk's space; write the chunks that are not on the disk at this version; write one entry of
// the catalog with the places of all chunks. After a crash before the entry, there is no pin and the written extents
// are free; after the entry, there is the pin. Order of an unpin: the machine prepares no more restores of the version;
// the entry goes; the extents are free. With every-K no later step is prepared before the pin of a step that is due is
// in the catalog.
//
// A pin belongs to the epoch of its request. Once a newer group has fenced, no server completes the pin: it ends at its
// next chunk, or is given up as soon as it is in the catalog. So after its Opens a group sees all pins of older groups.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "absl/status/statusor.h"
#include "ballast/services/job/restore_checks.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/log.pb.h"
#include "ballast/v1/state_service.pb.h"
#include "ballast/v1/types.pb.h"

namespace ballast::services {

class Flushes;
class JobCore;
class JobJournal;
class KeptCopies;

// Guarded by the job's lock, unless a method says otherwise. The blocking work is the worker's.
class KeptVersions {
 public:
  KeptVersions(JobCore* core, const JobJournal* journal, Flushes* flushes, KeptCopies* copies)
      : core_(core), journal_(journal), flushes_(flushes), copies_(copies), checks_(core, copies) {}

  // As the methods of StateServer, for durable pins. No lock held.
  void Pin(const v1::PinRequest& request, const CallLimit& limit, Reply<v1::PinResponse> reply)
      ABSL_LOCKS_EXCLUDED(job_lock);
  void Unpin(const v1::UnpinRequest& request, std::shared_ptr<Caller> caller, Reply<v1::UnpinResponse> reply)
      ABSL_LOCKS_EXCLUDED(job_lock);

  // Before a restore of one of them is prepared.
  RestoreChecks& checks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return checks_; }

  // No other server keeps the version of a chunk that this one has to copy: it can be restored no more.
  void GiveUpIncomplete(int64_t version, uint64_t chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Versions that are being given up.
  const std::set<int64_t>& unpinning() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return unpinning_; }

  // As StepHost.
  void PinDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { (void)Begin(std::nullopt); }
  void PinChanged(const v1::PinnedVersion& pin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  struct Pinning {
    std::optional<v1::Epoch> epoch;  // of the group that asks; none: a pin of the server's own
    bool done = false;
    absl::Status status;  // OK without a pin if the pin was given up: whoever waited looks again
  };

  // `waiting_for`: the pinning that the request waits for; null before.
  Outcome<v1::PinResponse> TryPin(const v1::PinRequest& request, std::shared_ptr<Pinning>* waiting_for)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For a version that is not pinned: is it the newest, with no step ahead of it?
  absl::Status CheckNewest(const v1::PinRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // May the job keep one version more for a request?
  absl::Status CheckMayKeepOne() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  Outcome<v1::UnpinResponse> TryUnpin(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Pins that a request asked for, existing or being made.
  size_t AskedFor() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A newer group has fenced the group that asked.
  bool Overtaken(const Pinning& pinning) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // No request asks for the version any more. Returns whether the server keeps it all the same, as its automatic pin;
  // otherwise the version is taken off the disk by the worker. Errors as StepMachine::Unpin.
  absl::StatusOr<bool> GiveUp(int64_t version, bool unreadable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Has the worker take the version off the disk, behind a decided restore of it.
  void PostUnpin(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Posts a pin of the machine's current version: for the group of this epoch, or an automatic pin.
  std::shared_ptr<Pinning> Begin(const std::optional<v1::Epoch>& epoch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For a request that asks for an automatic pin: posts work that takes space for the pin outside the automatic pins'
  // budget.
  std::shared_ptr<Pinning> BeginAdoption(int64_t version, const v1::Epoch& epoch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Ends the work on a pin. `status`: of the pin, which is in the catalog if OK.
  void End(int64_t version, const std::shared_ptr<Pinning>& pinning, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status GivenUp(int64_t version) const;

  // On the worker.
  void RunPin(const v1::PinnedVersion& described, const std::shared_ptr<Pinning>& pinning);
  void RunAdoption(int64_t version, const std::shared_ptr<Pinning>& pinning);
  void RunUnpin(int64_t version);
  // Writes to the catalog who wants the pin: the server, a request, or both.
  absl::Status WriteWants(const v1::PinnedVersion& pin);

  JobCore* const core_;
  const JobJournal* const journal_;
  Flushes* const flushes_;
  KeptCopies* const copies_;
  // Pins being made, and versions being unpinned; the machine knows the existing pins.
  std::map<int64_t, std::shared_ptr<Pinning>> pinning_ ABSL_GUARDED_BY(job_lock);
  std::set<int64_t> unpinning_ ABSL_GUARDED_BY(job_lock);
  RestoreChecks checks_ ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
