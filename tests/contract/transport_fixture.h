// A state server behind a transport of either kind, and a job on the server.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast {

// kShared: gRPC for control, and memory that both sides map for slices of 64 KiB and more.
enum class Wire { kGrpc, kShared, kEmbedded };
inline constexpr char kJob[] = "contract";

inline absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

template <typename T>
absl::Span<const std::byte> BytesOf(const std::vector<T>& values) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T));
}

class TransportContract : public ::testing::TestWithParam<Wire> {
 protected:
  void SetUp() override {
    services::StateServerOptions server;
    server.data_directory = directory_.path();
    server.server_id = "s0";
    server.budget.dram = uint64_t{128} << 20;
    auto state = services::StateServer::Start(server);
    ASSERT_TRUE(state.ok()) << state.status();
    state_ = *std::move(state);
    if (GetParam() != Wire::kEmbedded) {
      services::RpcServerOptions options;
      if (GetParam() == Wire::kGrpc) options.shared_memory_bytes = 0;
      auto rpc = services::RpcServer::Start(options, state_.get());
      ASSERT_TRUE(rpc.ok()) << rpc.status();
      rpc_ = *std::move(rpc);
    }
    transport_ = Connect();
    // Connecting may take long on a busy machine, so wait for the connection here.
    v1::GetJobRequest ask;
    ask.set_job(kJob);
    for (int i = 0; i < 10 && absl::IsUnavailable(Call(&client::Transport::GetJob, ask).status()); ++i) {
    }
    if (GetParam() == Wire::kShared) {
      // A hand-over that takes longer than some seconds is given up.
      v1::IdentifyRequest share;
      share.set_shares_memory(true);
      for (int i = 0; i < 10 && shared().mapped_bytes == 0; ++i) {
        ASSERT_EQ(Call(&client::Transport::Identify, share).status(), absl::OkStatus());
      }
      ASSERT_GT(shared().mapped_bytes, 0u) << rpc_->shared_memory_status();
    }
  }

  void TearDown() override {
    transport_.reset();
    rpc_.reset();
    state_.reset();
  }

  std::unique_ptr<client::Transport> Connect() const {
    auto transport = GetParam() == Wire::kEmbedded ? services::MakeEmbeddedTransport(state_.get())
                                                   : client::MakeGrpcTransport(rpc_->address());
    transport->MeanFor(model::TargetOf(state_->server_id(), state_->disk()));
    return transport;
  }

