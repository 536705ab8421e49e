#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

// Threads made meanwhile have little stack.
class SmallStacks {
 public:
  SmallStacks() {
    pthread_attr_init(&small_);
    pthread_getattr_default_np(&before_);
    pthread_attr_setstacksize(&small_, size_t{1} << 20);
    pthread_setattr_default_np(&small_);
  }
  ~SmallStacks() { pthread_setattr_default_np(&before_); }

 private:
  pthread_attr_t small_, before_;
};

// Many ranks' worth of retries of one slice, all damaged, wait while the chunk is updated: each that is refused lets
// the next one in.
TEST(JobPush, DamagedPushesOfOnePlaceAreRefusedOneAfterTheOther) {
  constexpr size_t kPushes = 20'000;
  const SmallStacks stacks;
  TestServer server("s");
  // The last chunk is one small slice, behind others whose update takes a while.
  TrainerGroup group({server.get()}, MakeSpec("job", {{"large", "u0", 24 << 16, 0}, {"small", "u1", 256, 1}}), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  const auto slice = static_cast<uint32_t>(group.plan().slices().size() - 1);
  const std::string payload = group.Payload(slice, v1::SLICE_KIND_GRADIENT, Ones);
  ASSERT_EQ(payload.size(), 512u);

  bool waited = false;
  for (int tries = 0; tries < 20 && !waited; ++tries) {
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(2), Ones), absl::OkStatus());
    const auto records = group.SealAll(UpdateHeader(2));
    ASSERT_TRUE(records.ok()) << records.status();
    const auto decision = model::Decide(*records);
    ASSERT_TRUE(decision.ok()) << decision.status();
    // Answers to what waited come from one thread, which the answer to this pull holds up: so all pushes are there
    // before the first of them is answered.
    absl::Notification holding, release;
    std::vector<std::byte> element;
    v1::PullRequest pull;
    pull.set_job("job");
    pull.set_version(group.step());
    pull.set_content(v1::CONTENT_WORKING);
    pull.set_end(1);
    Answer<uint32_t> held;
    server->Pull(
        pull, absl::InfiniteFuture(),
        [&](uint64_t bytes, const AnswerRoom::Lease&) {
          holding.Notify();
          release.WaitForNotification();
          element.resize(bytes);
          return absl::MakeSpan(element);
        },
        held.reply());
    ASSERT_EQ(group.Commit(*decision), absl::OkStatus());
    holding.WaitForNotification();
    v1::PushRequest header = group.PushHeader(slice, v1::SLICE_KIND_GRADIENT, payload);
    header.set_crc32c(header.crc32c() + 1);
    std::vector<Answer<v1::PushResponse>> answers(kPushes);
    for (Answer<v1::PushResponse>& answer : answers) {
      server->Push(header, absl::MakeConstSpan(reinterpret_cast<const std::byte*>(payload.data()), payload.size()),
                   absl::InfiniteFuture(), answer.reply());
    }
    waited = !answers[0].arrived();  // else the update was quicker
    release.Notify();
    for (Answer<v1::PushResponse>& answer : answers) {
      ASSERT_EQ(model::ReasonOf(answer.Wait().status()), model::kChecksum);
    }
    EXPECT_TRUE(held.Wait().ok());
  }
  EXPECT_TRUE(waited);
  EXPECT_EQ(server->counters().waiting_requests, 0u);
  // Given back after the reply.
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (server->counters().waiting_push_bytes > 0 && absl::Now() < patience) sched_yield();
  EXPECT_EQ(server->counters().waiting_push_bytes, 0u);
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(2), Ones), absl::OkStatus());
  EXPECT_EQ(group.Finish(UpdateHeader(2)).status(), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::services
