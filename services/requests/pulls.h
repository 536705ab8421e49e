// Answers pulls: finds where a version of a chunk can be read, waits until it is there, and reads it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/foundation/executor.h"
#include "ballast/services/job/job_core.h"
#include "ballast/services/job/read_pins.h"

namespace ballast::services {

class Pulls {
 public:
  Pulls(JobCore* core, ReadPins* pins)
      : core_(core), pins_(pins), reads_(core->around.foundation->MakeExecutor(core->around.read_threads)) {}

  // As StateServer::Pull.
  void Pull(const v1::PullRequest& request, const CallLimit& limit, Allocate allocate, Reply<uint32_t> reply)
      ABSL_LOCKS_EXCLUDED(job_lock);
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
    uint64_t element_bytes() const { return working() ? store->layout().working_element_bytes() : sizeof(float); }
    absl::Status Read(bool pinned, absl::Span<std::byte> to) const;
  };
  enum class Copy { kCurrent, kPinned, kNotYet };

  absl::StatusOr<Plan> PlanOf(const v1::PullRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Where `version` of a chunk can be read. FAILED_PRECONDITION (VERSION_GONE).
  absl::StatusOr<Copy> Locate(const HeldChunk& chunk, int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Evaluates the pull: false if the version is not there yet.
  bool Try(const Plan& plan, const Allocate& allocate, const Reply<uint32_t>& reply, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Read(const Plan& plan, Copy copy, const Allocate& allocate, const Reply<uint32_t>& reply)
      ABSL_LOCKS_EXCLUDED(job_lock);

  JobCore* const core_;
  ReadPins* const pins_;
  // The job's own threads for reads that may wait for a disk: a disk that hangs holds up nobody else. Tasks borrow the
  // job.
  const std::unique_ptr<Executor> reads_;
};

}  // namespace ballast::services
