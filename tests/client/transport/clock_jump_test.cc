// Somebody sets the machine's clock while a session calls its servers. A program of its own, whose clock is the test's.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>

#include "absl/time/clock.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/fake_server.h"

namespace {

std::atomic<int64_t> wall_ahead_s{0};

}  // namespace

// In place of the C library's.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += wall_ahead_s.load();
  return result;
}

namespace ballast::client {
namespace {

// By the wall clock it was silent for an hour, and a group would have gone on without it.
TEST(ClockJumpTest, AServerThatMissedACallIsNotSilentForTheJump) {
  FakeServers servers(2, /*disk=*/1);
  v1::OpenRequest open = OpenOnFakes(0, 1);
  open.set_group("group");
  v1::Table* const table = open.mutable_table();
  table->set_replicas(2);
  v1::Shard* const shard = table->add_shards();
  for (uint32_t i = 0; i < 2; ++i) {
    v1::Member* const member = table->add_members();
    member->set_server_id(servers[i].name());
    member->set_disk(1);
    member->set_weight(1);
    shard->add_holders(i);
  }
  auto plan = model::EpochPlan::Make(open);
  ASSERT_TRUE(plan.ok()) << plan.status();
  servers.router->SetRoutes(std::make_shared<const model::EpochPlan>(*std::move(plan)), absl::Minutes(10));
  std::atomic<int> missed = 0;
  servers[1].on_get_job = [&](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
    ++missed;
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  const auto asked = AskAll<v1::GetJobRequest, v1::GetJobResponse>(servers.router.get(), &Transport::GetJob, "GetJob",
                                                                   v1::GetJobRequest(), absl::Now() + absl::Minutes(1));
  while (missed < 2) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_TRUE(servers.router->Silent().empty());
  const absl::Time before = absl::Now();
  wall_ahead_s = 3600;
  ASSERT_GT(absl::Now() - before, absl::Minutes(59)) << "the clock is the test's";
  EXPECT_TRUE(servers.router->Silent().empty());
  wall_ahead_s = 0;
}

}  // namespace
}  // namespace ballast::client
