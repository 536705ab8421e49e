// What the files of class Job share.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/services/job.h"

namespace ballast::services {

// An Open whose chunks are being taken.
struct Job::Opening {
  std::string request;  // serialised: another Open of the same epoch waits
  bool done = false;
  absl::Status status;
  v1::OpenResponse answer;  // to a dry run
  bool adopted = false;
  std::vector<std::shared_ptr<HeldChunk>> chunks;  // of the new plan, registration order
};

// One failed write ends all of the server's.
inline constexpr char kCatalogRemedy[] =
    "The server's catalog takes no more writes: look after the data directory's disk (is it full?), then restart the "
    "server";

// One decided step, as the update stage needs it.
struct Job::StepWork {
  int64_t step = 0;
  std::vector<storage::ChunkUpdate> updates;
  std::vector<std::shared_ptr<HeldChunk>> touched;    // of updates, same order
  std::vector<std::shared_ptr<HeldChunk>> untouched;  // get the version and nothing else
  std::vector<Intake::Buffers> buffers;               // per update, what its spans borrow from
  // For what updates have in the log; null if that is nothing.
  std::shared_ptr<ProvisionalMemory::Buffer> read_back;
  std::shared_ptr<void> lent;  // while updates may touch a trainer's memory
  absl::Status incomplete;     // of a replay: some slice was not in the log
};

// Chunks that an Open adds.
struct Job::NewChunks {
  v1::JobSpec spec;
  kernels::OptimizerSpec optimizer;
  std::vector<uint64_t> ids;           // in the layout
  std::vector<uint64_t> elements;      // same order
  std::vector<uint64_t> all_elements;  // of the chunks that there are already, too
  // Elements of slices that will be read back, or may; to be known where there is no log.
  std::vector<uint64_t> spilt_slices;
  void AddSpilt(const model::EpochPlan& plan, uint64_t chunk);
  uint64_t shared_elements = 0;  // of `elements`, in chunks of more than one slice
  uint64_t snapshot_bytes = 0;   // SnapshotBytesMax, once they are there
  bool dry_run = false;
  // What slices take of memory if they are read back from the log.
  storage::PlanRequest::ReadBack read_back() const;
  bool logged() const { return spec.durability() == v1::DURABILITY_STEP; }
  // Something of it is on the disk for the time after a restart.
  bool durable() const { return logged() || spec.durability() == v1::DURABILITY_EVERY_K; }
};

// Chunks that are not where new budgets want them; of the job's lock.
struct Job::Moves {
  std::shared_ptr<storage::ChunkStore> store;
  // By TierKind, where to; the store's indices.
  std::array<std::deque<uint64_t>, storage::kTierKinds> to;
  std::deque<uint64_t>& To(storage::TierKind tier) { return to[static_cast<size_t>(tier)]; }
  uint64_t left() const { return to[0].size() + to[1].size() + to[2].size(); }
  bool posted = false;  // a batch is queued
  bool said_stalled = false;
  uint64_t moved = 0;
  absl::Time began = absl::Now();
};

v1::StepPrediction PredictionMessage(const storage::StepPrediction& prediction);

// Indices of the chunks that the plan gives to `server_id`.
std::vector<uint64_t> ChunksOf(const model::EpochPlan& plan, absl::string_view server_id);

}  // namespace ballast::services
