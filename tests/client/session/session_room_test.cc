// Sessions whose pushes wait for room.
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

// Pushes wait at the door while it is closed.
struct Door {
  absl::Mutex mutex;
  bool closed ABSL_GUARDED_BY(mutex) = false;
  int on_their_way ABSL_GUARDED_BY(mutex) = 0;
  std::vector<std::function<void()>> waiting ABSL_GUARDED_BY(mutex);

  void Pass(std::function<void()> push) {
    {
      absl::MutexLock lock(&mutex);
      ++on_their_way;
      if (closed) return waiting.push_back(std::move(push));
    }
    Through(push);
  }
  void Through(const std::function<void()>& push) {
    push();
    absl::MutexLock lock(&mutex);
    --on_their_way;
  }
  void AwaitAll() {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(
        +[](int* pushes) { return *pushes == 0; }, &on_their_way));
  }
  void Set(bool close) {
    std::vector<std::function<void()>> through;
    {
      absl::MutexLock lock(&mutex);
      closed = close;
      if (!close) through.swap(waiting);
    }
    for (const auto& push : through) Through(push);
  }
};

class DoorTransport final : public ForwardingTransport {
 public:
  DoorTransport(std::unique_ptr<Transport> server, Door* door) : ForwardingTransport(std::move(server)), door_(door) {}
  ~DoorTransport() override { door_->AwaitAll(); }
  void Push(const v1::PushRequest& r, absl::Span<const std::byte> payload, absl::Time t,
            Callback<v1::PushResponse> done) override {
    door_->Pass([=, this] { ForwardingTransport::Push(r, payload, t, done); });
  }

 private:
  Door* const door_;
};

class RoomTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Session>> Open(Collective* collective) {
    std::vector<std::unique_ptr<Transport>> transports;
    for (auto& server : servers_.Connect()) {
      transports.push_back(std::make_unique<DoorTransport>(std::move(server), &door_));
    }
    SessionOptions options = TestOptions();
    options.inflight_bytes_max = 1;  // a slice at a time
    return Session::Open(options, TestTensors(), std::move(transports), collective);
  }
  // Pulls the first elements of a unit.
  static absl::Status PullSome(Session& session) {
    std::vector<std::byte> to(100 * sizeof(bf16));
    BALLAST_ASSIGN_OR_RETURN(PendingPull pull, session.StartPull(0, {{{.begin = 0, .end = 100}, absl::MakeSpan(to)}}));
    return pull.Await();
  }

  SessionFixture servers_{1};
  Door door_;
};

TEST_F(RoomTest, WhileAPushWaitsOtherCallsOfTheSessionReturn) {
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  door_.Set(true);
                  std::vector<Waiter> waiters(session->unit_count());
                  for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                    BALLAST_RETURN_IF_ERROR(session->Push(unit, OwnedGradient(*session, unit, 1), {}, &waiters[unit]));
                  }
                  std::thread waits(waiters.back());
                  const absl::Status pulled = PullSome(*session);  // beside the wait, and past the pushes
                  {
                    absl::MutexLock lock(&door_.mutex);
                    const auto comes = [&] {
                      door_.mutex.AssertHeld();
                      return !door_.waiting.empty();
                    };
                    door_.mutex.Await(absl::Condition(&comes));  // on the transport's thread
                    EXPECT_EQ(door_.waiting.size(), 1u) << "one slice has room";
                  }
                  door_.Set(false);
                  waits.join();
                  BALLAST_RETURN_IF_ERROR(pulled);
                  BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
                  Reference reference(TestTensors());
                  reference.Step(1, TestStep());
                  return reference.Compare(*session, 1);
                }),
            absl::OkStatus());
}

// Whoever waits for room keeps nobody from closing the session.
TEST_F(RoomTest, AWaitOutlivesTheSession) {
  EXPECT_EQ(
      SessionFixture::RunRanks(1,
                               [&](Collective* collective) -> absl::Status {
                                 BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective));
                                 BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                 door_.Set(true);
                                 Waiter waiter;
                                 BALLAST_RETURN_IF_ERROR(session->Push(1, OwnedGradient(*session, 1, 1), {}, &waiter));
                                 std::thread waits(waiter);
                                 std::thread opens([&] { door_.Set(false); });
                                 session.reset();
                                 waits.join();
                                 opens.join();
                                 waiter();
                                 return absl::OkStatus();
                               }),
      absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
