#include "ballast/client/transport/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/client/transport/backoff.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/client/transport/tally.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

absl::Status Down() { return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused"); }

// Answers from a script; an empty script holds calls until Release().
class ScriptedTransport final : public Transport {
 public:
  std::string name() const override { return "scripted"; }
  void GetJob(const v1::GetJobRequest&, absl::Time deadline, Callback<v1::GetJobResponse> done) override {
    absl::Status next;
    {
      absl::MutexLock lock(&mutex);
      ++calls;
      if (hold) {
        held.push_back([done](const absl::Status& status) { Answer<v1::GetJobResponse>(done, status); });
        return;
      }
      if (!script.empty()) {
        next = script.front();
        if (script.size() > 1 || !repeat_last) script.erase(script.begin());
      }
    }
    Answer<v1::GetJobResponse>(done, next);
  }
  void Open(const v1::OpenRequest&, absl::Time, Callback<v1::OpenResponse> done) override {
    absl::MutexLock lock(&mutex);
    ++opens;
    done(v1::OpenResponse());
  }
  void Commit(const v1::CommitRequest&, absl::Time, Callback<v1::CommitResponse> done) override {
    absl::MutexLock lock(&mutex);
    ++commits;
    done(v1::CommitResponse());
  }
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time,
            Callback<v1::PushResponse> done) override {
    absl::MutexLock lock(&mutex);
    checksums += header.crc32c() != 0 ? 1 : 0;
    pushed_now += payload.size();
    pushed_max = std::max(pushed_max, pushed_now);
    held.push_back([this, done, n = payload.size()](const absl::Status& status) {
      {
        absl::MutexLock now(&mutex);
        pushed_now -= n;
      }
      Answer<v1::PushResponse>(done, status);
    });
  }
  void Identify(const v1::IdentifyRequest&, absl::Time, Callback<v1::IdentifyResponse>) override { std::abort(); }
  void Fence(const v1::FenceRequest&, absl::Time, Callback<v1::FenceResponse>) override { std::abort(); }
  void Norm(const v1::NormRequest&, absl::Time, Callback<v1::NormResponse>) override { std::abort(); }
  void Seal(const v1::SealRequest&, absl::Time, Callback<v1::SealResponse>) override { std::abort(); }
  void Pin(const v1::PinRequest&, absl::Time, Callback<v1::PinResponse>) override { std::abort(); }
  void Unpin(const v1::UnpinRequest&, absl::Time, Callback<v1::UnpinResponse>) override { std::abort(); }
  // Waits until the try ends, like a server that lost the Commit.
  void Pull(const v1::PullRequest&, absl::Span<std::byte>, absl::Time,
            std::function<void(absl::Status)> done) override {
    absl::Status answer;
    {
      absl::MutexLock lock(&mutex);
      if (!script.empty()) {
        answer = script.front();
        script.erase(script.begin());
      } else if (commits == 0) {
        answer = absl::DeadlineExceededError("waits for its version");
      }
    }
    done(answer);
  }

  void Schedule(Moves, std::function<void()> work) override {
    if (!schedules) return work();
    absl::MutexLock lock(&mutex);
    scheduled.push_back(std::move(work));
  }
  // Runs what was scheduled before, and says how much that was.
  int RunScheduled() {
    std::vector<std::function<void()>> works;
    {
      absl::MutexLock lock(&mutex);
      works.swap(scheduled);
    }
    for (const auto& work : works) work();
    return static_cast<int>(works.size());
  }

  void Cancel() override {
    std::vector<std::function<void(absl::Status)>> all;
    {
      absl::MutexLock lock(&mutex);
      all.swap(held);
    }
    for (const auto& answer : all) answer(absl::CancelledError("by the caller"));
  }

  // Answers the oldest held call; waits until there is one.
  void Release(const absl::Status& status) {
    std::function<void(absl::Status)> answer;
    {
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(
          +[](std::vector<std::function<void(absl::Status)>>* h) { return !h->empty(); }, &held));
      answer = held.front();
      held.erase(held.begin());
    }
    answer(status);
  }

  template <typename Response>
  static void Answer(const Callback<Response>& done, const absl::Status& status) {
    if (status.ok()) {
      done(Response());
    } else {
      done(status);
    }
  }

  absl::Mutex mutex;
  std::vector<absl::Status> script;
  bool repeat_last = false;
  bool hold = false;
  bool schedules = false;
  std::vector<std::function<void()>> scheduled;
  std::vector<std::function<void(absl::Status)>> held;
  int calls = 0, opens = 0, commits = 0;
  uint64_t pushed_now = 0, pushed_max = 0;
  int checksums = 0;  // pushes that came with one
};

