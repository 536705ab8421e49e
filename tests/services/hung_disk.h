// For tests of a disk that hangs: small jobs, the calls of one, and a server whose disk has a gate.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

inline uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }
inline absl::Time Soon() { return absl::Now() + absl::Seconds(50); }

inline v1::JobSpec Spec(const std::string& name, v1::Durability durability) {
  v1::JobSpec spec = MakeSpec(name, SmallModel());
  spec.set_durability(durability);
  return spec;
}

inline absl::Status Step(TrainerGroup& group) {
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones));
  BALLAST_RETURN_IF_ERROR(group.Finish(UpdateHeader(Tensors())).status());
  return group.Read(0, v1::CONTENT_WORKING, group.step() - 1).status();
}

inline uint64_t NvmeStateBytes(StateServer* server, const std::string& job) {
  const v1::GetServerStatusResponse all = server->Status();
  for (const v1::JobStatus& status : all.jobs()) {
    if (status.name() != job) continue;
    for (const v1::TierStatus& tier : status.tiers()) {
      if (tier.tier() == "nvme") return tier.state_bytes();
    }
  }
  return 0;
}

// Asks for the plan of an Open with one tensor more, so that the server has to plan.
inline absl::Status DryRun(StateServer* server, TrainerGroup& group) {
  v1::JobSpec larger = group.spec();
  Append({{"more", "u9", 256, 0}}, group.step() - 1, &larger);
  const TrainerGroup next({server}, larger, 1, group.epoch().counter());
  v1::OpenRequest request = next.open_request(group.step() - 1, std::nullopt);
  request.set_dry_run(true);
  Answer<v1::OpenResponse> answer;
  server->Open(request, Soon(), answer.reply());
  const auto response = answer.Wait();
  if (response.ok()) {
    EXPECT_THAT(response->plan(), ::testing::HasSubstr("holds the state"));
  }
  return response.status();
}

inline absl::Status Fence(StateServer* server, const std::string& job, uint64_t counter) {
  v1::FenceRequest request;
  request.set_job(job);
  request.mutable_epoch()->set_counter(counter);
  request.mutable_epoch()->set_nonce(7);
  request.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> answer;
  server->Fence(request, Soon(), answer.reply());
  return answer.Wait().status();
}

inline absl::StatusOr<v1::SetBudgetResponse> ChangeDram(StateServer* server, uint64_t bytes) {
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(bytes);
  Answer<v1::SetBudgetResponse> changed;
  server->SetBudget(budget, changed.reply());
  return changed.Wait();
}

inline absl::Status SetDram(StateServer* server, uint64_t bytes) { return ChangeDram(server, bytes).status(); }

inline v1::DropJobRequest DropOf(TrainerGroup& group) {
  v1::DropJobRequest drop;
  drop.set_job(group.spec().name());
  *drop.mutable_epoch() = group.epoch();
  return drop;
}

// A pull of a chunk's first element.
inline v1::PullRequest PullOf(TrainerGroup& group, const model::Chunk& chunk, v1::Content content, int64_t version) {
  v1::PullRequest pull;
  pull.set_job(group.spec().name());
  pull.set_version(version);
  pull.set_content(content);
  pull.set_unit(chunk.unit);
  pull.set_begin(chunk.range.begin);
  pull.set_end(chunk.range.begin + 1);
  return pull;
}

// Pulls of the first element of every chunk's state.
struct StateReads {
  std::deque<std::string> bytes;
  std::vector<Answer<uint32_t>> answers;

  void Ask(StateServer* server, TrainerGroup& group, int64_t version) {
    for (const model::Chunk& chunk : group.plan().layout().chunks()) {
      const v1::PullRequest pull = PullOf(group, chunk, v1::CONTENT_MASTER, version);
      answers.push_back(group.Pull(server, pull, absl::InfiniteFuture(), &bytes.emplace_back()));
    }
  }
  void ExpectOk() {
    for (Answer<uint32_t>& answer : answers) EXPECT_EQ(answer.Wait().status(), absl::OkStatus());
  }
};

class HungDiskTest : public ::testing::Test {
 protected:
  HungDiskTest() : server_("s", {0, 16 * kMiB, 256 * kMiB}) {
    server_.options().foundation = &disk_;
    server_.Restart();
  }
  ~HungDiskTest() override { disk_.Release(); }

  // Sends the job's first Open, which nothing but the disk holds up.
  void OpenFirst(TrainerGroup& group, Answer<v1::OpenResponse>* opened) {
    std::vector<v1::GetJobResponse> jobs;
    ASSERT_EQ(group.Fence(&jobs), absl::OkStatus());
    server_->Open(group.open_request(-1, std::nullopt), absl::InfiniteFuture(), opened->reply());
  }
  // All that a job does with its server.
  void ExpectGoesOn(TrainerGroup& group) {
    EXPECT_EQ(Step(group), absl::OkStatus());
    const absl::Status planned = DryRun(server_.get(), group);
    EXPECT_TRUE(planned.ok() || absl::IsResourceExhausted(planned)) << planned;
    EXPECT_EQ(group.Read(0, v1::CONTENT_MASTER, group.step() - 1).status(), absl::OkStatus());
    // A pull that comes before its version is answered once the version is there.
    v1::PullRequest early;
    early.set_job(group.spec().name());
    early.set_version(group.step());
    early.set_content(v1::CONTENT_WORKING);
    early.set_end(1);
    std::string bytes;
    Answer<uint32_t> pulled = group.Pull(server_.get(), early, Soon(), &bytes);
    EXPECT_EQ(Step(group), absl::OkStatus());
    EXPECT_EQ(pulled.Wait().status(), absl::OkStatus());
    EXPECT_EQ(Fence(server_.get(), group.spec().name(), group.epoch().counter() + 1), absl::OkStatus());
  }

  // From now on this operation waits wherever it concerns state on the disk.
  void HoldTier(GatedOperation held) {
    disk_.Hold([held](const std::string& path, GatedOperation operation, uint64_t) {
      return absl::EndsWith(path, "/nvme.tier") && operation == held;
    });
  }
  // From now on the job's log, or the log that it gets, cannot be written.
  void HoldLog(const std::string& job) {
    disk_.Hold([log = "/log-" + job](const std::string& path, GatedOperation operation, uint64_t) {
      return absl::EndsWith(path, log) && operation == GatedOperation::kWrite;
    });
  }
  absl::Status PinForReading(TrainerGroup& group, int64_t version) {
    v1::PinRequest pin;
    pin.set_job(group.spec().name());
    pin.set_version(version);
    Answer<v1::PinResponse> pinned;
    server_->Pin(pin, Soon(), pinned.reply());
    return pinned.Wait().status();
  }

  GatedDisk disk_;
  TestServer server_;
};

}  // namespace ballast::services
