// Takes pushed slices: admits them, copies and checks their bytes outside the job's lock, and has the machine record
// them. Lent gradients stay in the trainer's memory where they may. A push that finds its place busy, the log full or
// no buffer waits for its turn.
#pragma once

#include <memory>

#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/threads/pushed_bytes.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/shared_bound.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class JobCore;
class JobJournal;
class SliceRoom;

class Pushes {
 public:
  Pushes(JobCore* core, JobJournal* journal, SliceRoom* room);

  // As StateServer::Push.
  void Push(const v1::PushRequest& header, PushedBytes payload, const CallLimit& limit, Reply<v1::PushResponse> reply,
            Checksum checksum, std::shared_ptr<model::LentGradients> lent = nullptr) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // A push and where its answer goes. Copies share the answer.
  struct Request {
    v1::PushRequest header;
    PushedBytes payload;
    Reply<v1::PushResponse> reply;
    Checksum checksum = Checksum::kCrc32c;
    std::shared_ptr<model::LentGradients> lent = nullptr;  // keeps the payload beyond the answer
  };
  // Where a push waits: for its place, for the journal to be cut, or for a buffer.
  enum class Wait { kNone, kPlace, kJournal, kBuffer };
  // A push that the machine admits, now or once there is room.
  struct Admitted {
    std::shared_ptr<HeldChunk> chunk;
    uint32_t index = 0;       // of the slice, in the plan
    bool superseded = false;  // nobody needs its bytes
    Wait wait = Wait::kNone;
    ReservedRoom::Lease room;            // unless it waits
    std::shared_ptr<PushedSlice> slice;  // its bytes may come now: Receive is next, no lock held
  };
  // Evaluates the push: false if it has to wait.
  bool Try(const Request& request, Admitted* admitted, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Finds the chunk of the slice, which the machine would admit, and what the slice needs before its bytes may come.
  absl::Status Prepare(const Request& request, Admitted* admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Reserves the slice's room in the journal, if it has to wait for nothing. Otherwise the push is woken from there.
  Wait Reserve(const Request& request, Admitted* admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckPushed(const Request& request, const HeldChunk& chunk) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Does the slice stay in the trainer's memory? Not if a log writes it, or a GPU reads it: other than page-locked
  // memory costs a GPU more than the copy.
  bool StaysLent(const Request& request, const Intake& intake) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::StatusOr<Intake::Receipt> BeginReceive(HeldChunk* chunk, uint32_t slice, const Request& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  using RequestPtr = std::shared_ptr<const Request>;
  // Once the lock is free: Receive, if there is a slice.
  void PostReceive(const RequestPtr& request, std::shared_ptr<PushedSlice> slice, Replies* replies);
  void Receive(const RequestPtr& request, const std::shared_ptr<PushedSlice>& slice) ABSL_LOCKS_EXCLUDED(job_lock);
  void End(const Request& request, const absl::Status& received, PushedSlice* slice, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // INVALID_ARGUMENT (BAD_REQUEST), with the tensor of a value that is not finite: the `index`th of the slice.
  absl::Status NotFinite(const HeldChunk& chunk, const Intake::Receipt& receipt, uint64_t index) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status Record(const Request& request, absl::Status received, PushedSlice* slice, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Park(const Request& request, const Admitted& admitted, const CallLimit& limit, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  JobJournal* const journal_;
  SliceRoom* const room_;
  const std::shared_ptr<SharedBound::Share> parked_bytes_;  // of payloads; an answer may outlive the job
};

}  // namespace ballast::services
