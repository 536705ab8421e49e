// What the files of class Job share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ballast/services/job.h"

namespace ballast::services {

// An Open whose chunks are being taken.
struct Job::Opening {
  std::string request;  // serialised: another Open of the same epoch waits
  bool done = false;
  absl::Status status;
  bool adopted = false;
  std::vector<std::shared_ptr<HeldChunk>> chunks;  // of the new plan, registration order
};

// Indices of the chunks that the plan gives to `server_id`.
std::vector<uint64_t> ChunksOf(const model::EpochPlan& plan, absl::string_view server_id);

}  // namespace ballast::services
