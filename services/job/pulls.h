// Answers pulls: finds where a version of a chunk can be read, waits until the version is there, then until there is
// room for the answer, and reads. A lease reads nothing: its answer is the place of the working copy.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/proto/model/layout.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/threads/answer_room.h"
#include "ballast/services/threads/executor.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class HeldChunk;
class JobCore;
class DamagedChunks;
class ReadPins;

class Pulls {
 public:
  Pulls(JobCore* core, ReadPins* pins, DamagedChunks* damaged);

  // As StateServer::Pull.
  void Pull(const v1::PullRequest& request, const CallLimit& limit, Allocate allocate, Reply<uint32_t> reply,
            Checksum checksum) ABSL_LOCKS_EXCLUDED(job_lock);
  // As StateServer::Lease.
  void Lease(const v1::PullRequest& request, const CallLimit& limit, Reply<model::LeasedBytes> reply)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // The first of the threads that read. RESOURCE_EXHAUSTED (LIMIT).
  absl::Status MakeThread() { return reads_->Prepare(); }
  // Ends the threads that read, after the reads that are queued. Blocks.
  void JoinThreads() { reads_->Join(); }

 private:
  // A pull whose chunk was found.
  struct Plan {
    std::shared_ptr<HeldChunk> chunk;
    std::shared_ptr<storage::ChunkStore> store;
    v1::Content content = v1::CONTENT_WORKING;
    int64_t version = 0;
    model::Range range;  // in the chunk

    bool working() const { return content == v1::CONTENT_WORKING; }
    // Of the first `elements` elements of the chunk.
    uint64_t BytesOf(uint64_t elements) const {
      return working() ? store->layout().ParameterBytes(elements) : elements * sizeof(float);
    }
    uint64_t bytes() const { return BytesOf(range.size()); }
    // `crc32c`: gets that of the bytes in `to`; null: nobody wants it.
    absl::Status Read(bool pinned, absl::Span<std::byte> to, uint32_t* crc32c) const;
    // Of all but current working copies.
    absl::Status ReadOther(bool pinned, absl::Span<std::byte> to) const;
  };
  // A pull on its way, and where its answer goes.
  struct Request {
    Plan plan;
    uint64_t bytes = 0;  // of the request's message
    CallLimit limit;
    Allocate allocate;
    Reply<uint32_t> reply;
    Checksum checksum = Checksum::kCrc32c;
    Reply<model::LeasedBytes> lease;  // set: the caller wants a lease, and `reply` gets errors alone
    AnswerRoom::Ticket ticket;        // while the pull waits for room
    AnswerRoom::Lease room;
    absl::Span<std::byte> to;  // the answer's bytes, once `allocate` was called
    uint32_t crc32c = 0;       // of them, if the caller wants that
  };
  using RequestPtr = std::shared_ptr<Request>;
  enum class Copy { kCurrent, kPinned, kNotYet };

  void Begin(const v1::PullRequest& request, Request asked) ABSL_LOCKS_EXCLUDED(job_lock);
  absl::StatusOr<Plan> PlanOf(const v1::PullRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Where `version` of a chunk can be read. FAILED_PRECONDITION (VERSION_GONE).
  absl::StatusOr<Copy> Locate(const HeldChunk& chunk, int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Parks the pull in `queue` until `ready` says that it goes on. `waits_for`: for the message at its deadline.
  void Park(const RequestPtr& pull, std::function<bool(Replies*)> ready, std::function<std::string()> waits_for,
            Waiting::Queue* queue, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Evaluates the pull: false if the version is not there yet.
  bool Try(const RequestPtr& pull, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Nothing if the bytes do not lie in DRAM as they are asked for.
  model::LeasedBytes LeaseOf(const Plan& plan, Copy copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AwaitRoom(const RequestPtr& pull) ABSL_LOCKS_EXCLUDED(job_lock);
  // Reads and replies; a pinned copy that it then turns out to need is read on the job's own threads.
  void Read(const RequestPtr& pull, Copy copy) ABSL_LOCKS_EXCLUDED(job_lock);
  void Answer(const RequestPtr& pull, const absl::Status& status);
  // Reads and replies on the job's own threads. On an error there will be no reply.
  absl::Status PostRead(const RequestPtr& pull, Copy copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  ReadPins* const pins_;
  DamagedChunks* const damaged_;
  AnswerRoom::ForJob room_;
  Waiting::Queue awaiting_room_ ABSL_GUARDED_BY(job_lock);
  // The job's own threads for reads that may wait for a disk: a disk that hangs holds up nobody else. Tasks borrow the
  // job.
  const std::unique_ptr<Executor> reads_;
};

}  // namespace ballast::services
