// Estimates the memory that a job takes of servers and trainers, and the time of a step. Asks a state server for its
// plan with a dry-run Open, which takes no space.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

struct EstimateRequest {
  v1::JobSpec spec;           // with its tensors
  uint32_t ranks = 1;         // trainers
  uint32_t servers = 1;       // identical, of equal weights
  StateServerOptions server;  // of each server; its data_directory is not used
};

// Bytes of a trainer's memory.
struct TrainerBytes {
  uint64_t parameters = 0;
  uint64_t gradients = 0;
  uint64_t optimizer = 0;
  uint64_t all() const { return parameters + gradients + optimizer; }
};

struct Estimate {
  uint64_t parameters = 0;
  uint64_t server_parameters = 0;   // on the server with most
  uint64_t largest_unit_bytes = 0;  // working parameters that a rank gathers for it, if parameters are sharded
  // The answer of the server with most parameters, if the job fits. Otherwise `fits` says what is short and what to
  // change.
  absl::Status fits;
  v1::OpenResponse server;
  // With state on servers: parameters whole in each rank (DDP), and sharded (FSDP2).
  TrainerBytes whole, sharded;
  // Without Ballast: by ZeRO stage 0 to 3, Rajbhandari et al. 2020, section 3 (with this job's dtypes and moments).
  TrainerBytes zero[4];

  // For people: a table and a paragraph.
  std::string Explain(const EstimateRequest& request) const;
};

// Starts a state server in a temporary directory and removes the directory afterwards. INVALID_ARGUMENT for a spec that
// no server would take, or for too many ranks or servers; otherwise the errors of the server's start.
absl::StatusOr<Estimate> EstimateJob(const EstimateRequest& request);

}  // namespace ballast::services
