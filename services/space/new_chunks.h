// The chunks that an Open adds to a job on this server, and their needs besides their own places.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/journal_size.h"
#include "ballast/storage/placement/placement.h"

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
  v1::JobSpec spec;  // name, chunk_elements, durability and pin_interval alone
  kernels::OptimizerSpec optimizer;
  std::vector<uint64_t> ids;              // in the layout
  std::vector<uint64_t> elements;         // same order
  std::vector<storage::StateForm> forms;  // same order
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
  uint64_t snapshot_bytes = 0;   // SnapshotBytesMax with the new chunks
  uint64_t log_steps = 0;        // of gradients, that a log holds
  uint64_t log_steps_max = 0;    // as many once it has become longer

  void AddSpilt(const model::EpochPlan& plan, uint64_t chunk);
  // Memory for slices, if they are read back from the log.
  storage::PlanRequest::ReadBack read_back() const;
  // Size of the log, or of the spill. `segment_bytes`: of the existing file's segments; 0 without a file.
  JournalSize journal_size(uint64_t segment_bytes) const;
  // A sentence for people: the disk that the log of these chunks takes.
  std::string ExplainLog() const;
  bool logged() const { return spec.durability() == v1::DURABILITY_STEP; }
  // Values of a frozen chunk come once, and need no memory beside the chunk's where there is a log.
  bool LogsValues(storage::StateForm of) const { return logged() && storage::IsFrozen(of); }
  // Does the job leave state on the disk for a restart?
  bool durable() const { return logged() || spec.durability() == v1::DURABILITY_EVERY_K; }
};

}  // namespace ballast::services
