// Declarations shared by the files of class StateServer: state_server.cc, start.cc, jobs_coming_back.cc and
// administration.cc.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/job_state/foundation.h"
#include "ballast/services/job_state/import_pace.h"
#include "ballast/services/job_state/surroundings.h"
#include "ballast/services/server/operator_calls.h"
#include "ballast/services/server/state_server.h"
#include "ballast/services/server/stored_jobs.h"
#include "ballast/services/threads/turns.h"
#include "ballast/storage/catalog/catalog.h"

namespace ballast::services {

class Job;

// Each job has a thread; a fence of an unknown name makes a job.
inline constexpr size_t kJobsMax = 256;

// Threads that reply to requests which have waited, or would have to, and the queues of the jobs on them.
struct AnswerQueues {
  // More than there are jobs, so that each has its own unless jobs came and went by the hundred.
  static constexpr size_t kQueues = 4 * kJobsMax, kServersQueue = 0;
  static int PullThreads(const StateServerOptions& options) {
    if (options.answer_threads > 0) return options.answer_threads;
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency() / 2));
  }
  AnswerQueues(const StateServerOptions& options, Foundation* foundation)
      : pulls(foundation->MakeExecutor(PullThreads(options)), kQueues),
        steps(foundation->MakeExecutor(1), kQueues),
        looks(foundation->MakeExecutor(1)) {}
  absl::Status Prepare() {
    BALLAST_RETURN_IF_ERROR(pulls.Prepare());
    return steps.Prepare();
  }
  void Join() {
    pulls.Join();
    steps.Join();
    looks->Join();
  }
  Executor* of_server() { return pulls.queue(kServersQueue); }

  Turns pulls;                            // and operators' calls: copies of megabytes
  Turns steps;                            // requests of step machines: small, and a whole group waits for each
  const std::unique_ptr<Executor> looks;  // at all jobs, for operators and quotas: may wait for a job's lock
  std::atomic<size_t> next_queue = kServersQueue + 1;
};

// The state of a server while its jobs come back. The server's lock guards `going` and `outcome`.
struct JobsComingBack {
  bool going = false;
  absl::Status outcome;  // once they are back
  std::atomic<bool> ends = false;
  std::function<absl::Status()> interrupt;  // of the options, and of the server's end
  std::thread thread;
};

struct StateServer::Impl {
  explicit Impl(const StateServerOptions& options)
      : options(options),
        foundation(options.foundation != nullptr ? options.foundation : SystemFoundation()),
        bounds{{options.waiting_requests_max, &counters.waiting_requests},
               {options.waiting_request_bytes_max, &counters.waiting_request_bytes},
               {options.waiting_push_bytes_max, &counters.waiting_push_bytes}},
        answer_room(options.answer_bytes_max),
        import_pace(ImportPace::RatesOf(options.import_bytes_per_s, options.compute_threads)),
        compute(std::max(1, options.compute_threads)),
        answers(options, foundation),
        forgetting(foundation->MakeExecutor(1)),
        drops(foundation->MakeExecutor(kOperatorCallsMax), kOperatorCallsMax, answers.of_server(), &deadlines,
              {&bounds.requests, &bounds.request_bytes}),
        budget_changes(foundation->MakeExecutor(1), kOperatorCallsMax, answers.of_server(), &deadlines,
                       {&bounds.requests, &bounds.request_bytes}) {}

  // The bound on drops, and on new budgets. A drop has a thread for as long as its job's disk hangs: 16 threads are
  // more than an operator drops jobs at once, and few beside those of 256 jobs.
  static constexpr int kOperatorCallsMax = 16;
  // A name's job, or the record of a job that a restart did not bring back: its state is lost, or the job lacked
  // something that a later start may find. GetJob describes a job with lost state; otherwise it replies `cause`.
  struct Entry {
    std::shared_ptr<Job> job;
    std::optional<v1::GetJobResponse> lost;
    absl::Status cause;      // why the job did not come back
    uint64_t log_bytes = 0;  // of the NVMe budget, held by its log
    // The bytes of a job that is not here; while it comes back, the least that it then has.
    storage::PartBytes taken = {};
    bool recovering = false;  // `lost` describes the job until it is back
    uint64_t made = 0;        // numbers the jobs in the order in which they were made since the start
  };

