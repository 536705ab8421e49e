// A trainer group in miniature, for tests: all ranks in one object, direct calls to state servers, no retries.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/members.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/answer.h"

namespace ballast::services {

// Tensor name, unit, elements, group, what servers keep of it, who computes its updates.
struct TestTensor {
  std::string name;
  std::string unit;
  uint64_t elements;
  uint32_t group;
  v1::Frozen frozen = v1::FROZEN_UNSPECIFIED;
  v1::Assist assist = v1::ASSIST_UNSPECIFIED;
};

// Two units, two groups, several chunks of 2^16 elements, padding inside and at ends.
std::vector<TestTensor> SmallModel();
v1::JobSpec MakeSpec(const std::string& job, const std::vector<TestTensor>& tensors);
void Append(const std::vector<TestTensor>& tensors, int64_t version, v1::JobSpec* spec);
v1::StepHeader UpdateHeader(uint32_t tensors);
v1::StepHeader ValuesHeader(uint32_t tensors);
std::string AllTensors(uint32_t tensors);

// Value of an element of a tensor.
using Fill = std::function<float(uint32_t tensor, uint64_t element)>;
inline float Ones(uint32_t, uint64_t) { return 1.0f; }

class TrainerGroup {
 public:
  TrainerGroup(std::vector<StateServer*> servers, v1::JobSpec spec, uint32_t world_size, uint64_t epoch_counter = 1);

  // Fences all servers, resolves the answers, and opens.
  absl::Status Start();
  absl::Status Fence(std::vector<v1::GetJobResponse>* answers);
  // The group's own next epoch, which Fence and OpenWith are to follow. Attempt and seals' step stay.
  void BeginEpoch(uint64_t counter) { epoch_.set_counter(counter); }
  absl::Status Open(int64_t base, const std::optional<v1::Decision>& decision);
  // After Fence, for a job with copies: opens on `members`, those of `table` in its order, at what model::FindBase
  // found in the answers.
  absl::Status OpenWith(const v1::Table& table, std::vector<StateServer*> members, const model::Found& found);
  v1::OpenRequest open_request(int64_t base, const std::optional<v1::Decision>& decision) const;

  // Pushes every slice of `kind` that touches a tensor in `presence`.
  absl::Status PushAll(v1::SliceKind kind, const std::string& presence, const Fill& fill);
  // Pushes a single slice, to all servers that have its chunk, and waits for the answers.
  absl::Status PushSlice(uint32_t slice, v1::SliceKind kind, const Fill& fill);
  Answer<v1::PushResponse> BeginPushSlice(uint32_t slice, v1::SliceKind kind, const Fill& fill);
  Answer<v1::PushResponse> BeginPushSlice(uint32_t slice, v1::SliceKind kind, const Fill& fill, StateServer* server);
  v1::PushRequest PushHeader(uint32_t slice, v1::SliceKind kind, const std::string& payload) const;
  std::string Payload(uint32_t slice, v1::SliceKind kind, const Fill& fill) const;

  v1::SealRequest SealOf(uint32_t rank, const v1::StepHeader& header, uint32_t wait_ms) const;
  // Seals on all servers for all ranks, decides and commits.
  absl::StatusOr<v1::Decision> Finish(const v1::StepHeader& header);
  absl::StatusOr<std::vector<v1::PreparedRecord>> SealAll(const v1::StepHeader& header);
  absl::Status Commit(const v1::Decision& decision);
  // Runs transaction 0: pushes all values and commits.
  absl::Status Initialise(const Fill& fill);

  // Pulls a whole tensor from the servers of its chunks. Working parameters are widened to fp32.
  absl::StatusOr<std::vector<float>> Read(uint32_t tensor, v1::Content content, int64_t version);
  // Pulls a range within a chunk.
  Answer<uint32_t> Pull(StateServer* server, const v1::PullRequest& request, absl::Time deadline,
                        std::string* to) const;

  const model::EpochPlan& plan() const { return *plan_; }
  StateServer* server_of(uint64_t chunk) const { return servers_[plan_->holders_of(chunk)[0]]; }
  const v1::Epoch& epoch() const { return epoch_; }
  int64_t step() const { return step_; }
  // If Start found lost state: the version that step() has to restore.
  std::optional<int64_t> restores() const { return restores_; }
  // Digests of copies that servers told with the last step, by server id.
  const std::map<std::string, google::protobuf::RepeatedPtrField<v1::ChunkDigest>>& told() const { return told_; }
  // The trainers are in the servers' process: pushes have no checksums.
  void set_within_process() { checksum_ = Checksum::kNone; }
  void set_attempt(uint64_t attempt) { attempt_ = attempt; }
  // Replaces server i, for instance after its restart. The group goes on at its epoch.
  void set_server(size_t i, StateServer* server) { servers_[i] = server; }
  void set_servers(std::vector<StateServer*> servers) { servers_ = std::move(servers); }
  v1::JobSpec& spec() { return spec_; }

 private:
  std::vector<StateServer*> servers_;
  std::optional<v1::Table> table_;
  std::map<std::string, bool> has_spec_;  // the server has an Open with it: with a table it gets brief ones
  std::vector<uint64_t> tensor_steps_;    // of the base, beside a table
  v1::JobSpec spec_;
  const uint32_t world_size_;
  v1::Epoch epoch_;
  std::string name_;  // the same in all epochs of the group
  int64_t step_ = 0;  // the step in flight
  std::optional<int64_t> restores_;
  std::map<std::string, google::protobuf::RepeatedPtrField<v1::ChunkDigest>> told_;
  uint64_t attempt_ = 0;
  Checksum checksum_ = Checksum::kCrc32c;
  std::unique_ptr<model::EpochPlan> plan_;
  // Payloads of pushes whose answers a test still awaits.
  std::vector<std::unique_ptr<std::string>> payloads_;
};

// Pins or unpins durably on a single server. Without `epoch` the request names no epoch.
absl::Status PinDurably(StateServer* server, const std::string& job, const std::optional<v1::Epoch>& epoch,
                        int64_t version);
absl::Status UnpinDurably(StateServer* server, const std::string& job, const std::optional<v1::Epoch>& epoch,
                          int64_t version);

// Waits until the server has applied all decided steps of the job, so that nobody takes the job's lock but whoever
// calls: a call that finds it taken for some milliseconds is looked at by another thread, some time after it was made.
void AwaitIdle(StateServer* server, const std::string& job);

// A server over its own scratch directory, removed with the object.
class TestServer {
 public:
  explicit TestServer(const std::string& id, storage::TierBytes budget = {0, uint64_t{64} << 20, 0});
  StateServer* get() { return server_.get(); }
  StateServer* operator->() { return server_.get(); }
  const std::string& directory() const { return directory_.path(); }
  void End();
  // Ends the server if running, and starts it again on the same directory.
  void Restart();
  StateServerOptions& options() { return options_; }

 private:
  ScratchDirectory directory_;
  StateServerOptions options_;
  std::unique_ptr<StateServer> server_;
};

}  // namespace ballast::services
