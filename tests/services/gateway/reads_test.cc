// Whose message is read when, and which reads give way.
#include "ballast/services/gateway/reads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace ballast::services {
namespace {

struct FakeRead final : Read {
  void Start() override { ++started; }
  void BeLate() override { ++late; }
  void GiveWay() override { ++gave_way; }
  void BeCrowdedOut() override { ++crowded_out; }
  int started = 0, late = 0, gave_way = 0, crowded_out = 0;
};

// Seconds apart from each other and from Reads::kPatience: a machine that stops the test meanwhile changes nothing.
constexpr ReadRules kPatientRules = {.in_turn_patience = absl::Seconds(4), .aside_patience = absl::Seconds(7)};

TEST(ReadsTest, OneCallersMessagesAreReadInTurn) {
  Reads reads;
  std::deque<FakeRead> of_one(Reads::kInTurnMax + 2);
  for (FakeRead& read : of_one) ASSERT_TRUE(reads.Ask("one", "its connection", false, &read));
  FakeRead other, push;
  ASSERT_TRUE(reads.Ask("two", "its connection", false, &other));
  ASSERT_TRUE(reads.Ask("one", "its connection", true, &push));
  EXPECT_EQ(other.started + push.started, 2);
  for (size_t i = 0; i < of_one.size(); ++i) EXPECT_EQ(of_one[i].started, i < Reads::kInTurnMax) << i;
  FakeRead& left = of_one[Reads::kInTurnMax];
  EXPECT_TRUE(reads.Leave(&left));
  EXPECT_FALSE(reads.Leave(&of_one[0]));  // is being read
  EXPECT_TRUE(reads.Come(&of_one[0]));
  EXPECT_EQ(of_one[Reads::kInTurnMax + 1].started, 0) << "while the bytes before are still there";
  reads.End(&of_one[0]);
  EXPECT_EQ(left.started, 0);
  EXPECT_EQ(of_one.back().started, 1);
}

// Half messages of one connection are not in the way of their caller's other connections.
TEST(ReadsTest, AMessageThatComesSlowlyYields) {
  Reads reads(kPatientRules);
  const absl::Time start = absl::Now();
  std::deque<FakeRead> slow(Reads::kInTurnMax + Reads::kAsideMax + 1);
  for (FakeRead& read : slow) ASSERT_TRUE(reads.Ask("one", "slow", false, &read));
  FakeRead other, first, second, third;
  ASSERT_TRUE(reads.Ask("two", "slow", false, &other));
  ASSERT_TRUE(reads.Ask("one", "prompt", false, &first));
  reads.Look(start);
  EXPECT_EQ(first.started, 0);
  reads.Look(absl::Now() + kPatientRules.in_turn_patience);
  EXPECT_EQ(first.started, 1);
  EXPECT_EQ(slow.back().started, 0);
  EXPECT_TRUE(reads.Come(&first));
  reads.End(&first);
  FakeRead late_comer;
  ASSERT_TRUE(reads.Ask("one", "slow", false, &late_comer));
  ASSERT_TRUE(reads.Ask("one", "prompt", false, &second));
  EXPECT_EQ(second.started, 1) << "before those of the slow connection, which came earlier";
  ASSERT_TRUE(reads.Ask("one", "prompt", false, &third));
  EXPECT_EQ(third.started, 0);
  reads.Look(absl::Now() + kPatientRules.in_turn_patience);
  EXPECT_EQ(third.started, 1);
  EXPECT_EQ(slow[0].gave_way, 1) << "one more would be too many";
  EXPECT_FALSE(reads.Come(&slow[0]));
  EXPECT_EQ(slow[1].gave_way, 0);
  EXPECT_EQ(slow.back().started, 0);
  reads.Look(absl::Now() + kPatientRules.aside_patience);
  EXPECT_EQ(slow[1].gave_way, 1) << "others wait to be read aside";
  EXPECT_EQ(slow[Reads::kInTurnMax + 1].started + slow.back().started, 2);
  EXPECT_EQ(late_comer.started, 0) << "so many at a time";
  EXPECT_EQ(other.gave_way + other.late, 0) << "nobody waits behind it";
}

// The read that takes the place of one that gave way does not give way itself before it starts: its call would be over.
TEST(ReadsTest, WhatIsAboutToStartDoesNotYield) {
  Reads reads;
  std::deque<FakeRead> slow(Reads::kInTurnMax * 2), later(Reads::kInTurnMax);
  FakeRead next;
  for (size_t i = 0; i < slow.size(); ++i) ASSERT_TRUE(reads.Ask("one", absl::StrCat(i), false, &slow[i]));
  reads.Look(absl::Now() + ReadRules().in_turn_patience);  // the first two go aside
  ASSERT_TRUE(reads.Ask("one", "0", false, &next));
  for (size_t i = 0; i < later.size(); ++i) ASSERT_TRUE(reads.Ask("one", absl::StrCat("later", i), false, &later[i]));
  EXPECT_EQ(next.started, 0);
  reads.Look(absl::Now() + ReadRules().aside_patience);
  EXPECT_EQ(next.started, 1);
  EXPECT_EQ(next.gave_way, 0);
  EXPECT_EQ(slow[0].gave_way + slow[1].gave_way + slow[2].gave_way, 3);
}

struct HeldRead final : Read {
  void Start() override {
    begun.Notify();
    go.WaitForNotification();
  }
  void BeLate() override { ++ended; }
  void GiveWay() override { ++ended; }
  void BeCrowdedOut() override { ++ended; }
  absl::Notification begun, go;
  std::atomic<int> ended = 0;
};

// Whose call is ended may be gone at once, and the thread that starts the read would use what is gone.
TEST(ReadsTest, WhatAnotherThreadIsAboutToStartIsNotEnded) {
  Reads reads;
  FakeRead kept, done, slow, other, later;
  HeldRead next;
  ASSERT_TRUE(reads.Ask("one", "slow", false, &kept));
  ASSERT_TRUE(reads.Ask("one", "slow", false, &done));
  ASSERT_TRUE(reads.Ask("one", "a", false, &slow));
  ASSERT_TRUE(reads.Ask("one", "b", false, &other));
  reads.Look(absl::Now() + ReadRules().in_turn_patience);  // the first two go aside
  ASSERT_EQ(slow.started + other.started, 2);
  ASSERT_TRUE(reads.Ask("one", "slow", false, &next));
  ASSERT_TRUE(reads.Ask("one", "c", false, &later));
  absl::SleepFor(ReadRules().in_turn_patience);  // so that their connection stays slow
  ASSERT_TRUE(reads.Come(&kept) && reads.Come(&done));
  std::thread starter([&] { reads.End(&done); });
  next.begun.WaitForNotification();
  reads.Look(absl::Now() + ReadRules().in_turn_patience);
  EXPECT_EQ(next.ended, 0);
  EXPECT_EQ(slow.gave_way, 1) << "the only one aside whose message may come";
  EXPECT_EQ(later.started, 1);
  reads.Look(absl::Now() + Reads::kPatience);
  EXPECT_EQ(next.ended, 0);
  EXPECT_EQ(other.late + later.late, 2);
  next.go.Notify();
  starter.join();
  reads.Look(absl::Now() + Reads::kPatience);
  EXPECT_EQ(next.ended, 1);
}

// A read that has just begun had no time for its message to come.
TEST(ReadsTest, WhatHasJustBegunDoesNotYield) {
  Reads reads;
  FakeRead kept, done, slow, other, next, later;
  ASSERT_TRUE(reads.Ask("one", "slow", false, &kept));
  ASSERT_TRUE(reads.Ask("one", "slow", false, &done));
  ASSERT_TRUE(reads.Ask("one", "a", false, &slow));
  ASSERT_TRUE(reads.Ask("one", "b", false, &other));
  reads.Look(absl::Now() + ReadRules().in_turn_patience);
  ASSERT_TRUE(reads.Ask("one", "slow", false, &next));
  ASSERT_TRUE(reads.Ask("one", "c", false, &later));
  absl::SleepFor(ReadRules().in_turn_patience);
  ASSERT_TRUE(reads.Come(&kept) && reads.Come(&done));
  const absl::Time before = absl::Now();  // the others have had their time by now
  reads.End(&done);
  ASSERT_EQ(next.started, 1);
  reads.Look(before);
  EXPECT_EQ(next.gave_way, 0);
  EXPECT_EQ(slow.gave_way, 1);
}

TEST(ReadsTest, AConnectionIsSlowUntilAMessageComesPromptly) {
  Reads reads(kPatientRules);
  std::deque<FakeRead> slow(Reads::kInTurnMax + 1);
  for (FakeRead& read : slow) ASSERT_TRUE(reads.Ask("one", "slow", false, &read));
  FakeRead prompt;
  ASSERT_TRUE(reads.Ask("one", "prompt", false, &prompt));
  reads.Look(absl::Now() + kPatientRules.in_turn_patience);
  EXPECT_TRUE(reads.Come(&prompt));
  reads.End(&prompt);
  FakeRead more;
  ASSERT_TRUE(reads.Ask("one", "slow", false, &more));
  EXPECT_EQ(more.started, 0) << "all places aside are taken";
  EXPECT_TRUE(reads.Come(&slow.back()));
  EXPECT_EQ(more.started, 1) << "in the turn, which is free";
}

// Of strangers, who are one caller whatever their hosts.
TEST(ReadsTest, NoHostFillsALineInWhichHostsTakeTurns) {
  Reads reads({.waiting_max = 4, .hosts_take_turns = true});
  std::deque<FakeRead> flood(Reads::kInTurnMax + 4);
  for (FakeRead& read : flood) ASSERT_TRUE(reads.Ask("all", "one:1", false, &read));
  FakeRead more, probe, same_host, probe_again;
  EXPECT_FALSE(reads.Ask("all", "one:1", false, &more));
  EXPECT_TRUE(reads.Ask("all", "two:1", false, &probe));
  EXPECT_EQ(flood[5].crowded_out, 1);
  EXPECT_TRUE(reads.Ask("all", "one:2", false, &same_host));
  EXPECT_EQ(flood[4].crowded_out, 1);
  EXPECT_FALSE(reads.Leave(&flood[4])) << "its call is over";
  EXPECT_TRUE(reads.Ask("all", "two:1", false, &probe_again));
  EXPECT_EQ(flood[3].crowded_out, 1) << "both are second of their connections, and the newer comes first";
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(reads.Come(&flood[i]));
    reads.End(&flood[i]);
  }
  EXPECT_EQ(flood[2].started + probe.started, 2);
  EXPECT_TRUE(reads.Come(&probe));
  reads.End(&probe);
  EXPECT_EQ(same_host.started, 1);
}

