// Sessions for tests: state servers in this process, ranks as threads.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ballast/client/collective/collective.h"
#include "ballast/client/session.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::client {

inline constexpr uint64_t kChunk = uint64_t{1} << 16;

class SessionFixture {
 public:
  // Servers "s0", "s1", ... with `dram_bytes` each.
  explicit SessionFixture(int servers = 2, uint64_t dram_bytes = uint64_t{64} << 20)
      : SessionFixture(std::vector<uint64_t>(static_cast<size_t>(servers), dram_bytes)) {}
  // One server per budget.
  explicit SessionFixture(const std::vector<uint64_t>& dram_bytes);

  std::vector<std::unique_ptr<Transport>> Connect() const;
  services::StateServer* server(int i) { return servers_[i].state.get(); }

  // Runs `rank` for each rank of a loopback group, each on its own thread. Returns the error of the lowest rank.
  static absl::Status RunRanks(int world_size, const std::function<absl::Status(Collective*)>& rank,
                               absl::Duration timeout = absl::Minutes(2));

  absl::StatusOr<std::unique_ptr<Session>> Open(Collective* collective, const SessionOptions& options,
                                                const std::vector<TensorSpec>& tensors) const {
    return Session::Open(options, tensors, Connect(), collective);
  }

 private:
  struct Server {
    ScratchDirectory directory;
    std::unique_ptr<services::StateServer> state;
  };
  std::deque<Server> servers_;
};

// Two units over several chunks: "embed" has two tensors in two groups, one with an alias; "layer" has three tensors.
std::vector<TensorSpec> TestTensors();
// The same tensors, cut into rows among ranks 0, 1, ... (FSDP2's Shard(0)), for Split::kPlaced.
std::vector<TensorSpec> InRows(std::vector<TensorSpec> tensors, int ranks);
SessionOptions TestOptions();
StepOptions TestStep(double learning_rate = 0.01);

// Deterministic values by tensor, element and step.
float InitialValue(absl::string_view tensor, uint64_t element);
float GradientValue(absl::string_view tensor, uint64_t element, int64_t step);

// Gradient of the owned ranges of `unit`, end to end. Elements of `absent` tensors are zero.
std::vector<bf16> OwnedGradient(const Session& session, uint32_t unit, int64_t step,
                                const std::vector<std::string>& absent = {});
absl::Status InitialiseAll(Session& session);
// Pushes every unit and steps.
absl::StatusOr<StepReport> TrainStep(Session& session, int64_t step, const StepOptions& options = TestStep());

// Expectations as statuses, for code on a rank's thread.
absl::Status Wrong(absl::string_view what);
absl::Status Expect(bool fact, absl::string_view what);
// OK if `status` has this reason and its message contains `text`.
absl::Status ExpectError(const absl::Status& status, absl::string_view reason, absl::string_view text);

// The same training by direct calls of the kernels, tensor by tensor.
class Reference {
 public:
  explicit Reference(const std::vector<TensorSpec>& tensors);
  // AdamW on all tensors but `absent`, with this factor.
  void Step(int64_t step, const StepOptions& options, const std::vector<std::string>& absent = {}, float factor = 1);

  struct State {
    uint32_t group = 0;
    uint64_t t = 0;
    std::vector<float> master, moment1, moment2;
    std::vector<bf16> working;
  };
  State& at(const std::string& tensor) { return states_.at(tensor); }
  void Add(const TensorSpec& tensor);
  // OK if the session's full state at `version` has these bits.
  absl::Status Compare(Session& session, int64_t version);

 private:
  std::map<std::string, State> states_;
};

}  // namespace ballast::client
