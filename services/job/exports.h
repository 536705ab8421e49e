// Hands whole chunks to other servers of the job, which copy them: finds the chunk, waits until it is at the wanted
// version, then until there is room for the answer, and has the worker read the state between two of its tasks. The
// same with what durable pins keep of the chunk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/threads/answer_room.h"
#include "ballast/services/threads/exported_chunk.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class DamagedChunks;
class HeldChunk;
class JobCore;

class Exports {
 public:
  Exports(JobCore* core, DamagedChunks* damaged);

  // As StateServer::Export.
  void Export(const v1::ExportRequest& request, const CallLimit& limit, Reply<ExportedChunk> reply)
      ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // An export on its way, and where its answer goes.
  struct Request {
    std::shared_ptr<HeldChunk> chunk;
    int64_t least = 0;
    std::optional<int64_t> kept_version;  // as v1::ExportRequest
    uint64_t state_bytes = 0;
    uint64_t bytes = 0;  // of the request's message
    CallLimit limit;
    Reply<ExportedChunk> reply;
    AnswerRoom::Ticket ticket;  // while the export waits for room
    AnswerRoom::Lease room;
  };
  using RequestPtr = std::shared_ptr<Request>;

  void Begin(const v1::ExportRequest& request, const RequestPtr& wanted, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The job is the one that is meant.
  absl::Status CheckJob(const v1::ExportRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::StatusOr<ExportedChunk> TellKept(const v1::ExportRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The chunk that is asked for.
  absl::StatusOr<std::shared_ptr<HeldChunk>> Find(const v1::ExportRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The chunk is still this server's to give.
  absl::Status CheckHas(const std::shared_ptr<HeldChunk>& chunk) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Parks the export in `queue` until `ready` says that it goes on. `waits_for`: for the message at its deadline.
  void Park(const RequestPtr& wanted, std::function<bool(Replies*)> ready, std::function<std::string()> waits_for,
            Waiting::Queue* queue, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Evaluates the export: false if the version is not there yet.
  bool Try(const RequestPtr& wanted, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void AwaitRoom(const RequestPtr& wanted) ABSL_LOCKS_EXCLUDED(job_lock);
  // Has the worker read and reply. On an error there will be no reply.
  absl::Status PostRead(const RequestPtr& wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On the worker.
  absl::StatusOr<ExportedChunk> Read(const RequestPtr& wanted) ABSL_LOCKS_EXCLUDED(job_lock);
  // All of the answer but the state.
  absl::Status Describe(const Request& wanted, v1::ExportResponse* head) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  DamagedChunks* const damaged_;
  AnswerRoom::ForJob room_;
  Waiting::Queue awaiting_room_ ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
