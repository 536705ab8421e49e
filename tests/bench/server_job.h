// A job on a state server of this process, and its only trainer. The trainer calls the server directly, keeps pushes in
// flight up to a bound, and pushes the same small gradients of both signs in every step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/server/state_server.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::bench {

// Gradients for 64 chunks of 2^20 bf16 elements, more than a cache holds. Chunk i uses gradient i mod 64.
class ChunkGradients {
 public:
  static absl::StatusOr<std::shared_ptr<const ChunkGradients>> Make();
  absl::Span<const std::byte> Of(uint64_t chunk) const;
  uint32_t crc32c(uint64_t chunk) const { return digests_[chunk % digests_.size()]; }

 private:
  storage::Arena memory_;
  std::vector<uint32_t> digests_;
};

// Threads: one.
class ServerJob {
 public:
  static constexpr uint64_t kChunkElements = uint64_t{1} << 20;
  static constexpr char kName[] = "bench";

  struct Options {
    std::string directory;
    v1::Durability durability = v1::DURABILITY_STEP;
    uint64_t chunks = 0;  // all full, with their state in DRAM unless dram_bytes is short
    int threads = 1;      // threads of an update
    std::shared_ptr<const ChunkGradients> gradients;
    uint64_t dram_bytes = 0;  // budget; 0: no limit
  };
  // Options of a server for this job.
  static services::StateServerOptions ServerOptions(const Options& options);

  // Starts the server, opens the job and gives it its first values.
  static absl::StatusOr<std::unique_ptr<ServerJob>> Make(const Options& options);

  // Pushes the next step's gradients of chunks [0, chunks). Each push waits until the previous update has passed its
  // chunk. OK: the server has all of the gradients.
  absl::Status Push(uint64_t chunks);
  // Seals, decides and commits the step. The server applies the update in the background.
  absl::Status Commit();
  absl::Status Step();
  // Waits until the last step has been applied to every chunk.
  absl::Status Settle() const;

  int64_t committed() const { return step_ - 1; }
  services::StateServer& server() { return *server_; }

 private:
  explicit ServerJob(const Options& options) : options_(options) {}
  absl::Status Open();
  absl::Status Initialise();
  absl::Status PushSlices(v1::SliceKind kind, absl::Span<const uint32_t> slices);
  absl::Status Finish(const v1::StepHeader& header);

  const Options options_;
  std::unique_ptr<services::StateServer> server_;
  v1::JobSpec spec_;
  v1::Epoch epoch_;
  std::unique_ptr<model::EpochPlan> plan_;
  storage::Arena values_;  // of one chunk
  int64_t step_ = 0;       // the step in flight
};

}  // namespace ballast::bench
