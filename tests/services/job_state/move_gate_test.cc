#include "ballast/services/job_state/move_gate.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>

#include "absl/synchronization/notification.h"

namespace ballast::services {
namespace {

TEST(MoveGate, ChunksOfSeveralJobsMoveBesideEachOther) {
  MoveGate gate;
  const int one = 0, another = 0;
  EXPECT_TRUE(gate.TryBegin(&one, [] { ADD_FAILURE(); }));
  EXPECT_TRUE(gate.TryBegin(&another, [] { ADD_FAILURE(); }));
  gate.End();
  gate.End();
  const MoveGate::KeptShut plan(&gate);
}

TEST(MoveGate, AMoveThatIsKeptOutHearsOfTheLastPlansEnd) {
  MoveGate gate;
  const int mover = 0;
  int admitted = 0, replaced = 0;
  auto plan = std::make_unique<MoveGate::KeptShut>(&gate);
  auto other = std::make_unique<MoveGate::KeptShut>(&gate);
  EXPECT_FALSE(gate.TryBegin(&mover, [&] { ++replaced; }));
  EXPECT_FALSE(gate.TryBegin(&mover, [&] {
    ++admitted;
    EXPECT_TRUE(gate.TryBegin(&mover, [] {}));
  }));
  plan.reset();
  EXPECT_FALSE(gate.TryBegin(nullptr, [] {}));
  EXPECT_EQ(admitted, 0);
  other.reset();
  EXPECT_EQ(admitted, 1);
  EXPECT_EQ(replaced, 0);
  gate.End();
}

TEST(MoveGate, APlanWaitsForMovesAndComesBeforeLaterMoves) {
  MoveGate gate;
  const int mover = 0;
  ASSERT_TRUE(gate.TryBegin(&mover, [] {}));
  absl::Notification shut, finish, moved;
  std::thread planning([&] {
    const MoveGate::KeptShut plan(&gate);
    shut.Notify();
    finish.WaitForNotification();
  });
  while (gate.TryBegin(&mover, [] {})) gate.End();  // until the plan has come
  EXPECT_FALSE(shut.HasBeenNotified());
  gate.End();
  shut.WaitForNotification();
  std::thread moving([&] {
    gate.Begin();
    moved.Notify();
    gate.End();
  });
  EXPECT_FALSE(moved.HasBeenNotified());
  finish.Notify();
  planning.join();
  moving.join();
}

}  // namespace
}  // namespace ballast::services
