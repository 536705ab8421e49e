// Opens of a job: each is planned, gets space, and is then taken by the step machine, or refused as a whole.
//
// An epoch's plan is made on the clerk, outside the job's lock. An Open that needs no more space than the job has is
// taken at once, whatever the worker is at; any other waits for its turn on the worker.
//
// A dry run is no Open: nobody waits for it, and it waits for no Open. It is answered on the clerk, but where it asks
// for more chunks than an open job has: these are planned on the worker, behind the updates. Those who ask for dry runs
// take turns.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class JobCore;
class JobJournal;
class Space;

// Guarded by the job's lock, unless a method says otherwise.
class Openings {
 public:
  Openings(JobCore* core, JobJournal* journal, Space* space) : core_(core), journal_(journal), space_(space) {}

  // A dry run's request, until the request is answered or has run out of time.
  struct DryRun {
    DryRun(const v1::OpenRequest& open, std::string asker) : request(open), identity(std::move(asker)) {}
    const v1::OpenRequest request;
    const std::string identity;  // who asks
    bool asked = false;          // the job's lock guards what follows
    std::optional<absl::StatusOr<v1::OpenResponse>> answer;
  };

  // As StepMachine::Open, for real Opens.
  Outcome<v1::OpenResponse> Try(const v1::OpenRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  Outcome<v1::OpenResponse> Try(const std::shared_ptr<DryRun>& run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // As StepHost: the core gets the plan and the chunks taken for the plan.
  void Opened(std::shared_ptr<const model::EpochPlan> plan, bool keeps_slices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // An Open is being evaluated, though its request may have run out of time.
  bool busy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return opening_ != nullptr; }
  // In recovery: runs `open`, in which the machine opens an epoch, with these chunks.
  absl::Status Replay(HeldChunks chunks, absl::FunctionRef<absl::Status()> open)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  // An Open whose chunks are being taken.
  struct Opening {
    std::string request;  // serialised; an Open with different bytes waits
    bool done = false;
    absl::Status status;
    std::shared_ptr<const model::EpochPlan> plan;
    bool adopted = false;
    HeldChunks chunks;  // of the new plan, registration order
  };
  using Plan = std::shared_ptr<const model::EpochPlan>;
  absl::StatusOr<Plan> MakePlan(const v1::OpenRequest& request, absl::FunctionRef<absl::Status()> interrupt) const;
  // On the clerk.
  void Prepare(const v1::OpenRequest& request) ABSL_LOCKS_EXCLUDED(job_lock);
  void AskNext() ABSL_LOCKS_EXCLUDED(job_lock);
  void Ask(const std::shared_ptr<DryRun>& run) ABSL_LOCKS_EXCLUDED(job_lock);
  // On the worker.
  void TakeSpace(const Plan& plan) ABSL_LOCKS_EXCLUDED(job_lock);
  // On the worker, or on the clerk where the worker changes nothing that a dry run of the plan reads.
  void AskForSpace(const std::shared_ptr<DryRun>& run, const Plan& plan) ABSL_LOCKS_EXCLUDED(job_lock);
  void Answer(const std::shared_ptr<DryRun>& run, absl::StatusOr<v1::OpenResponse> answer)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // The machine takes the Open now, or refuses it.
  void Finish(absl::StatusOr<HeldChunks> chunks, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  JobJournal* const journal_;
  Space* const space_;
  std::unique_ptr<Opening> opening_ ABSL_GUARDED_BY(job_lock);
  // Dry runs waiting for the clerk, by identity, and the identity served last.
  std::map<std::string, std::deque<std::weak_ptr<DryRun>>> asking_ ABSL_GUARDED_BY(job_lock);
  std::string served_last_ ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
