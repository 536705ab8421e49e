// Where a job's parts copy chunks from: the other servers of the job.
#pragma once

#include "absl/time/time.h"
#include "ballast/services/threads/reply.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Threads: any. Outlives every job.
class ChunkSource {
 public:
  virtual ~ChunkSource() = default;
  // Asks the server `from` (server_id, disk, address). May look at files; no lock held. Replies once, on any thread,
  // with the server's error, or UNAVAILABLE or DEADLINE_EXCEEDED if none came. Replies also after the job has ended.
  virtual void Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
                     Reply<v1::ExportResponse> reply) = 0;
};

}  // namespace ballast::services
