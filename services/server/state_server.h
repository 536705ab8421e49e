// A state server without a network: jobs, their step machines and chunks, and the threads that apply decided steps.
// services/gateway puts the server on the wire, or into a trainer's process.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/proto/base/shared_message.h"
#include "ballast/services/counters/job_counters.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/exported_chunk.h"
#include "ballast/services/threads/pushed_bytes.h"
#include "ballast/services/threads/reply.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/tier/gpu_counters.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class ChunkSource;
class Foundation;
class Scrubber;

inline constexpr char kMachineProfile[] = "ballast-profile.yaml";

struct StateServerOptions {
  std::string data_directory;
  storage::TierBytes budget;
  // Directories for NVMe state on disks of their own, with their parts of budget.nvme; the data directory may be among
  // them. Empty: the data directory has all of it. Logs are in the data directory in any case.
  std::vector<storage::NvmeDevice> nvme_devices;
  std::string server_id;  // empty: made at first start, kept in the data directory
  int hbm_device = 0;
  int compute_threads = 1;     // for one update, its job's own included; ballastd's default is all processors
  int read_threads = 1;        // of each job for reads from the disk
  int answer_threads = 0;      // for answers to pulls that have waited, of all jobs in turn; 0: half of the processors
  uint64_t staging_bytes = 0;  // 0 lets StagingBytes choose
  // False for a server in its trainer's process: the trainer's parameters are then the only working parameters. Updates
  // write them where they are lent; pulls round the master. Nothing on the disk depends on this option.
  bool working_copies = true;
  // Steps of gradients that logs of durable jobs hold. 0: by how long steps wait for flushes (journal/log_length.h).
  uint64_t log_steps = 0;
  // Rate at which the server reads the states on its disk, to find rot early (job/scrub.h). 0: no scrub, except for
  // ScrubNext.
  uint64_t scrub_bytes_per_s = 0;
  // Where jobs copy chunks from that they lack (threads/chunk_source.h), and the rate in bytes a second, of all jobs
  // together (job_state/import_pace.h); 0: no bound. Borrowed; null: such chunks stay missing.
  ChunkSource* chunk_source = nullptr;
  uint64_t import_bytes_per_s = uint64_t{256} << 20;
  // Profile that `ballastctl iotune` wrote, for predictions of a step's time. Empty: kMachineProfile in the data
  // directory, if present.
  std::string machine_profile;
  // Bounds that the jobs share (SharedBound); one job may hold half of each. They bound the requests that wait at a
  // time, the bytes of these (with payloads only while a push waits for its job's lock), and the payloads of pushes
  // that wait later. These payloads are memory beyond every budget. Requests beyond a bound are BUSY.
  uint64_t waiting_requests_max = 65536;
  uint64_t waiting_request_bytes_max = uint64_t{128} << 20;
  uint64_t waiting_push_bytes_max = uint64_t{128} << 20;
  // Answers to pulls that have not been sent; beyond the bound pulls wait. Clients bound theirs to 64 MiB.
  uint64_t answer_bytes_max = uint64_t{128} << 20;
  std::string page;  // host:port of this server's status page, told to trainers and through them to peers; empty: none
  // Called between pieces of the work while the server starts, on several threads. An error ends Start, which returns
  // the error, and the next start finds the jobs as this start did. As long as the server lives, long work of a job and
  // pulls from the disk call it, too. An error then refuses the pull, or ends the work and fails the job until a
  // restart.
  std::function<absl::Status()> interrupt;
  // As MayGrow (job_state/surroundings.h). `taken` tells what the server's jobs take at this moment: names and tiers
  // alone. Empty: jobs grow as the budgets allow.
  std::function<absl::StatusOr<std::shared_ptr<void>>(const std::string& job, const storage::TierBytes& more,
                                                      const std::function<std::vector<v1::JobStatus>()>& taken)>
      may_grow;
  // Called by Start once the server knows its id and Member.disk, before its jobs come back: an error ends Start, which
  // returns the error. May be empty.
  std::function<absl::Status(const std::string& server_id, uint64_t disk)> named;
  // If true, Start returns once the server knows its jobs. They come back on a thread, in the order of their names, and
  // the server serves each job once it is back. Calls of a job that is not back yet, and of new jobs until all are, are
  // UNAVAILABLE (BUSY).
  bool serve_while_recovering = false;
  RecoveryProgress* progress = nullptr;  // borrowed; Start says here how far it is; may be null
  Foundation* foundation = nullptr;      // null: this machine
};

