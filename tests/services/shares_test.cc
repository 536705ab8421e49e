// A job that asks for all that a server has: the other jobs of the server go on.
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }

v1::PullRequest PullOf(const std::string& job, int64_t version, uint64_t elements) {
  v1::PullRequest request;
  request.set_job(job);
  request.set_content(v1::CONTENT_WORKING);
  request.set_end(elements);
  request.set_version(version);
  return request;
}

absl::Status Step(TrainerGroup& group) {
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones));
  BALLAST_RETURN_IF_ERROR(group.Finish(UpdateHeader(Tensors())).status());
  return group.Read(0, v1::CONTENT_WORKING, group.step() - 1).status();
}

bool OnNvme(StateServer* server, const std::string& job) {
  const v1::GetServerStatusResponse all = server->Status();
  for (const v1::JobStatus& status : all.jobs()) {
    if (status.name() == job && status.tiers(2).state_bytes() > 0) return true;
  }
  return false;
}

TEST(Shares, AJobWhoseRequestsWaitLeavesPlacesToOthers) {
  TestServer server("s");
  server.options().waiting_requests_max = 16;
  server.Restart();
  TrainerGroup flood({server.get()}, MakeSpec("flood", SmallModel()), 1);
  ASSERT_EQ(flood.Start(), absl::OkStatus());
  std::deque<std::string> bytes;
  std::vector<Answer<uint32_t>> waiting;
  do {
    waiting.push_back(flood.Pull(server.get(), PullOf("flood", 9, 10), absl::InfiniteFuture(), &bytes.emplace_back()));
  } while (!waiting.back().arrived());
  EXPECT_EQ(model::ReasonOf(waiting.back().Wait().status()), model::kBusy);
  EXPECT_EQ(waiting.size(), 9u) << "half of the places, and one that was refused";
  // Another job's fence waits for its sync, its Open for space, its seals for each other, its pulls for their version.
  TrainerGroup other({server.get()}, MakeSpec("other", SmallModel()), 2);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  ASSERT_EQ(other.Initialise(Ones), absl::OkStatus());
  Answer<uint32_t> early =
      other.Pull(server.get(), PullOf("other", 1, 10), absl::InfiniteFuture(), &bytes.emplace_back());
  EXPECT_EQ(Step(other), absl::OkStatus());
  EXPECT_EQ(early.Wait().status(), absl::OkStatus());
  EXPECT_FALSE(waiting.front().arrived());
  server->Stop();
}

TEST(Shares, AJobWhosePushesWaitLeavesMemoryToOthers) {
  GatedDisk disk;
  TestServer server("s", {0, 16 * kMiB, 256 * kMiB});
  server.options().foundation = &disk;
  server.options().waiting_push_bytes_max = kMiB;
  server.Restart();
  TrainerGroup flood({server.get()}, MakeSpec("flood", SmallModel()), 1);
  TrainerGroup other({server.get()}, MakeSpec("other", SmallModel()), 1);
  for (TrainerGroup* group : {&flood, &other}) {
    ASSERT_EQ(group->Start(), absl::OkStatus());
    ASSERT_EQ(group->Initialise(Ones), absl::OkStatus());
  }
  // Chunks of both jobs move to NVMe, so that their updates hang.
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(6'220'000);
  Answer<v1::SetBudgetResponse> changed;
  server->SetBudget(budget, changed.reply());
  ASSERT_EQ(changed.Wait().status(), absl::OkStatus());
  for (TrainerGroup* group : {&flood, &other}) {
    for (int steps = 0; steps < 100 && !OnNvme(server.get(), group->spec().name()); ++steps) {
      ASSERT_EQ(Step(*group), absl::OkStatus());
    }
    ASSERT_TRUE(OnNvme(server.get(), group->spec().name()));
    Answer<v1::CommitResponse> applied;
    server->AwaitApplied(group->spec().name(), group->step() - 1, std::nullopt, absl::InfiniteFuture(),
                         applied.reply());
    ASSERT_EQ(applied.Wait().status(), absl::OkStatus());
  }
  disk.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kWrite;
  });
  for (TrainerGroup* group : {&flood, &other}) {
    ASSERT_EQ(group->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones), absl::OkStatus());
    ASSERT_TRUE(group->Finish(UpdateHeader(Tensors())).ok());
  }
  disk.AwaitWaiting();
  const auto last = static_cast<uint32_t>(flood.plan().slices().size() - 1);
  std::vector<Answer<v1::PushResponse>> waiting;
  do {
    waiting.push_back(flood.BeginPushSlice(last, v1::SLICE_KIND_GRADIENT, Ones));
  } while (!waiting.back().arrived());
  EXPECT_EQ(model::ReasonOf(waiting.back().Wait().status()), model::kBusy) << waiting.back().Wait().status();
  Answer<v1::PushResponse> pushed = other.BeginPushSlice(last, v1::SLICE_KIND_GRADIENT, Ones);
  EXPECT_FALSE(pushed.arrived()) << pushed.Wait().status();
  disk.Release();
  EXPECT_EQ(pushed.Wait().status(), absl::OkStatus());
  for (Answer<v1::PushResponse>& each : waiting) (void)each.Wait();  // until then their payloads are read
}

TEST(Shares, AJobWhoseAnswersAreNotReadLeavesRoomToOthers) {
  constexpr uint64_t kElements = 65536, kBytes = 2 * kElements;
  TestServer server("s");
  server.options().answer_bytes_max = 8 * kBytes;
  server.Restart();
  TrainerGroup flood({server.get()}, MakeSpec("flood", SmallModel()), 1);
  TrainerGroup other({server.get()}, MakeSpec("other", SmallModel()), 1);
  for (TrainerGroup* group : {&flood, &other}) {
    ASSERT_EQ(group->Start(), absl::OkStatus());
    ASSERT_EQ(group->Initialise(Ones), absl::OkStatus());
    ASSERT_EQ(group->Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
    AwaitIdle(server.get(), group->spec().name());
  }
  std::deque<std::vector<std::byte>> memory;
  std::vector<AnswerRoom::Lease> unread;
  std::vector<Answer<uint32_t>> waiting;
  do {
    server->Pull(
        PullOf("flood", 0, kElements), absl::InfiniteFuture(),
        [&](uint64_t bytes, AnswerRoom::Lease room) {
          unread.push_back(std::move(room));
          return absl::MakeSpan(memory.emplace_back(bytes));
        },
        waiting.emplace_back().reply());
  } while (waiting.back().arrived());
  EXPECT_EQ(unread.size(), 4u) << "half of the room";
  // Each is answered at once: what was read takes no room.
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(other.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  }
  EXPECT_FALSE(waiting.back().arrived());
  AnswerRoom::Lease read = std::move(unread.front());
  unread.erase(unread.begin());
  read.reset();  // another pull gets the room
  EXPECT_EQ(waiting.back().Wait().status(), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::services
