// Keeps apart chunks that move between tiers and plans that need the space which a move gives back. A chunk that moves
// has a place in two tiers.
//
// A plan waits for the moves. Moves after a change of budgets (TryBegin) wait for nobody: a job's worker would wait
// with the move, and the job's steps with the worker, for as long as another job's disk hangs. Only an Open that moves
// its own job's chunks to make room waits for plans (Begin).
#pragma once

#include <functional>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Threads: any.
class MoveGate {
 public:
  // True: a chunk of `mover` may move, until End; chunks of other movers may move beside it. False: plans keep moves
  // out, and `admitted` runs once no plan does, on the thread of the last plan, no lock held. `admitted` must be short;
  // another of the same mover takes its place.
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