struct Rig {
  explicit Rig(RouterOptions options = {}) {
    auto transport = std::make_unique<ScriptedTransport>();
    server = transport.get();
    std::vector<std::unique_ptr<Transport>> list;
    list.push_back(std::move(transport));
    router = std::make_unique<Router>(std::move(list), std::move(options));
  }
  absl::Status Ask(absl::Duration timeout) {
    return CallAll<v1::GetJobRequest, v1::GetJobResponse>(router.get(), &Transport::GetJob, "GetJob of job 'x'", {},
                                                          absl::Now() + timeout)
        .status();
  }
  ScriptedTransport* server;
  std::unique_ptr<Router> router;
};

TEST(Router, RetriesWhileUnavailable) {
  Rig rig;
  rig.server->script = {Down(), absl::DeadlineExceededError("slow"), Down(), absl::OkStatus()};
  EXPECT_EQ(rig.Ask(absl::Seconds(20)), absl::OkStatus());
  EXPECT_EQ(rig.server->calls, 4);
}

TEST(Router, OtherErrorsAreFinalAndNameTheServer) {
  Rig rig;
  rig.server->script = {model::Error(absl::StatusCode::kNotFound, model::kUnknownJob, "no job"), absl::OkStatus()};
  const absl::Status status = rig.Ask(absl::Seconds(20));
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(model::ReasonOf(status), model::kUnknownJob);
  EXPECT_THAT(std::string(status.message()), HasSubstr("server scripted: GetJob of job 'x': no job"));
  EXPECT_EQ(rig.server->calls, 1);
}

TEST(Router, GivesUpAtTheDeadlineAndSaysWhom) {
  Rig rig;
  rig.server->script = {Down()};
  rig.server->repeat_last = true;
  absl::Status status;
  // On a busy machine a short time may be over before the second try.
  for (absl::Duration timeout = absl::Milliseconds(300); timeout < absl::Seconds(30); timeout *= 4) {
    rig.server->calls = 0;
    const absl::Time start = absl::Now();
    status = rig.Ask(timeout);
    EXPECT_GE(absl::Now() - start, timeout - absl::Milliseconds(50));
    if (rig.server->calls > 1) break;
  }
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kServerDown);
  EXPECT_THAT(std::string(status.message()), HasSubstr("server scripted"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("connection refused"));
  EXPECT_GT(rig.server->calls, 1);
}

TEST(Router, NotOpenSendsOpenAndBehindSendsCommit) {
  Rig rig;
  const auto not_open = model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen, "not open");
  const auto behind = model::Error(absl::StatusCode::kFailedPrecondition, model::kBehind, "behind");
  rig.server->script = {not_open};
  EXPECT_EQ(model::ReasonOf(rig.Ask(absl::Seconds(20))), model::kNotOpen);  // nothing to send
  rig.router->SetOpen(std::make_shared<v1::OpenRequest>());
  rig.router->SetCommit(std::make_shared<v1::CommitRequest>());
  rig.server->script = {not_open, behind, absl::OkStatus()};
  EXPECT_EQ(rig.Ask(absl::Seconds(20)), absl::OkStatus());
  EXPECT_EQ(rig.server->opens, 1);
  EXPECT_EQ(rig.server->commits, 1);
}

TEST(Router, APullIsTriedAgainBehindTheCommit) {
  Rig rig;
  rig.router->SetCommit(std::make_shared<v1::CommitRequest>());
  Tally tally;
  tally.Start();
  std::byte to[4];
  rig.router->Pull(0, {}, absl::MakeSpan(to), absl::Now() + absl::Seconds(20),
                   [&](absl::Status s) { tally.Finish(s); });
  EXPECT_EQ(tally.Wait(), absl::OkStatus());
  EXPECT_EQ(rig.server->commits, 1);
}

TEST(Router, ABusyServerGetsNoCommitBeforeAPullIsTriedAgain) {
  Rig rig;
  rig.router->SetCommit(std::make_shared<v1::CommitRequest>());
  const auto busy = model::Error(absl::StatusCode::kUnavailable, model::kBusy, "too much waits");
  rig.server->script = {busy, busy, absl::OkStatus()};
  const auto pull = [&] {
    Tally tally;
    tally.Start();
    std::byte to[4];
    rig.router->Pull(0, {}, absl::MakeSpan(to), absl::Now() + absl::Seconds(20),
                     [&](absl::Status s) { tally.Finish(s); });
    return tally.Wait();
  };
  EXPECT_EQ(pull(), absl::OkStatus());
  EXPECT_EQ(rig.server->commits, 0);
  // The server was restarted, and then has too much to do at first: the pull comes to wait for the Commit in the end.
  rig.server->script = {busy};
  EXPECT_EQ(pull(), absl::OkStatus());
  EXPECT_EQ(rig.server->commits, 1);
}

