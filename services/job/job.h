// A job on a server. For each verb of the API it has a method, or a part with the verb. The parts do the work; this
// class makes them in order. It is the host of the step machine, and the job's journal takes the machine's records.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/proto/model/layout.h"
#include "ballast/services/counters/job_counters.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/placement/rebalance.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class Exports;
class Loans;
class Pulls;
class Pushes;
class Seals;
struct JobSurroundings;

// A job's bytes of each tier, by part, for the status and for quotas.
std::vector<v1::TierStatus> DescribeTaken(const storage::PartBytes& taken);

class Job : public std::enable_shared_from_this<Job>, private StepHost {
 public:
  static std::shared_ptr<Job> Make(const std::string& name, const JobSurroundings& surroundings);
  ~Job() override;

  // After a restart, before any other call: takes back the promise that the catalog kept.
  absl::Status Replay(const PromiseRecord& promise);
  // As Replay, for a job with durability `step`: brings its chunks and its step machine back to where they were.
  // Blocks, and logs its progress. DATA_LOSS if durable data cannot be read. Chunks may then have been flushed at the
  // versions replayed so far; nothing else has changed, and the log stays.
  absl::Status Recover(const JobEntry& entry);
  // After all jobs of the server have recovered: makes room in the log for new records, if need be by extending the log
  // from budget that is still free. Blocks.
  absl::Status EndRecovery();
  // As Replay, for a job with durability every-K that had state: takes back its pins; the rest of the state is lost
  // (rule 14). DATA_LOSS if the catalog's entries do not suffice; RESOURCE_EXHAUSTED.
  absl::Status ComeBack(const JobEntry& entry);

  // As the methods of StateServer.
  void GetJob(bool with_open, Reply<v1::GetJobResponse> reply);
  void Fence(const v1::FenceRequest& request, const CallLimit& limit, Reply<v1::FenceResponse> reply);
  void Open(const v1::OpenRequest& request, const CallLimit& limit, Reply<v1::OpenResponse> reply);
  void Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply);
  void Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply);
  void Pin(const v1::PinRequest& request, const CallLimit& limit, Reply<v1::PinResponse> reply);
  void Unpin(const v1::UnpinRequest& request, std::shared_ptr<Caller> caller, Reply<v1::UnpinResponse> reply);
  void AwaitApplied(int64_t version, std::optional<uint32_t> unit, const CallLimit& limit,
                    Reply<v1::CommitResponse> reply);
  // These parts have the other verbs.
  Pushes& pushes();
  Pulls& pulls();
  Loans& loans();
  Exports& exports();
  Seals& seals();

  v1::JobStatus Status() const;
  // All that the job takes; the tiers count it. On any thread.
  const storage::Account& account() const;
  const JobCounters& counters() const;
  // As the methods of ChunkMoves.
  std::optional<storage::JobHolding> Holding() const;
  void MoveTo(const storage::Plan& plan, v1::JobMoves* answer);
  // Blocks while the job's lock is taken.
  v1::Epoch promised() const;
  // The newest promise if no epoch was opened since the server's start, and nobody is about to open one. Absent as
  // well, with `*locked` true, if the job's lock stays taken: somebody is at work on the job.
  std::optional<v1::Epoch> UnopenedPromise(bool* locked = nullptr) const;

  // Before the first request. RESOURCE_EXHAUSTED (LIMIT) if the system makes no threads for this job.
  // A job that only answers dry runs has one thread.
  absl::Status MakeThreads(bool dry_runs_alone = false);
  // Refuses waiting and new requests with `status`, finishes the running update, drops the updates queued behind it.
  // Blocks.
  void Stop(const absl::Status& status);
  // If UnopenedPromise() is `promised`: refuses requests with `status` from now on. Returns whether that is so. Call
  // Stop afterwards.
  bool RefuseIfUnopened(const v1::Epoch& promised, const absl::Status& status);
  // After Stop, for a dropped job: RemoveJournal deletes the log; Discard frees the extents once the catalog has
  // forgotten the job.
  absl::Status RemoveJournal();
  void Discard();
  // Has the worker read a piece of the job's states on the disk into `buffer` (job/scrub.h). `lease` lives until the
  // read is over.
  void ScrubNext(absl::Span<std::byte> buffer, std::shared_ptr<void> lease);
  // End of the last complete pass of the scrub; InfinitePast before the first.
  absl::Time last_scrubbed() const;

 private:
  Job(const std::string& name, const JobSurroundings& surroundings, std::function<void(uint64_t)> expire);
  bool Unopened() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // StepHost.
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) override;
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override;
  void Opened(std::shared_ptr<const model::EpochPlan> plan, const OpenChange& change) override;
  bool ChangesChunks() const override { return true; }
  bool KeepsSlices() const override { return true; }
  void TableDurable() override;
  void AddDigests(int64_t step, v1::SealResponse* answer) override;
  void PinDue(int64_t version) override;
  void PinChanged(const v1::PinnedVersion& pin) override;

  // Call when chunks may be missing, or may be imported from now on.
  void ResumeFilling() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  v1::StepInFlight DescribeStepInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  struct Parts;  // see job_parts.h
  const std::unique_ptr<Parts> parts_;
};

}  // namespace ballast::services
