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

// Bytes of memory per element of a slice: the gradient's and 2 more, but at least 4, so that a transaction of fp32
// values fits.
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
  // Elements of the slices that may be read back, by slice. They size the spill of a job without a log.
  Logged spilt;
  uint64_t shared_elements = 0;  // trained elements in chunks that have several slices
  uint64_t snapshot_bytes = 0;   // SnapshotBytesMax with the new chunks
  uint64_t log_steps = 0;        // steps of gradients that a new log holds
  uint64_t log_steps_max = 0;    // the most steps that it may grow to hold

  void AddSpilt(const model::EpochPlan& plan, uint64_t chunk);
  // Memory for slices, if they are read back from the log.
  storage::PlanRequest::ReadBack read_back() const;
  // Size of the log, or of the spill. `segment_bytes`: of the existing file's segments; 0 without a file.
  JournalSize journal_size(uint64_t segment_bytes) const;
  // A sentence for people: the disk that the log of these chunks takes.
  std::string ExplainLog() const;
  bool logged() const { return spec.durability() == v1::DURABILITY_STEP; }
  // Whether a frozen chunk's values go through the log. They come once, and then need no memory besides the chunk's.
  bool LogsValues(storage::StateForm of) const { return logged() && storage::IsFrozen(of); }
  // Whether the job leaves state on the disk for a restart.
  bool durable() const { return logged() || spec.durability() == v1::DURABILITY_EVERY_K; }
};

}  // namespace ballast::services