TEST(Router, BytesInFlightAreBounded) {
  Rig rig({.inflight_bytes_max = 1000});
  const std::vector<std::byte> payload(400);
  Tally tally;
  tally.Start(6);
  for (int i = 0; i < 6; ++i) {
    rig.router->Push(0, {}, payload, absl::Now() + absl::Seconds(20), [&](absl::Status s) { tally.Finish(s); });
  }
  absl::Notification admitted;
  std::thread waiter([&] {
    rig.router->push_admissions().Await();
    admitted.Notify();
  });
  EXPECT_FALSE(admitted.HasBeenNotified());
  for (int i = 0; i < 6; ++i) rig.server->Release(absl::OkStatus());
  EXPECT_EQ(tally.Wait(), absl::OkStatus());
  waiter.join();
  EXPECT_EQ(rig.server->pushed_max, 800u);
}

// The transport knows what a try sends; a checksum from here would cost another pass, and be of other bytes if the
// owner of borrowed memory changes it.
TEST(Router, TheChecksumOfAPushIsTheTransports) {
  Rig rig;
  const std::vector<std::byte> payload(100, std::byte{3});
  Tally tally;
  tally.Start();
  rig.router->Push(0, {}, payload, absl::Now() + absl::Seconds(10), [&](absl::Status s) { tally.Finish(s); });
  rig.server->Release(model::Error(absl::StatusCode::kUnavailable, model::kChecksum, "other bytes than pushed"));
  rig.server->Release(absl::OkStatus());
  EXPECT_EQ(tally.Wait(), absl::OkStatus());
  EXPECT_EQ(rig.server->checksums, 0);
}

TEST(Router, NoPullWaitsForPushes) {
  Rig rig({.inflight_bytes_max = 1000});
  const std::vector<std::byte> payload(400);
  Tally pushes;
  pushes.Start(6);
  for (int i = 0; i < 6; ++i) {
    rig.router->Push(0, {}, payload, absl::Now() + absl::Seconds(20), [&](absl::Status s) { pushes.Finish(s); });
  }
  rig.server->script = {absl::OkStatus(), absl::OkStatus(), absl::OkStatus()};
  Tally pulls;
  pulls.Start(3);
  std::vector<std::byte> to(600);  // more than the pushes have left
  for (int i = 0; i < 3; ++i) {
    rig.router->Pull(0, {}, absl::MakeSpan(to), absl::Now() + absl::Seconds(20),
                     [&](absl::Status s) { pulls.Finish(s); });
  }
  EXPECT_EQ(pulls.Wait(), absl::OkStatus());
  EXPECT_FALSE(pushes.idle());
  for (int i = 0; i < 6; ++i) rig.server->Release(absl::OkStatus());
  EXPECT_EQ(pushes.Wait(), absl::OkStatus());
}

TEST(Router, PullsAreHandedOverToATransportWithThreads) {
  Rig rig;
  rig.server->schedules = true;
  rig.server->script = std::vector<absl::Status>(5, absl::OkStatus());
  std::vector<std::byte> to(10);
  Tally tally;
  tally.Start(5);
  rig.router->HandOver([&] {
    for (int i = 0; i < 5; ++i) {
      rig.router->Pull(0, {}, absl::MakeSpan(to), absl::Now() + absl::Seconds(10),
                       [&](const absl::Status& s) { tally.Finish(s); });
    }
  });
  EXPECT_EQ(rig.server->RunScheduled(), 1);
  EXPECT_FALSE(tally.idle());
  EXPECT_EQ(rig.server->RunScheduled(), 5);
  EXPECT_EQ(tally.Wait(), absl::OkStatus());
}

TEST(Router, TheRouterEndsBehindWhatItHandedOver) {
  Tally tally;
  tally.Start();
  std::vector<std::byte> to(10);
  std::thread transport;
  {
    Rig rig;
    rig.server->schedules = true;
    rig.router->HandOver([&, router = rig.router.get()] {
      router->Pull(0, {}, absl::MakeSpan(to), absl::Now() + absl::Seconds(10),
                   [&](const absl::Status& s) { tally.Finish(s); });
    });
    transport = std::thread([server = rig.server] {
      absl::SleepFor(absl::Milliseconds(20));
      server->RunScheduled();
    });
  }
  transport.join();
  EXPECT_TRUE(absl::IsCancelled(tally.Wait()));
}

