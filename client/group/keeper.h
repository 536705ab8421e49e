// Rank 0's keeper changes the servers of an open job with a table while its group trains: rule 31 of
// services/step/README.md. It leaves out members that are silent, has servers join that are wanted, and ends a change
// once all copies are made. A change is an epoch of the same group: it is claimed, fenced, written and opened by calls
// of the keeper's own, and the session's router goes on with it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/client/group/absentees.h"
#include "ballast/client/group/agenda.h"
#include "ballast/client/group/change.h"
#include "ballast/client/group/members.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transport/router.h"

namespace ballast::client {

class Keeper {
 public:
  // Borrows both. `router`: the session's, which has its routes. A job whose servers cannot change needs no keeper.
  Keeper(const SessionOptions& options, Router* router);
  // RESOURCE_EXHAUSTED (LIMIT) if the system made no thread.
  const absl::Status& made() const { return made_; }
  // Ends a change under way, which the next group then finishes.
  ~Keeper();

  // While one lives, the keeper begins no change. Waits for one under way, at most step_timeout for one that has to be
  // begun again.
  class Pause {
   public:
    explicit Pause(Keeper* keeper) : keeper_(keeper) {
      if (keeper_ == nullptr) return;
      keeper_->LockFinished();
      keeper_->router_->PinRoutes(true);
    }
    ~Pause() {
      if (keeper_ == nullptr) return;
      keeper_->router_->PinRoutes(false);
      keeper_->changing_.Unlock();
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    Keeper* const keeper_;
  };

 private:
  // Why the servers may have to change, as far as is known without asking them.
  struct Sight {
    std::vector<Router::SilentServer> silent;
    bool copied = false;  // by the members' answers all that is copied is there
    std::string asked;    // the wish, and the servers that are registered
  };

  void Run();
  bool Rest(absl::Duration time);
  bool stopping() const;
  // Notes who is silent by now. Returns whether they are others than before.
  bool LookForSilent(Sight* sight) const;
  // Whether a change that goes by `sight` is to end: the keeper stops, or other servers are silent by now.
  bool IsOver(const Sight& sight) const;
  // Whether some member is silent.
  bool LooksSilent() const;
  // Asks etcd and the servers for all but `silent`.
  void LookAround(Sight* sight) const;
  // Whether members have copied all that they were to copy.
  bool HaveCopied(const Routes& routes) const;
  // Whether the key has an epoch of this group that is not open yet: a change failed amid its writes.
  bool IsUnfinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  void LockFinished() ABSL_EXCLUSIVE_LOCK_FUNCTION(changing_);
  // Changes the servers if that is needed. `patience`: for all servers to answer before anything is claimed.
  absl::StatusOr<Agenda::Outcome> Change(const Sight& sight, absl::Duration patience)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  // Servers that are no members as far as the job is open, and are registered, or were to join by a change that is
  // unfinished: those that are asked, and those that rest since they did not answer.
  struct Candidates {
    std::vector<v1::Member> asked, resting;
  };
  Candidates CandidatesOf(const v1::Table& table, const std::vector<v1::ServerEntry>& entries,
                          const Sight& sight) const;
  // How long one may take to say whether it has room, while training goes on.
  absl::Duration PatienceFor(const Candidates& candidates, const Members& members) const;
  // Whoever did not answer rests, and a line says that the change did without it.
  void NoteAbsent(const Candidates& candidates, const client::Change& change, const Members& members);
  // Says why a change failed, if that is due.
  void Tell(const absl::Status& failed, const Sight& sight) ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);

  const SessionOptions options_;
  Router* const router_;
  absl::Mutex changing_;
  // The last claim of this group's epochs, and the nonce of the last that was tried: its answer may have been lost.
  v1::Epoch claimed_ ABSL_GUARDED_BY(changing_);
  uint64_t tried_ ABSL_GUARDED_BY(changing_) = 0;
  // std's, whose waits go by the steady clock: absl's would last longer by as much as the machine's clock is set back.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;  // guarded by mutex_
  // The thread's.
  Absentees absentees_;
  Agenda agenda_;
  FailureLines failures_;
  std::thread thread_;
  absl::Status made_;
};

}  // namespace ballast::client