// A connection whose messages do not come gives its places in line to others, and nobody else's come to it.
TEST(ReadsTest, SlowConnectionsAreTheFirstToLeaveAFullLine) {
  Reads reads({.waiting_max = 4, .hosts_take_turns = true});
  std::deque<FakeRead> slow(Reads::kInTurnMax + 3), prompt(Reads::kInTurnMax);
  for (FakeRead& read : slow) ASSERT_TRUE(reads.Ask("all", "one:1", false, &read));
  ASSERT_TRUE(reads.Ask("all", "two:1", false, &prompt[0]));
  reads.Look(absl::Now() + ReadRules().in_turn_patience);
  EXPECT_EQ(prompt[0].started, 1);
  ASSERT_TRUE(reads.Ask("all", "two:1", false, &prompt[1]));
  FakeRead first, second;
  ASSERT_TRUE(reads.Ask("all", "two:1", false, &first));
  EXPECT_EQ(slow.back().crowded_out, 0);
  ASSERT_TRUE(reads.Ask("all", "two:1", false, &second));
  EXPECT_EQ(slow.back().crowded_out, 1);
}

// Halves of pushes take a bounded part of memory, and nobody else's turn.
TEST(ReadsTest, OneCallersPushesAreReadSoManyAtATime) {
  Reads reads;
  std::deque<FakeRead> pushes(Reads::kPushesMax + 2);
  for (FakeRead& read : pushes) ASSERT_TRUE(reads.Ask("one", "its connection", true, &read));
  for (size_t i = 0; i < pushes.size(); ++i) EXPECT_EQ(pushes[i].started, i < Reads::kPushesMax) << i;
  FakeRead seal, other;
  ASSERT_TRUE(reads.Ask("one", "its connection", false, &seal));
  ASSERT_TRUE(reads.Ask("two", "another", true, &other));
  EXPECT_EQ(seal.started + other.started, 2);
  EXPECT_TRUE(reads.Come(&pushes[3]));
  EXPECT_EQ(pushes[Reads::kPushesMax].started, 1) << "the bytes that came are counted elsewhere";
  reads.End(&pushes[3]);
  EXPECT_EQ(pushes.back().started, 0);
  EXPECT_FALSE(reads.Look(absl::Now() + ReadRules().in_turn_patience)) << "a push of a slow network takes its time";
  EXPECT_EQ(pushes[0].late + pushes[0].gave_way, 0);
  EXPECT_TRUE(reads.Look(absl::Now() + Reads::kPatience));
  EXPECT_EQ(pushes[0].late, 1);
  EXPECT_EQ(pushes.back().started, 1);
}

TEST(ReadsTest, AMessageThatDoesNotComeGivesItsTurnUp) {
  Reads reads;
  std::deque<FakeRead> of_one(Reads::kInTurnMax + 1);
  for (FakeRead& read : of_one) ASSERT_TRUE(reads.Ask("one", "its connection", false, &read));
  reads.Look(absl::Now());
  EXPECT_EQ(of_one[0].late, 0);
  reads.Look(absl::Now() + Reads::kPatience);
  for (size_t i = 0; i < Reads::kInTurnMax; ++i) {
    EXPECT_EQ(of_one[i].late, 1);
    EXPECT_FALSE(reads.Come(&of_one[i]));
  }
  EXPECT_EQ(of_one.back().started, 1);
  EXPECT_TRUE(reads.Come(&of_one.back()));
  reads.End(&of_one.back());
}

}  // namespace
}  // namespace ballast::services