TEST(Router, AWaitForRoomEndsWithTheSessionAndOutlivesTheRouter) {
  std::function<void()> waiter;
  const std::vector<std::byte> payload(400);
  Tally tally;
  tally.Start(3);
  {
    std::atomic<bool> interrupted{false};
    Rig rig({.inflight_bytes_max = 1000, .interrupted = [&] { return interrupted.load(); }});
    for (int i = 0; i < 3; ++i) {
      rig.router->Push(0, {}, payload, absl::Now() + absl::Seconds(20), [&](absl::Status s) { tally.Finish(s); });
    }
    waiter = rig.router->push_admissions().Waiter();
    std::thread waits(waiter);
    interrupted = true;
    waits.join();
    EXPECT_TRUE(absl::IsCancelled(tally.Wait()));
    EXPECT_GT(rig.router->push_admissions().waited(), absl::ZeroDuration());
  }
  waiter();
}

TEST(Router, OneCallLargerThanTheBoundGoesAlone) {
  Rig rig({.inflight_bytes_max = 100});
  const std::vector<std::byte> payload(400);
  Tally tally;
  tally.Start(2);
  for (int i = 0; i < 2; ++i) {
    rig.router->Push(0, {}, payload, absl::Now() + absl::Seconds(20), [&](absl::Status s) { tally.Finish(s); });
  }
  rig.server->Release(absl::OkStatus());
  rig.server->Release(absl::OkStatus());
  EXPECT_EQ(tally.Wait(), absl::OkStatus());
  EXPECT_EQ(rig.server->pushed_max, 400u);
}

TEST(Router, LongWaitsAreShown) {
  absl::Notification shown;
  std::string line;
  Rig rig({.progress = [&](const std::string& text) {
    if (shown.HasBeenNotified()) return;
    line = text;
    shown.Notify();
  }});
  rig.server->hold = true;
  std::thread caller([&] { EXPECT_EQ(rig.Ask(absl::Seconds(30)), absl::OkStatus()); });
  shown.WaitForNotification();
  EXPECT_THAT(line, HasSubstr("waiting for server scripted: GetJob of job 'x'"));
  rig.server->Release(absl::OkStatus());
  caller.join();
}

TEST(Router, AnInterruptEndsCallsAtTheServerAndThoseToBeTriedAgain) {
  for (const bool held : {true, false}) {
    std::atomic<bool> interrupted{false};
    Rig rig({.interrupted = [&] { return interrupted.load(); }});
    rig.server->hold = held;
    rig.server->script = {Down()};
    rig.server->repeat_last = true;
    absl::Status status;
    std::thread caller([&] { status = rig.Ask(absl::Hours(1)); });
    {
      absl::MutexLock lock(&rig.server->mutex);
      rig.server->mutex.Await(absl::Condition(
          +[](int* calls) { return *calls > 0; }, &rig.server->calls));
    }
    interrupted = true;
    caller.join();
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    EXPECT_TRUE(absl::IsCancelled(rig.Ask(absl::Hours(1)))) << "the session has ended";
  }
}

// Whenever a server comes back, it is asked again soon, as measured by the time that it was away.
TEST(Router, PausesGrowWithTheTimeThatAServerIsAway) {
  absl::Duration away;
  int tries = 1;
  for (; LongestPause(tries) < absl::Seconds(1); ++tries) {
    EXPECT_EQ(absl::ToInt64Milliseconds(LongestPause(tries) - 0.3 * away + absl::Microseconds(1)), 5) << tries;
    away += LongestPause(tries);
  }
  EXPECT_EQ(tries, 22);
  EXPECT_EQ(LongestPause(1000), absl::Seconds(1));
}

TEST(Router, DestructorCancelsWhatWaits) {
  absl::Status result;
  absl::Notification done;
  {
    Rig rig;
    rig.server->script = {Down()};
    rig.server->repeat_last = true;
    rig.router->Call<v1::GetJobRequest, v1::GetJobResponse>(
        &Transport::GetJob, 0u, "GetJob", std::make_shared<v1::GetJobRequest>(), absl::Now() + absl::Minutes(5),
        [&](const absl::StatusOr<v1::GetJobResponse>& answer) {
          result = answer.status();
          done.Notify();
        });
  }
  ASSERT_TRUE(done.HasBeenNotified());
  EXPECT_FALSE(result.ok());
}

}  // namespace
}  // namespace ballast::client