  const services::SharedMemoryCounters& shared() const { return *state_->counters().shared_memory; }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(void (client::Transport::*method)(const Request&, absl::Time,
                                                                  client::Callback<Response>),
                                const Request& request, absl::Time deadline = Soon()) {
    absl::Notification done;
    absl::StatusOr<Response> result = absl::UnknownError("no answer");
    (transport_.get()->*method)(request, deadline, [&](absl::StatusOr<Response> answer) {
      result = std::move(answer);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::Status Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline = Soon()) {
    absl::Notification done;
    absl::Status result;
    transport_->Push(header, payload, deadline, [&](absl::StatusOr<v1::PushResponse> answer) {
      result = answer.status();
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  absl::Status Pull(const v1::PullRequest& request, absl::Span<std::byte> to, absl::Time deadline = Soon()) {
    absl::Notification done;
    absl::Status result;
    transport_->Pull(request, to, deadline, [&](absl::Status status) {
      result = std::move(status);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }

  template <typename T>
  absl::StatusOr<std::vector<T>> PullAll(const model::Chunk& chunk, v1::Content content, int64_t version) {
    std::vector<T> all(chunk.range.size());
    BALLAST_RETURN_IF_ERROR(Pull(PullOf(chunk, content, version),
                                 absl::MakeSpan(reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(T))));
    return all;
  }

  // A unit with a single tensor of `elements`, one rank and this server.
  void OpenJob(uint64_t elements, uint64_t chunk_elements) {
    v1::FenceRequest fence;
    fence.set_job(kJob);
    fence.mutable_epoch()->set_counter(1);
    fence.mutable_epoch()->set_nonce(7);
    fence.set_protocol_version(model::kProtocolVersion);
    const auto fenced = Call(&client::Transport::Fence, fence);
    ASSERT_TRUE(fenced.ok()) << fenced.status();
    EXPECT_EQ(fenced->job().server_id(), "s0");
    EXPECT_EQ(fenced->job().committed(), -1);

    *open_.mutable_epoch() = fence.epoch();
    open_.set_base(-1);
    v1::JobSpec* spec = open_.mutable_spec();
    spec->set_name(kJob);
    spec->set_chunk_elements(chunk_elements);
    spec->set_optimizer(v1::OPTIMIZER_ADAMW);
    spec->set_gradient_dtype(v1::DTYPE_BF16);
    spec->set_working_dtype(v1::DTYPE_BF16);
    spec->set_durability(v1::DURABILITY_NONE);
    spec->set_group_count(1);
    v1::Registration* registration = spec->add_registrations();
    registration->set_version(-1);
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name("weight");
    tensor->set_unit("layer");
    tensor->add_shape(elements);
    v1::Member* member = open_.add_members();
    member->set_server_id("s0");
    member->set_weight(1);
    const auto layout = model::Layout::Make(*spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    *open_.mutable_tiling() = model::EvenTiling(1);
    open_.set_spec_digest(model::SpecDigest(*spec));
    open_.set_protocol_version(model::kProtocolVersion);
    const auto opened = Call(&client::Transport::Open, open_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    auto plan = model::EpochPlan::Make(open_);
    ASSERT_TRUE(plan.ok());
    plan_ = std::make_unique<model::EpochPlan>(*std::move(plan));
  }

  v1::PushRequest PushOf(const model::Slice& slice, v1::SliceKind kind, int64_t step,
                         absl::Span<const std::byte> payload) const {
    v1::PushRequest push;
    push.set_job(kJob);
    *push.mutable_epoch() = open_.epoch();
    push.set_step(step);
    push.set_kind(kind);
    push.set_unit(slice.unit);
    push.set_begin(slice.range.begin);
    push.set_end(slice.range.end);
    push.set_crc32c(kernels::Crc32c(payload));
    return push;
  }

  v1::PullRequest PullOf(const model::Chunk& chunk, v1::Content content, int64_t version) const {
    v1::PullRequest pull;
    pull.set_job(kJob);
    pull.set_version(version);
    pull.set_content(content);
    pull.set_unit(chunk.unit);
    pull.set_begin(chunk.range.begin);
    pull.set_end(chunk.range.end);
    return pull;
  }

  v1::SealRequest SealOf(int64_t step, v1::StepKind kind) const {
    v1::SealRequest seal;
    seal.set_job(kJob);
    *seal.mutable_epoch() = open_.epoch();
    seal.set_step(step);
    seal.set_wait_ms(25'000);
    v1::StepHeader* header = seal.mutable_header();
    header->set_kind(kind);
    header->set_gradient_scale(1);
    header->set_gradient_presence(model::MakeBitmap(1, {}));
    header->set_value_presence(model::MakeBitmap(1, {}));
    if (kind == v1::STEP_KIND_UPDATE) {
      header->set_gradient_presence(model::MakeBitmap(1, {0}));
      v1::GroupHyper* group = header->add_groups();
      group->set_learning_rate(0.01);
      group->set_beta1(0.9);
      group->set_beta2(0.999);
      group->set_epsilon(1e-8);
      group->set_weight_decay(0.1);
    } else {
      header->set_value_presence(model::MakeBitmap(1, {0}));
    }
    seal.add_blobs("cursor");
    const std::vector<std::string> blobs = {"cursor"};
    seal.set_plan_hash(model::PlanHash(*plan_, step, 0, *header, blobs));
    return seal;
  }

  // Seals `step` and returns the decision. REQUIRES: all slices of the step are pushed.
  absl::StatusOr<v1::Decision> SealStep(int64_t step, v1::StepKind kind) {
    BALLAST_ASSIGN_OR_RETURN(const auto answer, Call(&client::Transport::Seal, SealOf(step, kind)));
    if (!answer.has_prepared()) return absl::InternalError(answer.ShortDebugString());
    return model::Decide({answer.prepared()});
  }

  absl::Status CommitStep(const v1::Decision& decision) {
    v1::CommitRequest commit;
    commit.set_job(kJob);
    *commit.mutable_decision() = decision;
    BALLAST_ASSIGN_OR_RETURN(const auto answer, Call(&client::Transport::Commit, commit));
    return answer.committed() == decision.step() ? absl::OkStatus() : absl::InternalError("committed another step");
  }

  // Runs transaction 0 with value(i) as element i of the unit.
  template <typename Function>
  void Create(Function value) {
    for (const model::Slice& slice : plan_->slices()) {
      std::vector<float> values(slice.range.size());
      for (size_t i = 0; i < values.size(); ++i) values[i] = value(slice.range.begin + i);
      ASSERT_EQ(Push(PushOf(slice, v1::SLICE_KIND_VALUE, 0, BytesOf(values)), BytesOf(values)), absl::OkStatus());
    }
    const auto decision = SealStep(0, v1::STEP_KIND_VALUES);
    ASSERT_TRUE(decision.ok()) << decision.status();
    ASSERT_EQ(CommitStep(*decision), absl::OkStatus());
  }

  const model::Chunk& chunk(size_t i) const { return plan_->layout().chunks()[i]; }

  ScratchDirectory directory_;
  std::unique_ptr<services::StateServer> state_;
  std::unique_ptr<services::RpcServer> rpc_;
  std::unique_ptr<client::Transport> transport_;
  v1::OpenRequest open_;
  std::unique_ptr<model::EpochPlan> plan_;
};

}  // namespace ballast
