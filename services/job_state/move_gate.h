// Makes plans and moves take turns. A chunk that moves between tiers takes space in both, so a plan waits until no
// chunk moves.
//
// A move after a change of budgets (TryBegin) does not wait for plans. If it did, it would hold up the job's worker and
// steps for as long as another job's disk hangs. Only an Open that moves its own job's chunks to make room waits for
// plans (Begin).
#pragma once

#include <functional>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Threads: any.
class MoveGate {
 public:
  // True: a chunk of `mover` may move until End; chunks of other movers may move at the same time. False: plans keep
  // moves out. Once the last of them ends, its thread runs `admitted` without a lock. `admitted` must be short. A later
  // `admitted` of the same mover replaces it.
  bool TryBegin(const void* mover, std::function<void()> admitted);
  // As TryBegin, but waits for the plans.
  void Begin();
  void End();

  // A plan that keeps moves out while it lives. The constructor blocks until no chunk moves.
  class KeptShut {
   public:
    explicit KeptShut(MoveGate* gate);
    ~KeptShut();
    KeptShut(const KeptShut&) = delete;
    KeptShut& operator=(const KeptShut&) = delete;

   private:
    MoveGate* const gate_;
  };

 private:
  absl::Mutex mu_;
  int moves_ ABSL_GUARDED_BY(mu_) = 0;
  int plans_ ABSL_GUARDED_BY(mu_) = 0;                                          // that wait or have begun
  std::map<const void*, std::function<void()>> admitted_ ABSL_GUARDED_BY(mu_);  // at most one a job
};

}  // namespace ballast::services
