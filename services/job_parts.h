// Declarations shared by the files of class Job.
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
  std::string request;  // serialised; an Open with different bytes waits
  bool done = false;
  absl::Status status;
  v1::OpenResponse answer;  // to a dry run
  bool adopted = false;
  std::vector<std::shared_ptr<HeldChunk>> chunks;  // of the new plan, registration order
};

// After a failed write the catalog takes no more writes.
inline constexpr char kCatalogRemedy[] =
    "The server's catalog takes no more writes: look after the data directory's disk (is it full?), then restart the "
    "server";

// A decided step, as the job's thread applies it.
struct Job::StepWork {
  int64_t step = 0;
  std::vector<storage::ChunkUpdate> updates;
  std::vector<std::shared_ptr<HeldChunk>> touched;    // of `updates`, in the same order
  std::vector<std::shared_ptr<HeldChunk>> untouched;  // get the new version, unchanged
  std::vector<Intake::Buffers> buffers;               // per update: its spans borrow from them
  // Updates read slices from the log into this buffer; null if there are none to read.
  std::shared_ptr<SliceMemory::Buffer> read_back;
  std::shared_ptr<void> lent;  // while updates may touch a trainer's memory
  absl::Status incomplete;     // in a replay: an error if the log lacks a slice of the step
};

// Chunks that an Open adds.
struct Job::NewChunks {
  v1::JobSpec spec;
  kernels::OptimizerSpec optimizer;
  std::vector<uint64_t> ids;           // in the layout
  std::vector<uint64_t> elements;      // same order
  std::vector<uint64_t> all_elements;  // also of the existing chunks
  // Elements of slices that will, or may, be read back; sizes the spill of a job without a log.
  std::vector<uint64_t> spilt_slices;
  void AddSpilt(const model::EpochPlan& plan, uint64_t chunk);
  uint64_t shared_elements = 0;  // of `elements`, in chunks of more than one slice
  uint64_t snapshot_bytes = 0;   // SnapshotBytesMax with the new chunks
  bool dry_run = false;
  // Memory for slices, if they are read back from the log.
  storage::PlanRequest::ReadBack read_back() const;
  bool logged() const { return spec.durability() == v1::DURABILITY_STEP; }
  // Does the job leave state on the disk for a restart?
  bool durable() const { return logged() || spec.durability() == v1::DURABILITY_EVERY_K; }
};

// Chunks that are not where new budgets want them. Guarded by the job's lock.
struct Job::Moves {
  std::shared_ptr<storage::ChunkStore> store;
  // Indices in the store, by the TierKind of the target.
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
