// A whole job in one process: real state servers, ranks as threads, the example's model and training loop.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/examples/bytes_lm/corpus.h"
#include "ballast/client/examples/trainer.h"
#include "ballast/client/session.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast {

enum class Placement { kDram, kNvme, kMixed };
enum class Wire { kGrpc, kShared, kEmbedded };  // kShared: gRPC, and slices in memory shared with the servers

// A model of about 25 chunks, small enough to train a few steps in a second.
client::TrainerOptions SmallTrainer(kernels::OptimizerKind kind = kernels::OptimizerKind::kAdamw);
inline constexpr uint64_t kChunkElements = uint64_t{1} << 16;

// State servers "s0", "s1", ..., each in its own directory, with budgets that force `placement`.
class Cluster {
 public:
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(int servers, Placement placement, Wire wire,
                                                        const kernels::OptimizerSpec& optimizer = {});
  std::vector<std::unique_ptr<client::Transport>> Connect() const;
  // Bytes of state in DRAM and on NVMe, over all servers.
  storage::TierBytes StateBytes() const;
  // Bytes of slices that went through shared memory, over all servers.
  uint64_t SharedBytes() const;

 private:
  struct Server {
    ScratchDirectory directory;
    std::unique_ptr<services::StateServer> state;
    std::unique_ptr<services::RpcServer> rpc;
  };
  Wire wire_ = Wire::kGrpc;
  std::deque<Server> servers_;
};

// Trains until step `end` with `world_size` ranks and returns the CRC32C of all master weights.
absl::StatusOr<uint32_t> TrainOnServers(const Cluster& cluster, const client::Corpus& corpus, int world_size,
                                        int64_t end, client::Resume resume,
                                        const kernels::OptimizerSpec& optimizer = {});
// The same training and CRC32C without servers.
absl::StatusOr<uint32_t> TrainLocally(const client::Corpus& corpus, int threads, int64_t end,
                                      const kernels::OptimizerSpec& optimizer = {});

}  // namespace ballast
