// Takes pushed slices: admits them, copies and checks their bytes outside the job's lock, and has the machine record
// them. A push that finds its place busy, the log full or no buffer waits for its turn.
#pragma once

#include <memory>

#include "absl/types/span.h"
#include "ballast/services/durability/job_journal.h"
#include "ballast/services/job/job_core.h"
#include "ballast/services/job/slice_room.h"

namespace ballast::services {

class Pushes {
 public:
  Pushes(JobCore* core, JobJournal* journal, SliceRoom* room)
      : core_(core),
        journal_(journal),
        room_(room),
        parked_bytes_(std::make_shared<SharedBound::Share>(core->around.push_bytes)) {}

  // As StateServer::Push.
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, const CallLimit& limit,
            Reply<v1::PushResponse> reply) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // A push and where its answer goes. Copies share the answer.
  struct Request {
    v1::PushRequest header;
    absl::Span<const std::byte> payload;
    Reply<v1::PushResponse> reply;
  };
  // A push that the machine admits, now or once there is room.
  struct Admitted {
    std::shared_ptr<HeldChunk> chunk;
    std::shared_ptr<PushedSlice> slice;  // its bytes may come now: Receive is next, no lock held
  };
  // Evaluates the push: false if it has to wait.
  bool Try(const Request& request, Admitted* admitted, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // May the slice's bytes come now? If not, whatever the slice waits for wakes it.
  bool HasRoom(const std::shared_ptr<HeldChunk>& chunk, uint32_t slice, const Request& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckPushed(const Request& request, const HeldChunk& chunk) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::StatusOr<Intake::Receipt> BeginReceive(HeldChunk* chunk, uint32_t slice, const v1::PushRequest& header)
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
  void Park(const Request& request, HeldChunk* chunk, const CallLimit& limit, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  JobJournal* const journal_;
  SliceRoom* const room_;
  const std::shared_ptr<SharedBound::Share> parked_bytes_;  // of payloads; an answer may outlive the job
};

}  // namespace ballast::services
