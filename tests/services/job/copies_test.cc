// What a server tells of its copies, and what it takes of what rank 0 says of them.
#include "ballast/services/job/copies.h"

#include <optional>
#include <string>

#include "ballast/proto/model/copies.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CopiesPartTest : public JobPartTest {
 protected:
  // Servers s and t have all chunks.
  void OpenWithCopies(uint32_t replicas = 2) {
    v1::Table table;
    for (const char* id : {"s", "t"}) {
      v1::Member* const member = table.add_members();
      member->set_server_id(id);
      member->set_weight(1);
    }
    table.set_replicas(replicas);
    v1::Shard* const shard = table.add_shards();
    for (const uint32_t holder : {0u, 1u}) shard->add_holders(holder);
    table_ = table;
    Open();
  }
  v1::SealResponse Told(int64_t step) {
    v1::SealResponse answer;
    Locked([&] { copies_.AddDigests(step, &answer); });
    return answer;
  }
  static v1::DifferingCopies Differing(uint64_t chunk, int64_t version, const std::string& other = "t") {
    v1::DifferingCopies differing;
    differing.set_chunk(chunk);
    differing.set_version(version);
    for (const std::string& id : {std::string("s"), other}) {
      v1::DifferingCopies::Copy* const copy = differing.add_copies();
      copy->set_server_id(id);
      copy->add_crc32c(id == "s" ? 1 : 2);
    }
    return differing;
  }
  void Note(const v1::DifferingCopies& differing) {
    google::protobuf::RepeatedPtrField<v1::DifferingCopies> all;
    *all.Add() = differing;
    Locked([&] { copies_.Note(all); });
  }
  v1::JobStatus Status() {
    v1::JobStatus status;
    Locked([&] { copies_.Describe(&status); });
    return status;
  }
  uint64_t counted() const { return core_.counters.differing_copies; }

  Copies copies_{&core_};
};

TEST_F(CopiesPartTest, DigestsOfTheVersionWhoseTurnItIsAreTold) {
  OpenWithCopies();
  Locked([&] {
    chunks_[2]->SetDigested({.version = 66, .arrays = {10, 11, 12}});
    chunks_[3]->SetDigested({.version = 3, .arrays = {1, 2, 3}});
  });
  const v1::SealResponse told = Told(66 + model::kDigestLag);
  ASSERT_EQ(told.digests_size(), 1);
  EXPECT_EQ(told.digests(0).chunk(), 2u);
  EXPECT_EQ(told.digests(0).version(), 66);
  EXPECT_THAT(told.digests(0).crc32c(), ElementsAre(10u, 11u, 12u));
  EXPECT_EQ(Told(67 + model::kDigestLag).digests_size(), 0);
  // What was voided is not told.
  Locked([&] { chunks_[2]->Void(66); });
  EXPECT_EQ(Told(66 + model::kDigestLag).digests_size(), 0);
}

TEST_F(CopiesPartTest, WithoutCopiesNothingIsTold) {
  OpenWithCopies(/*replicas=*/1);
  Locked([&] { chunks_[2]->SetDigested({.version = 66, .arrays = {10, 11, 12}}); });
  EXPECT_EQ(Told(66 + model::kDigestLag).digests_size(), 0);
}

TEST_F(CopiesPartTest, ADifferenceIsCountedOnceAndLastsUntilTheNextComparisonIsOver) {
  OpenWithCopies();
  StepOfValues(1);
  Note(Differing(2, 0));
  Note(Differing(2, 0));  // the Commit comes again
  EXPECT_EQ(counted(), 1u);
  EXPECT_EQ(Status().differing_chunks(), 1u);
  EXPECT_THAT(Status().differing(),
              ElementsAre("chunk 2 at version 0: the master has CRC32C 00000001 on 's', 00000002 on 't'"));
  Note(Differing(4, -model::kDifferenceLasts));
  EXPECT_EQ(Status().differing_chunks(), 2u);
  Note(Differing(3, -model::kDifferenceLasts - 1));
  EXPECT_EQ(counted(), 3u);
  EXPECT_EQ(Status().differing_chunks(), 2u);
  EXPECT_THAT(Status().differing(0), HasSubstr("chunk 2 "));
}

TEST_F(CopiesPartTest, WhatCannotBeIsPassedOver) {
  OpenWithCopies();
  StepOfValues(1);
  Note(Differing(2, 1));               // a step that is not decided
  Note(Differing(chunks_.size(), 0));  // no such chunk
  Note(Differing(2, 0, "nobody"));     // no member
  v1::DifferingCopies others = Differing(2, 0);
  others.mutable_copies(0)->set_server_id("t");  // not this server's
  Note(others);
  EXPECT_EQ(counted(), 0u);
  EXPECT_EQ(Status().differing_chunks(), 0u);
}

TEST_F(CopiesPartTest, AServerThatLeavesTakesItsDifferencesAlong) {
  OpenWithCopies();
  StepOfValues(1);
  Note(Differing(2, 0));
  Locked([&] { copies_.Opened(*core_.state.plan(), /*forgets=*/false); });
  EXPECT_EQ(Status().differing_chunks(), 1u);
  const auto alone = PlanOf(spec_);
  Locked([&] { copies_.Opened(*alone, /*forgets=*/false); });
  EXPECT_EQ(Status().differing_chunks(), 0u);
  Note(Differing(2, 0));
  Locked([&] { copies_.Opened(*core_.state.plan(), /*forgets=*/true); });
  EXPECT_EQ(Status().differing_chunks(), 0u);
}

}  // namespace
}  // namespace ballast::services