// Bytes of the DRAM budget that a server with these options takes as staging, once per job with state on NVMe.
uint64_t StagingBytes(const StateServerOptions& options);

// Plain figures of a server at one moment.
struct ServerFigures {
  struct Bound {
    uint64_t used = 0, max = 0;
  };
  std::map<std::string, std::shared_ptr<const JobCounters>> jobs;  // those that are served
  Bound waiting_requests, waiting_request_bytes, waiting_push_bytes, unsent_bytes, job_places;
  Bound file_system_bytes;  // of the data directory; what others use counts as used
  storage::MovedBytes moved = {};
  std::vector<storage::TierUsage::Device> nvme_devices;  // the data directory first
  const storage::GpuCounters* gpu = nullptr;             // the server's; null without HBM
  bool memory_locked = false;
  int compute_threads = 0;
  double compute_busy_seconds = 0;
};

// Plain counters since start; services/monitoring turns them into Prometheus families.
struct ServerCounters;

// Threads: any. Every call replies exactly once, on the caller's thread or a thread of the server; replies must not
// block. When its deadline passes, a call replies DEADLINE_EXCEEDED, and CANCELLED once its client is
// gone; work that the call has begun is not undone.
class StateServer {
 public:
  // Errors: those of `interrupt`; INVALID_ARGUMENT (BAD_CONFIG), also for a machine profile that was named and cannot
  // be read; INTERNAL (IO) if the data directory is not writable; FAILED_PRECONDITION, naming the process, if another
  // process has the data directory; FAILED_PRECONDITION (LATER_VERSION) if a later version has used the directory,
  // which is not touched; DATA_LOSS (IO) if the directory has logs or extents, but no catalog.
  static absl::StatusOr<std::unique_ptr<StateServer>> Start(const StateServerOptions& options);
  ~StateServer();  // as Stop
  // Waits until every job is back, or refused. An error says why the rest of the start failed, with Start's errors; end
  // the server then.
  absl::Status AwaitRecovered();

  // Fails waiting and new requests with UNAVAILABLE (SERVER_DOWN), and finishes the step being applied. Blocks.
  void Stop();

  void Identify(const v1::IdentifyRequest&, Reply<v1::IdentifyResponse>);
  void GetJob(const v1::GetJobRequest&, Reply<v1::GetJobResponse>);
  void Fence(const v1::FenceRequest&, const CallLimit& limit, Reply<v1::FenceResponse>);
  void Open(const v1::OpenRequest&, const CallLimit& limit, Reply<v1::OpenResponse>);
  // For an Open that the caller refuses: answers `refusal`, as Open answers an error. If the group gives up, the server
  // forgets its job first.
  void RefuseOpen(const v1::OpenRequest&, const absl::Status& refusal, Reply<v1::OpenResponse>);
  void Norm(const v1::NormRequest&, Reply<v1::NormResponse>);
  // All ranks get the same message.
  void Seal(const v1::SealRequest&, const CallLimit& limit, Reply<model::SealAnswer>);
  void Commit(const v1::CommitRequest&, Reply<v1::CommitResponse>);
  void Pin(const v1::PinRequest&, const CallLimit& limit, Reply<v1::PinResponse>);
  void Unpin(const v1::UnpinRequest&, Reply<v1::UnpinResponse>, std::shared_ptr<Caller> caller = nullptr);
  // `payload` is borrowed until the reply. With kNone the header has no CRC32C: a slice that the attempt has is then
  // taken to be the same. `lent`, from a trainer in this process, keeps the payload, which is one piece. If the slice
  // is a gradient that needs no log and has its chunk alone, and the server has no GPU, the server makes no copy: it
  // reads the payload until the step is applied.
  void Push(const v1::PushRequest& header, PushedBytes payload, const CallLimit& limit, Reply<v1::PushResponse> reply,
            Checksum checksum = Checksum::kCrc32c, std::shared_ptr<model::LentGradients> lent = nullptr);
  // The server calls `allocate` once the version and room for the answer are there: at most once, and not at all on
  // most errors. The reply carries the CRC32C of the bytes, or 0.
  void Pull(const v1::PullRequest&, const CallLimit& limit, Allocate allocate, Reply<uint32_t> reply,
            Checksum checksum = Checksum::kCrc32c);
  // For a trainer in this process: as Pull, but the answer says where the bytes lie, and their chunk's next update
  // waits for the lease. The answer is empty, and the bytes must be pulled, unless they are the current version's
  // working parameters and lie in DRAM.
  void Lease(const v1::PullRequest&, const CallLimit& limit, Reply<model::LeasedBytes> reply);
  // For another server of the job, which copies the chunk: its state between two steps, at version `least` or later.
  // Waits for that version, for room for the answer and for the job's worker. NOT_FOUND (UNKNOWN_JOB): no job of this
  // name and life; FAILED_PRECONDITION: (NOT_OPEN) this server lacks the chunk, (BEHIND) it has opened another spec;
  // INVALID_ARGUMENT (BAD_REQUEST): the chunk does not lie here; DATA_LOSS (CHECKSUM): its state here is damaged.
  void Export(const v1::ExportRequest&, const CallLimit& limit, Reply<ExportedChunk> reply);
  // Page-locked memory for answers to pulls. Empty if the server has no GPU: any memory is then as good.
  absl::StatusOr<storage::Arena> MapAnswers(uint64_t bytes) const;

