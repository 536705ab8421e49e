// The chunks that an Open adds to a job on this server: their needs besides their own places, and the plan of these
// places.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/durability/job_journal.h"
#include "ballast/services/durability/journal.h"
#include "ballast/services/job/job_core.h"
#include "ballast/services/job/slice_room.h"
#include "ballast/services/work/prediction.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/store/chunk_store.h"

namespace ballast::services {

// Indices of the chunks that the plan gives to `server_id`.
std::vector<uint64_t> ChunksOf(const model::EpochPlan& plan, absl::string_view server_id);

// Bytes of memory for an element of a slice: the gradient and 2 bytes beside it. A transaction of values alone, 4
// bytes, always fits.
uint64_t SliceBytesPerElement(const kernels::OptimizerSpec& optimizer);

// The largest slices of a job: whole chunks, aligned as the disk wants them.
struct LargestSlices {
  LargestSlices(const v1::JobSpec& spec, const kernels::OptimizerSpec& optimizer);
  uint64_t values_bytes = 0;
  uint64_t gradient_bytes = 0;
};

struct NewChunks {
  v1::JobSpec spec;
  kernels::OptimizerSpec optimizer;
  std::vector<uint64_t> ids;            // in the layout
  std::vector<uint64_t> elements;       // same order
  std::vector<storage::Frozen> frozen;  // same order
  // Elements that take room in the log, or in the spill.
  struct Logged {
    std::vector<uint64_t> trained;
    std::vector<uint64_t> frozen;  // no gradients, values alone
    std::vector<uint64_t>* Of(const model::Chunk& chunk) {
      return chunk.frozen == v1::FROZEN_UNSPECIFIED ? &trained : &frozen;
    }
  };
  Logged all;  // by chunk, also of the existing chunks
  // By slice: those that will, or may, be read back; sizes the spill of a job without a log.
  Logged spilt;
  uint64_t shared_elements = 0;  // of `elements`, trained, in chunks of more than one slice
  // Dry run: further bytes for the job's present chunks, by this epoch's tiling.
  struct Retiled {
    uint64_t slice_bytes = 0;    // of DRAM
    uint64_t journal_bytes = 0;  // of NVMe, for the log or the spill; if chunks are new, their plan counts a log
  };
  Retiled retiled;
  uint64_t snapshot_bytes = 0;  // SnapshotBytesMax with the new chunks
  uint64_t log_steps = 0;       // of gradients, that a log holds
  uint64_t log_steps_max = 0;   // as many once it has become longer
  bool dry_run = false;

  void AddSpilt(const model::EpochPlan& plan, uint64_t chunk);
  // Memory for slices, if they are read back from the log.
  storage::PlanRequest::ReadBack read_back() const;
  // Size of the log, or of the spill. `segment_bytes`: of the existing file's segments; 0 without a file.
  JournalSize journal_size(uint64_t segment_bytes) const;
  // A sentence for people: the disk that the log of these chunks takes.
  std::string ExplainLog() const;
  bool logged() const { return spec.durability() == v1::DURABILITY_STEP; }
  // Values of a frozen chunk come once, and need no memory beside the chunk's where there is a log.
  bool LogsValues(storage::Frozen of) const { return logged() && of != storage::Frozen::kNo; }
  // Does the job leave state on the disk for a restart?
  bool durable() const { return logged() || spec.durability() == v1::DURABILITY_EVERY_K; }
};

// Bytes held by a store that is not in use yet, and by the memory for its slices.
storage::TierBytes TakenBy(const storage::ChunkStore& store, const SliceMemory& memory);

// Plans places for new chunks: makes the request from the budgets and from what the job has, and gives an account of
// the plan. Takes nothing. Threads: the worker, or the thread that recovers; the clerk, for a dry run that asks no
// store of the job.
class ChunkPlans {
 public:
  ChunkPlans(JobCore* core, const JobJournal* journal, const SliceRoom* room, Prediction* prediction)
      : core_(core), journal_(journal), room_(room), prediction_(prediction) {}

  // The request for a plan of the chunks that are missing from the store. `returned`: bytes that a real Open gives back
  // first. The free space is the ledger's at this moment, and may be taken by others unless the caller holds the lock
  // `planning`.
  storage::PlanRequest RequestFor(const NewChunks& wanted, const storage::ChunkStore& store,
                                  const std::vector<storage::ChunkToAdd>& missing,
                                  const storage::TierBytes& returned) const ABSL_LOCKS_EXCLUDED(job_lock);
  // Logs the plan and keeps its prediction, or fills the plan in as a dry run's answer.
  void Note(const NewChunks& wanted, const storage::Plan& plan, const storage::PlanRequest& request,
            v1::OpenResponse* answer) ABSL_LOCKS_EXCLUDED(job_lock);
  // A dry run's answer where the job has all chunks.
  static void NoteHeld(const NewChunks& wanted, v1::OpenResponse* answer);

 private:
  JobCore* const core_;
  const JobJournal* const journal_;
  const SliceRoom* const room_;
  Prediction* const prediction_;
};

}  // namespace ballast::services
