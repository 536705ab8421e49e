// What calls tell of the servers that they went to.
#include "ballast/client/transport/silence.h"

#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/tests/client/fake_server.h"

namespace ballast::client {
namespace {

class SilenceTest : public testing::Test {
 protected:
  SilenceTest() { silence_.Watch({&a_, &b_}, {true}); }
  void Note(Silence::Call call, const absl::Status& status, model::SteadyTime sent = model::SteadyTime::Now()) {
    silence_.Note(&a_, call, status, sent);
  }
  bool Answers() const { return silence_.Since(&a_) == model::SteadyTime::Never(); }

  FakeServer a_{"a"}, b_{"b"}, other_{"other"};
  Silence silence_;
  const absl::Status down_ = model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  const absl::Status busy_ = model::Error(absl::StatusCode::kUnavailable, model::kBusy, "too much to do");
  const absl::Status hangs_ = absl::DeadlineExceededError("no answer");
};

TEST_F(SilenceTest, AnyCallTellsThatNobodyListensAndAnyAnswerThatSomebodyDoes) {
  EXPECT_TRUE(silence_.IsReplaceable(&a_));
  EXPECT_FALSE(silence_.IsReplaceable(&b_));
  for (const auto call : {Silence::Call::kPatient, Silence::Call::kPrompt, Silence::Call::kLook}) {
    Note(call, down_);
    EXPECT_FALSE(Answers());
    EXPECT_EQ(silence_.first(), silence_.Since(&a_));
    Note(call, absl::CancelledError());
    EXPECT_FALSE(Answers()) << "nobody answered";
    Note(call, busy_);
    EXPECT_TRUE(Answers());
    EXPECT_EQ(silence_.first(), model::SteadyTime::Never());
  }
  EXPECT_EQ(silence_.Since(&other_), model::SteadyTime::Never());
}

// It lives, and others have all its chunks.
TEST_F(SilenceTest, AServerThatHasStoppedTheJobOrHasNothingOfItIsDown) {
  absl::Status stopped = model::Error(absl::StatusCode::kInternal, model::kIo, "job 'job' stopped on server 'a'");
  Note(Silence::Call::kPatient, stopped);
  EXPECT_TRUE(Answers()) << "a call may fail by its own disk access";
  model::SetDetail(model::kStopped, "1", &stopped);
  for (const absl::Status& status : {stopped, model::Error(absl::StatusCode::kNotFound, model::kUnknownJob, "none")}) {
    Note(Silence::Call::kPatient, status);
    EXPECT_FALSE(Answers());
    Note(Silence::Call::kLook, status);
    EXPECT_FALSE(Answers());
    silence_.Note(&b_, Silence::Call::kPatient, status, model::SteadyTime::Now());
    EXPECT_EQ(silence_.Since(&b_), model::SteadyTime::Never()) << "nobody has its chunks";
    Note(Silence::Call::kLook, absl::OkStatus());
    EXPECT_TRUE(Answers());
  }
}

TEST_F(SilenceTest, OnlyCallsThatAreAnsweredAtOnceTellThatAServerHangs) {
  Note(Silence::Call::kPatient, hangs_);
  EXPECT_TRUE(Answers()) << "it may wait at a server that lives";
  const model::SteadyTime sent = model::SteadyTime::Now();
  Note(Silence::Call::kLook, hangs_, sent);
  EXPECT_EQ(silence_.Since(&a_), sent) << "since it was asked";
  Note(Silence::Call::kLook, hangs_);
  EXPECT_EQ(silence_.Since(&a_), sent);
  Note(Silence::Call::kLook, absl::OkStatus());
  EXPECT_TRUE(Answers());
}

// Its disk may hang: then it answers looks.
TEST_F(SilenceTest, ALookDoesNotRefuteACommit) {
  Note(Silence::Call::kPrompt, hangs_);
  Note(Silence::Call::kLook, absl::OkStatus());
  EXPECT_FALSE(Answers());
  Note(Silence::Call::kPatient, absl::OkStatus());
  EXPECT_TRUE(Answers());
}

TEST_F(SilenceTest, WhatWasSentBeforeAnAnswerCountsSinceThatAnswer) {
  const model::SteadyTime sent = model::SteadyTime::Now() - absl::Seconds(10);
  Note(Silence::Call::kLook, hangs_, sent);
  EXPECT_GT(silence_.Since(&a_), sent + absl::Seconds(5)) << "it answered when it was first watched";
  Note(Silence::Call::kPatient, absl::OkStatus());
  const model::SteadyTime answered = model::SteadyTime::Now();
  Note(Silence::Call::kLook, down_, sent);
  EXPECT_LE(silence_.Since(&a_), answered);
  EXPECT_GT(silence_.Since(&a_), sent + absl::Seconds(5));
}

TEST_F(SilenceTest, EachServerIsAskedByOneLookAtATime) {
  const model::SteadyTime now = model::SteadyTime::Now();
  EXPECT_EQ(silence_.ToAsk(now), (std::vector<Transport*>{&a_, &b_}));
  EXPECT_TRUE(silence_.ToAsk(now + absl::Seconds(5)).empty());
  silence_.Asked(&b_, now + absl::Seconds(1));
  EXPECT_TRUE(silence_.ToAsk(now).empty());
  EXPECT_EQ(silence_.ToAsk(now + absl::Seconds(1)), (std::vector<Transport*>{&b_}));
}

}  // namespace
}  // namespace ballast::client
