// The records that a job appends to its journal, and the room for records, whatever journal the job has (journal.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/job_state/promise_log.h"
#include "ballast/services/job_state/reserved_room.h"
#include "ballast/services/journal/journal.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

class JobCore;
class SliceRoom;

// Deletes the gradient log of a job that could not be recovered.
absl::Status RemoveLog(storage::Tiers& tiers, const std::string& job);

class JobJournal : public StepJournal {  // REQUIRES: Stop or Remove before the end of one that has a log
 public:
  // Borrows `core` and `room`, which need not be there yet. `post_flush`: called under the lock; has the worker flush
  // chunks, so that the log can be cut.
  JobJournal(const std::string& job, JobCore* core, SliceRoom* room, std::function<void()> post_flush)
      : core_(core),
        room_(room),
        post_flush_(std::move(post_flush)),
        promises_(job),
        journal_(NoJournal()),
        life_(NewLife()) {}

  // Under the job's lock.

  // For the step machine, which its callers call under the lock.
  uint64_t Append(const StepRecord& record) override;
  void Sync(uint64_t lsn) override;
  // For the core, which writes them to the catalog and tells the machine what is durable.
  PromiseLog* promises() { return &promises_; }
  // A new epoch is open, and the core has its plan and chunks: slices of older epochs are void unless `keeps_slices`.
  void Opened(bool keeps_slices = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Makes room for records other than slices. Call before a request that may append so much. RESOURCE_EXHAUSTED
  // (BUDGET).
  absl::Status MakeRoom(uint64_t records, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For the prepared record that this seal may lead to. Call NoteSealed once the seal is accepted.
  absl::Status MakeRoomForSeal(const v1::SealRequest& seal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void NoteSealed(const v1::SealRequest& seal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    sealed_bytes_max_ = std::max<uint64_t>(sealed_bytes_max_, seal.ByteSizeLong());
  }
  // Does every slice of the job go to a gradient log?
  bool durable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return journal_->durable(); }
  // Reserves room for a slice that is about to come, with what may come along. None: the log is full, and WaitForCut
  // has chunks flushed and all pushes woken when the log was cut. `leaves_memory`: once the journal has the slice.
  std::optional<ReservedRoom::Lease> Reserve(uint64_t payload_bytes, bool leaves_memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WaitForCut() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Call before the slice, which has its room, is recorded: begins another segment if this one is full.
  absl::Status BeginRecord(const PushedSlice& slice) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The slice's record has the room, or nothing needs it any more.
  void GiveBack(ReservedRoom::Lease room, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Is the slice's attempt too old to be prepared? No log keeps the slice then: its rank drops the attempt, too.
  bool IsSuperseded(const v1::PushRequest& header) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return header.step() == attempt_.first && header.attempt() < attempt_.second;
  }
  JournalState state() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // How many more steps the log takes before it is full; none if chunks need no flush for a log.
  std::optional<uint64_t> StepsFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return journal_->StepsFree(step_bytes_);
  }
  // How many steps of gradients the whole log holds, beside a transaction of values; none without a log, and while the
  // server has no chunk with gradients.
  std::optional<uint64_t> StepsHeld() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return journal_->StepsHeld(step_bytes_, values_bytes_);
  }
  // Gradients up to `version` are not needed any more.
  void Cut(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Where logged slices lie; null if none can be. Stays until the worker has ended.
  const storage::BlockFile* file() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  struct Use {
    uint64_t capacity_bytes = 0;                   // of the file; 0 without a log and a spill
    uint64_t used_bytes = 0;                       // of segments that are not free
    absl::Duration waited = absl::ZeroDuration();  // time in which pushes waited for the log to be cut
  };
  Use use() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // On the worker, or the thread that recovers.

  // Growth of the log, or of the spill, whose budget is taken.
  struct Growth {
    JournalSize size;
    uint64_t bytes = 0;   // 0: there is as much already
    bool logged = false;  // a gradient log, not a spill
  };
  // Is the journal as large already?
  bool Holds(const JournalSize& size) const ABSL_LOCKS_EXCLUDED(job_lock);
  // Takes the budget for a journal of this size. Quick: under the planning lock. RESOURCE_EXHAUSTED (BUDGET).
  absl::StatusOr<Growth> TakeBudget(const JournalSize& size, bool logged) ABSL_LOCKS_EXCLUDED(job_lock);
  // Makes the log, or extends it. A log of many GiB takes minutes: not under the planning lock. Stopping the job ends
  // the call. On an error the budget is returned.
  absl::Status Grow(const Growth& growth) ABSL_LOCKS_EXCLUDED(job_lock);
  // Makes the log longer by so many steps of gradients, while steps go on. RESOURCE_EXHAUSTED (BUDGET, DISK_FULL);
  // UNAVAILABLE: somebody plans with the free space at this moment, or the job is being stopped.
  absl::Status Lengthen(uint64_t steps) ABSL_LOCKS_EXCLUDED(job_lock);
  // Deletes the log: of a dropped job after Stop, or of a job that has accepted no Open. No request may append
  // meanwhile.
  absl::Status Remove() ABSL_LOCKS_EXCLUDED(job_lock);
  // After the worker's end. A spill is gone then.
  void Stop() ABSL_LOCKS_EXCLUDED(job_lock);
  std::string log_path() const;
  // The job's life on this server: a name that is dropped and made again has another.
  uint64_t life() const { return life_; }

  // Recovery.

  // The log of an earlier run of the server: its life, the budget that it holds, its last record. RESOURCE_EXHAUSTED
  // (BUDGET).
  absl::Status TakeRecovered(uint64_t life, uint64_t file_bytes, uint64_t last_lsn) ABSL_LOCKS_EXCLUDED(job_lock);
  // The life of a job without a log, as its pins tell: before the job is published.
  void TakeLife(uint64_t life) { life_ = life; }
  // All records of the log were replayed: appends go there from here on.
  absl::Status Start(std::unique_ptr<storage::GradientLog> log, bool logged) ABSL_LOCKS_EXCLUDED(job_lock);
  // The newest attempt at the undecided step in the recovered log.
  void NoteRecovered(int64_t step, uint64_t attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    attempt_ = {step, attempt};
  }
  // Gives a recovered log, of which restarts in a row may have used much, room for this restart and for slices.
  absl::Status ExtendForRestart() ABSL_LOCKS_EXCLUDED(job_lock);
  // Would the next restart extend the log, if nothing was cut until then?
  bool IsShortForRestart() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Begins the restart's log segment. True if few are left, so that all chunks should be flushed.
  absl::StatusOr<bool> RollForRestart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  // For a restart, and for slices.
  static constexpr uint64_t kFreeForRestart = kLogSegmentsReserved + 2;
  static uint64_t NewLife();
  absl::StatusOr<std::unique_ptr<storage::GradientLog>> Create(const Growth& growth) ABSL_LOCKS_EXCLUDED(job_lock);
  std::string spill_path() const;
  struct Segments {
    std::shared_ptr<Journal> journal;
    uint64_t bytes = 0;  // of each; 0 without a file
    uint64_t free = 0;
  };
  Segments segments() const ABSL_LOCKS_EXCLUDED(job_lock);
  // Takes the journal away and calls `ended`, both in one turn under the lock: nothing is appended any more. Then the
  // journal's thread ends, which may wait for the disk. Returns whether there was a spill.
  bool End(absl::FunctionRef<void()> ended) ABSL_LOCKS_EXCLUDED(job_lock);
  // Calls `make` with the record for a new segment, and has chunks flushed if the segment leaves too few.
  absl::Status MakeRoomIn(absl::FunctionRef<absl::Status(Journal::Begin)> make) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  storage::LogRecord Snapshot(bool whole) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  SliceNeeds NeedsOf(uint64_t payload_bytes, bool leaves_memory) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return {payload_bytes, leaves_memory, sealed_bytes_max_ + norm_bytes_max_, reserved_.bytes()};
  }
  void ReturnBudget(uint64_t bytes);
  void NoteAttempt(int64_t step, uint64_t attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AddSlice(PushedSlice* slice, const v1::PushRequest& header, storage::LogRecord* out)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WakeWaiting(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On the log's thread: something became durable, or failed.
  void Progressed() ABSL_LOCKS_EXCLUDED(job_lock);

  JobCore* const core_;
  SliceRoom* const room_;
  const std::function<void()> post_flush_;
  PromiseLog promises_ ABSL_GUARDED_BY(job_lock);  // numbers all records
  std::shared_ptr<Journal> journal_ ABSL_GUARDED_BY(job_lock);
  ReservedRoom reserved_;
  std::pair<int64_t, uint64_t> attempt_ ABSL_GUARDED_BY(job_lock) = {-1, 0};  // the highest step and attempt
  uint64_t norm_bytes_max_ ABSL_GUARDED_BY(job_lock) = 0;                     // of the norms in a prepared record
  uint64_t sealed_bytes_max_ ABSL_GUARDED_BY(job_lock) = 0;                   // of the accepted seals in this epoch
  uint64_t step_bytes_ ABSL_GUARDED_BY(job_lock) = 0;                         // of a step's gradients in the journal
  uint64_t values_bytes_ ABSL_GUARDED_BY(job_lock) = 0;                       // of a transaction of values
  bool waits_for_cut_ ABSL_GUARDED_BY(job_lock) = false;
  absl::Time waits_since_ ABSL_GUARDED_BY(job_lock);
  absl::Duration waited_ ABSL_GUARDED_BY(job_lock);
  uint64_t life_;       // written by recovery, before the job is published; read by any thread
  uint64_t bytes_ = 0;  // of the NVMe budget; worker only
};

}  // namespace ballast::services
