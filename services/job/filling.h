// Copies the chunks that this server lacks from other servers of the job, while steps go on (rule 28).
//
// A copy is asked for on the clerk and comes on a thread of the source. It waits, as a request of the step machine,
// until the machine says that its version may become durable here. Then the worker puts it into the store between two
// steps: the chunk's updates of steps up to that version have been passed over, and later ones follow. A copy that
// comes too late, after a step that was applied without the chunk, is asked for again. If that happens again and again,
// since steps take less time than copies, some copies hold the next step back until they are there. What kept versions
// have of the chunk is copied first (KeptCopies). Damaged states of kept versions are copied as well, for chunks that
// are not missing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/services/job/fill_sources.h"
#include "ballast/services/job/missing_chunks.h"
#include "ballast/services/job_state/import_pace.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/store/whole_state.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class HeldChunk;
class JobCore;
class KeptCopies;
class KeptVersions;

// Threads: guarded by the job's lock, unless a method says otherwise.
class Filling {
 public:
  // Copies on their way to this job, each with its memory of up to 16 MiB.
  static constexpr size_t kCopiesAtOnce = 2;

  Filling(JobCore* core, KeptCopies* kept_copies, KeptVersions* kept);
  ~Filling();

  // Has the clerk begin further copies, if chunks are missing and may be imported. Asks nothing of the step machine, so
  // that it may be called from the machine's methods.
  void Resume() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The next step is not to be prepared yet. When that ends, the machine has moved.
  bool HoldsSteps() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The job's chunks that are missing, and those that were copied since the first of them was.
  void Describe(v1::JobStatus* status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  // A copy that could not be stored is at fault itself: nothing has changed in the store.
  static bool IsBadCopy(const absl::Status& status);
  // The state that came, which the message then lacks.
  static storage::WholeState TakeState(v1::ExportResponse* message);
  // A chunk on its way: its newest state, or what a kept version has of it. Or the question which versions are kept.
  struct Copy {
    uint64_t chunk = 0;  // index in the layout
    std::optional<int64_t> kept;
    bool mends = false;  // what a kept version has of it is damaged, and the chunk itself is here
    std::shared_ptr<const model::EpochPlan> plan;
    v1::Member from;
    v1::ExportRequest request;
    bool holds_steps = false;
    v1::ExportResponse state;  // once it has come
  };
  using CopyPtr = std::shared_ptr<Copy>;
  using Key = std::pair<uint64_t, std::optional<int64_t>>;  // chunk, kept version
  static Key KeyOf(const Copy& copy) { return {copy.chunk, copy.kept}; }

  // On the clerk.
  void Begin() ABSL_LOCKS_EXCLUDED(job_lock);
  // This server is on the plan, and some of its chunks are missing.
  bool Lacks(const model::EpochPlan* plan) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // What Choose knows of the copies that begin together.
  struct Round {
    absl::Time now;
    absl::Time again;           // when further ones may begin
    bool paused = false;        // by the pace of all copies
    bool moves_paused = false;  // ... of those of chunks that lack none
    std::optional<bool> holds;  // newest states that begin hold the next step back; none: none has begun
  };
  // ... of missing chunks. Takes as long however many there are.
  void ChooseMissing(CopyNeed need, Round* round, std::vector<CopyPtr>* begun) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  CopyNeed NeedOf(uint64_t chunk) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // By the pace of copies.
  bool MayBegin(const HeldChunk& chunk, CopyNeed need, Round* round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The copy of the chunk that begins now; null: none does.
  CopyPtr NextOf(const HeldChunk& chunk, int64_t least, CopyNeed need, Round* round)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A copy of it from a server that may be asked now; null: none may.
  CopyPtr CopyFrom(const HeldChunk& chunk, int64_t least, CopyNeed need, Round* round)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // ... of damaged states of kept versions.
  void ChooseMends(const model::EpochPlan* plan, Round* round, std::vector<CopyPtr>* begun)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The copies that begin now.
  std::vector<CopyPtr> Choose(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Whether copies that begin now hold the next step back: not twice the same step.
  bool BeginHold(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void EndHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  v1::ExportRequest RequestTo(const model::EpochPlan& plan) const;
  // Which versions does another member keep? Asks once under each plan, until one has answered.
  void AskForKept(const std::shared_ptr<const model::EpochPlan>& plan, std::vector<CopyPtr>* begun)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TakeKept(const CopyPtr& ask, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Copies of newest states are on their way.
  bool CopiesNewest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  CopyPtr MakeCopy(const HeldChunk& chunk, int64_t least, uint32_t from) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  uint64_t BytesOf(const HeldChunk& chunk) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void RunAt(absl::Time when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // On a thread of the source.
  void Arrive(const CopyPtr& copy, absl::StatusOr<v1::ExportResponse> state) ABSL_LOCKS_EXCLUDED(job_lock);
  // The chunk is still missing, or the damage there, and the copy is of the open epoch. Null: the copy does not count
  // any more.
  std::shared_ptr<HeldChunk> ChunkOf(const CopyPtr& copy) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // May the copy go to the store? As StepMachine::CheckImport; also VERSION_GONE if a step was applied without the
  // chunk.
  absl::Status Check(const CopyPtr& copy, const HeldChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Evaluates the copy as a request of the machine: false if it has to wait.
  bool Try(const CopyPtr& copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AwaitMachine(const CopyPtr& copy, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The copy is over. `why`: not OK if it does not count.
  void Repeat(const CopyPtr& copy, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The copy is over: another one may begin.
  void End(const CopyPtr& copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Fail(const CopyPtr& copy, const absl::Status& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // As Fail; the version is given up if no holder of the chunk keeps it.
  void FailKept(const CopyPtr& copy, const HeldChunk& chunk, const absl::Status& cause)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The holder has lost the chunk, too. The job ends here once all have: this server was the last.
  void NoteLost(const CopyPtr& copy, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // What a kept version needs finds no room here: asks again later.
  void LackRoom(const CopyPtr& copy, const absl::Status& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // On the worker.
  void Install(const CopyPtr& copy) ABSL_LOCKS_EXCLUDED(job_lock);
  void InstallKept(const CopyPtr& copy) ABSL_LOCKS_EXCLUDED(job_lock);
  void MendKept(const CopyPtr& copy) ABSL_LOCKS_EXCLUDED(job_lock);
  // The store has the copy, or says why not. False: what the store has of the chunk does not count.
  bool Installed(const CopyPtr& copy, const absl::Status& status, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Tells the log of the begin, of progress, and of the end.
  void TellBegin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void TellProgress(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  KeptCopies* const kept_copies_;
  KeptVersions* const kept_;
  bool posted_ ABSL_GUARDED_BY(job_lock) = false;
  std::map<Key, CopyPtr> copies_ ABSL_GUARDED_BY(job_lock);
  MissingChunks missing_ ABSL_GUARDED_BY(job_lock);
  FillSources sources_ ABSL_GUARDED_BY(job_lock);
  std::shared_ptr<const model::EpochPlan> asking_
      ABSL_GUARDED_BY(job_lock);  // a member under this plan is or was asked
  uint32_t asks_failed_ ABSL_GUARDED_BY(job_lock) = 0;
  // Holders that have lost the chunk too, by chunk, as long as the plan is the same.
  std::map<uint64_t, std::set<std::string>> lost_by_ ABSL_GUARDED_BY(job_lock);
  std::shared_ptr<const model::EpochPlan> lost_in_ ABSL_GUARDED_BY(job_lock);
  struct NoRoom {
    absl::Time until = absl::InfinitePast();
    absl::Duration length = absl::ZeroDuration();
    bool told = false;
  };
  NoRoom no_room_ ABSL_GUARDED_BY(job_lock);  // for kept versions
  int late_ ABSL_GUARDED_BY(job_lock) = 0;    // copies that came too late, since one came in time
  absl::Time held_until_ ABSL_GUARDED_BY(job_lock) = absl::InfinitePast();
  int64_t held_after_ ABSL_GUARDED_BY(job_lock) = -1;  // the last decided step when copies last held back the next
  absl::Time timer_at_ ABSL_GUARDED_BY(job_lock) = absl::InfiniteFuture();
  uint64_t timer_ ABSL_GUARDED_BY(job_lock) = 0;

  // Since the first missing chunk.
  bool told_begin_ ABSL_GUARDED_BY(job_lock) = false;
  absl::Time began_ ABSL_GUARDED_BY(job_lock);
  absl::Time told_ ABSL_GUARDED_BY(job_lock);
  uint64_t filled_chunks_ ABSL_GUARDED_BY(job_lock) = 0;
  uint64_t filled_bytes_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast::services