  class Loader;
  absl::Status LoadJobs(const StoredJobs& stored);
  // From here on, until LoadJobs has put the jobs there, their calls are answered by CauseOf.
  void ExpectJobs(const std::map<std::string, JobEntry>& stored);
  // Why an entry's job answers no calls. REQUIRES: entry.lost.
  absl::Status CauseOf(const std::string& name, const Entry& entry) const;
  // UNAVAILABLE (BUSY) while jobs come back: what new jobs and budgets take could be theirs.
  absl::Status CheckAllBack() const ABSL_SHARED_LOCKS_REQUIRED(mu);
  void Lose(const std::string& name, const JobEntry& stored, const absl::Status& cause, uint64_t log_bytes = 0);
  // After a drop that failed midway: keeps the name taken, or a new job of the name would get what the catalog still
  // has.
  void KeepForDrop(const std::string& name, const Entry& entry, const v1::Epoch& promised, const absl::Status& cause);
  // Frees what a lost job has on the disk, once the catalog has forgotten the job.
  void FreeLost(const Entry& entry, const std::vector<storage::DurableChunk>& chunks);
  std::shared_ptr<Job> MakeJob(const std::string& name);
  MayGrow GrowthCheck();
  // Names and tiers of all jobs. Takes no lock of theirs.
  std::vector<v1::JobStatus> Taken() const;
  absl::Status LostToDurabilityNone(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<Job>> Find(const std::string& name) const;
  bool full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);  // all places are taken
  // RESOURCE_EXHAUSTED (BUDGET) if the server is full.
  absl::StatusOr<std::shared_ptr<Job>> FindOrMake(const std::string& name);
  // A job of no name that is never promised, for dry runs of names that no job has.
  absl::StatusOr<std::shared_ptr<Job>> Planner(const std::string& name);
  // Forgets job `name` as a drop would, if the job was never opened and its newest promise is `promised`; README.md
  // says why the promise may be forgotten. On the executor `forgetting`, which all jobs share: waits for no job's lock.
  // Returns whether the job was forgotten.
  bool Forget(const std::string& name, const v1::Epoch& promised);
  // Could Forget find such a job? Asks neither disk nor catalog.
  bool MayForget(const std::string& name, const v1::Epoch& promised) const;
  // On a full server: forgets the job that was made first, of those that were never opened. True if it forgets none,
  // and one whose lock is taken may be such a job: a later try tells.
  bool ForgetOldest();
  // Wraps `reply`: after a final error, the job of a group that gives up is forgotten first.
  template <typename Response>
  Reply<Response> ForgetAfterError(const std::string& name, const v1::Epoch& promised, Reply<Response> reply) {
    return [this, name, promised, reply = std::move(reply)](absl::StatusOr<Response> response) {
      const bool over = !response.ok() && !absl::IsUnavailable(response.status()) &&
                        !absl::IsDeadlineExceeded(response.status()) && !absl::IsCancelled(response.status());
      if (!over || !MayForget(name, promised) || !forgetting->Prepare().ok()) return reply(std::move(response));
      forgetting->Post([this, name, promised, reply, response = std::move(response)] {
        Forget(name, promised);
        reply(response);
      });
    };
  }
  // Checks the request and takes its job out of `jobs`.
  absl::StatusOr<Entry> TakeForDrop(const v1::DropJobRequest& request);
  absl::StatusOr<v1::DropJobResponse> Drop(const v1::DropJobRequest& request);
  absl::StatusOr<v1::SetBudgetResponse> SetBudget(const v1::SetBudgetRequest& request);
  // Erases what a job that was stopped and taken out of `jobs` has on the disk and in memory.
  absl::Status Erase(const std::string& name, Entry entry);
  std::vector<v1::TierStatus> TierStatuses(const std::vector<v1::JobStatus>& jobs) const;

  // Wraps `reply`, so that the call's latency and its error are counted.
  template <typename Response>
  Reply<Response> Counted(Call call, Reply<Response> reply) {
    return [this, call, began = absl::Now(), reply = std::move(reply)](absl::StatusOr<Response> response) {
      counters.calls[static_cast<size_t>(call)].Observe(absl::Now() - began);
      if (!response.ok()) {
        const std::string reason = model::ReasonOf(response.status());
        counters.errors.Add(call, reason.empty() ? absl::StatusCodeToString(response.status().code()) : reason);
      }
      reply(std::move(response));
    };
  }

  const StateServerOptions options;
  Foundation* const foundation;
  const absl::Time started = absl::Now();
  std::string server_id;
  uint64_t disk = 0;  // Member.disk
  ServerCounters counters;
  // Requests and pushes that may wait.
  struct {
    SharedBound requests, request_bytes, push_bytes;
  } bounds;
  AnswerRoom answer_room;
  ImportPace import_pace;
  std::unique_ptr<storage::Catalog> catalog;
  std::unique_ptr<storage::Tiers> tiers;
  std::optional<storage::MachineProfile> machine;
  JobsComingBack coming_back;
  absl::Mutex planning;  // as JobSurroundings says
  MoveGate moving;
  kernels::ThreadPool compute;
  AnswerQueues answers;
  const std::unique_ptr<Executor> forgetting;  // of jobs that nothing runs for
  Deadlines deadlines;
  OperatorCalls drops;           // each waits for the running update of its job
  OperatorCalls budget_changes;  // in turn; each waits for a chunk that moves

  // The jobs that are served, in an order independent of hashes.
  std::map<std::string, std::shared_ptr<Job>> JobsByName() const;

  mutable absl::Mutex mu;
  bool stopped ABSL_GUARDED_BY(mu) = false;
  absl::flat_hash_map<std::string, Entry> jobs ABSL_GUARDED_BY(mu);
  uint64_t next_made ABSL_GUARDED_BY(mu) = 0;
  std::shared_ptr<Job> planner ABSL_GUARDED_BY(mu);
  std::set<std::string> dropping_names ABSL_GUARDED_BY(mu);
};

}  // namespace ballast::services