  // For a server in the trainer's process, without working copies: the step's gradients, values and working parameters
  // stay in the trainer's memory. Lent gradients count as pushed by rank 0, the job's only rank. Blocks while norms are
  // computed. FAILED_PRECONDITION as for a push, or if memory is lent already. UNIMPLEMENTED (UNSUPPORTED) if the
  // server keeps working copies, if the job has more than one rank or server, or for gradients and values with
  // durability `step`.
  absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest& request);
  // Replies when all of the job's chunks, or only those of `unit`, show `version`; their state may still be on its way
  // to the disk.
  void AwaitApplied(const std::string& job, int64_t version, std::optional<uint32_t> unit, const CallLimit& limit,
                    Reply<v1::CommitResponse> reply);
  bool takes_loans() const;

  // Scrubs a piece of a job's state, for a caller that paces the scrub itself, unless an earlier piece is not read yet.
  void ScrubNext();

  v1::GetServerStatusResponse Status() const;
  // Replies Status() from a thread of its own, which may wait for a job's lock.
  void Look(Reply<v1::GetServerStatusResponse> reply);
  // Look as an operator's call, which is counted.
  void GetServerStatus(Reply<v1::GetServerStatusResponse>);
  // The last steps of jobs. Steps() is for /steps.json; GetSteps is an operator's call, which is counted. Unknown jobs
  // have no steps.
  v1::GetStepsResponse Steps(const v1::GetStepsRequest&) const;
  void GetSteps(const v1::GetStepsRequest&, Reply<v1::GetStepsResponse>);
  void DropJob(const v1::DropJobRequest&, Reply<v1::DropJobResponse>, const CallLimit& limit = absl::InfiniteFuture());
  // Sets budgets until the server ends; chunks of its jobs follow between steps. RESOURCE_EXHAUSTED (BUDGET), with
  // numbers, if a budget is below the bytes that cannot move, among them those that a drop under way still holds. Then
  // nothing has changed.
  void SetBudget(const v1::SetBudgetRequest&, Reply<v1::SetBudgetResponse>,
                 const CallLimit& limit = absl::InfiniteFuture());

  const std::string& server_id() const;
  uint64_t disk() const;              // Member.disk
  storage::TierBytes budget() const;  // now
  const ServerCounters& counters() const;
  // For metrics, in addition to Status() and counters().
  ServerFigures Figures() const;
  // Whether the catalog can be read and still takes writes, each within `patience`; waits for the disk at worst.
  absl::Status TryCatalog(absl::Duration patience) const;
  // Whether deadlines of requests still pass: within `patience`.
  absl::Status TryClock(absl::Duration patience) const;
  // Bytes read from and written to each tier since start.
  storage::TierTraffic traffic() const;

 private:
  struct Impl;
  StateServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  std::unique_ptr<Scrubber> scrubber_;
};

}  // namespace ballast::services
