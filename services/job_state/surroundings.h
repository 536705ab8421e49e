// The surroundings that the jobs of a server share. All of them outlive every job.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/services/job_state/foundation.h"
#include "ballast/services/job_state/move_gate.h"
#include "ballast/services/threads/answer_room.h"
#include "ballast/services/threads/deadlines.h"
#include "ballast/services/threads/executor.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/placement/machine_profile.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

class ChunkSource;
class ImportPace;

// Asked before a job takes `more` space outside an Open (a longer log, a pin): a quota may refuse. Hold the lease until
// the bytes are taken. RESOURCE_EXHAUSTED with the numbers.
using MayGrow =
    std::function<absl::StatusOr<std::shared_ptr<void>>(const std::string& job, const storage::TierBytes& more)>;

struct JobSurroundings {
  std::string server_id;
  uint64_t disk = 0;  // Member.disk of this server
  storage::Catalog* catalog = nullptr;
  storage::Tiers* tiers = nullptr;
  Foundation* foundation = nullptr;
  kernels::ThreadPool* compute = nullptr;
  // The job's queues for replies to requests that have waited: pulls, and requests of the step machine, which must not
  // wait behind copies of pulls. Never for anything that may wait for a disk.
  Executor* answers = nullptr;
  Executor* step_answers = nullptr;
  int read_threads = 1;  // threads of each job for reads that may block for a disk
  Deadlines* deadlines = nullptr;
  ServerCounters* counters = nullptr;
  // Held while a job's Open plans with the free space and takes it, and while new budgets are planned. The Open may
  // wait for a disk; steps, pulls, fences and dry runs never take this lock.
  absl::Mutex* planning = nullptr;
  // A plan that needs space which moving chunks give back shuts this gate, then takes `planning`. It may wait for a
  // disk.
  MoveGate* moving = nullptr;
  const storage::MachineProfile* machine = nullptr;  // null: plans fill tiers in order and predict no times
  bool working_copies = true;
  uint64_t log_steps = 0;                   // as StateServerOptions::log_steps
  std::function<absl::Status()> interrupt;  // as StateServerOptions::interrupt
  RecoveryProgress* progress = nullptr;     // null: nobody asks
  WaitingBounds waiting;
  SharedBound* push_bytes = nullptr;  // payloads of pushes that wait
  AnswerRoom* answer_room = nullptr;
  ChunkSource* chunk_source = nullptr;  // null: chunks that the server lacks stay missing
  ImportPace* import_pace = nullptr;    // null: no bound
  MayGrow may_grow;                     // empty: nobody asks
  // This job's alone: all that it takes of the tiers.
  std::shared_ptr<storage::Account> account = std::make_shared<storage::Account>();
};

}  // namespace ballast::services
