// What several servers keep of a job, put together without a server.
#include "ballast/client/group/pins.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "ballast/tests/client/fake_server.h"

namespace ballast::client {
namespace {

struct Kept {
  int64_t version = 0;
  uint64_t epoch = 0;  // 0: the server does not tell
};

v1::GetJobResponse Server(uint64_t life, const std::vector<Kept>& versions) {
  v1::GetJobResponse answer;
  answer.set_life(life);
  for (const Kept& kept : versions) {
    answer.add_durable_versions(kept.version);
    answer.add_decided_by()->set_counter(kept.epoch);
  }
  return answer;
}

TEST(Pins, VersionsOfAllServersAscend) {
  const Pins pins = PinsOf({Server(1, {{9, 3}, {4, 2}}), Server(6, {{9, 3}})});
  ASSERT_EQ(pins.versions.size(), 2u);
  EXPECT_EQ(pins.life, 7u);
  EXPECT_EQ(pins.versions[0].kept.version, 4);
  EXPECT_EQ(pins.versions[0].servers, 1u);
  EXPECT_EQ(pins.versions[1].kept.version, 9);
  EXPECT_EQ(pins.versions[1].servers, 2u);
  EXPECT_EQ(pins.versions[1].kept.life, 7u);
  EXPECT_EQ(pins.versions[1].kept.decided_by.counter(), 3u);
  EXPECT_FALSE(pins.versions[1].differs);
}

TEST(Pins, DifferentStatesUnderANumberAreSeen) {
  const Pins pins = PinsOf({Server(1, {{9, 3}}), Server(2, {{9, 4}})});
  ASSERT_EQ(pins.versions.size(), 1u);
  EXPECT_TRUE(pins.versions[0].differs);
}

TEST(Pins, WhatOneServerDoesNotTellIsNotKnown) {
  const Pins pins = PinsOf({Server(1, {{9, 3}}), Server(0, {{9, 0}})});
  ASSERT_EQ(pins.versions.size(), 1u);
  EXPECT_EQ(pins.life, 0u);
  EXPECT_FALSE(pins.versions[0].differs);
  EXPECT_EQ(pins.versions[0].kept.decided_by.counter(), 0u);
}

// A rank may not know yet that a server has left the job.
TEST(Pins, WhoLeftTheJobKeepsNothingOfIt) {
  FakeServers servers(3);
  for (size_t i = 0; i < 3; ++i) {
    servers[i].on_get_job = [i](const v1::GetJobRequest&) {
      v1::GetJobResponse answer = i == 1 ? v1::GetJobResponse() : Server(1, {{9, 3}});
      answer.set_exists(i != 1);
      return answer;
    };
  }
  for (const bool may_change : {false, true}) {
    const auto pins = AskPins(servers.router.get(), "job", may_change, absl::Now() + absl::Seconds(60));
    ASSERT_TRUE(pins.ok()) << pins.status();
    ASSERT_EQ(pins->versions.size(), 1u);
    EXPECT_EQ(pins->versions[0].servers, 2u);
    EXPECT_EQ(pins->servers, may_change ? 2u : 3u);
    EXPECT_EQ(pins->life, may_change ? 1u : 0u);
  }
}

TEST(Pins, AVersionFromBeforeTheCopiesMayBeOnItsWay) {
  KeptVersion kept;
  v1::Table table;
  EXPECT_FALSE(IsBeforeFill(kept, table)) << "nobody ever copied a chunk";
  table.mutable_last_fill()->set_counter(5);
  kept.decided_by.set_counter(4);
  EXPECT_TRUE(IsBeforeFill(kept, table));
  kept.decided_by.set_counter(5);
  EXPECT_FALSE(IsBeforeFill(kept, table)) << "of the epoch that began to copy: such versions wait until all is copied";
  kept.decided_by.clear_counter();
  EXPECT_TRUE(IsBeforeFill(kept, table)) << "not told: it may be older";
}

}  // namespace
}  // namespace ballast::client
