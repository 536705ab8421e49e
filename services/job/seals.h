// Takes the seals of a step's ranks. A seal waits until the step is prepared; once its patience ends, the answer says
// what is missing.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class Filling;
class JobCore;
class JobJournal;
class KeptVersions;
class Updates;

class Seals {
 public:
  Seals(JobCore* core, JobJournal* journal, KeptVersions* kept, const Filling* filling, const Updates* updates)
      : core_(core), journal_(journal), kept_(kept), filling_(filling), updates_(updates) {}

  // As StateServer::Seal.
  void Seal(const v1::SealRequest& request, const CallLimit& limit, Reply<model::SealAnswer> reply)
      ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // A seal and where its answer goes.
  struct Sealing {
    v1::SealRequest request;  // once it is filed, without header and blobs
    const Reply<model::SealAnswer> reply;
  };
  // Evaluates the seal: false if it has to wait.
  bool Try(Sealing* sealing, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Why the server cannot take the seal now, apart from what the machine says. None: it has to wait for that.
  std::optional<absl::Status> Ready(const v1::SealRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void NoteTimes(const v1::SealRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  JobJournal* const journal_;
  KeptVersions* const kept_;
  const Filling* const filling_;
  const Updates* const updates_;
};

}  // namespace ballast::services
