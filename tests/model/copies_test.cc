#include "ballast/proto/model/copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace ballast::model {
namespace {

using ::testing::IsEmpty;

class CopiesTest : public ::testing::Test {
 protected:
  void Tell(const std::string& server, uint64_t chunk, int64_t version, const std::vector<uint32_t>& crc32c) {
    v1::ChunkDigest* const digest = told_[server].Add();
    digest->set_chunk(chunk);
    digest->set_version(version);
    digest->mutable_crc32c()->Add(crc32c.begin(), crc32c.end());
  }
  std::vector<v1::DifferingCopies> Find() const {
    std::vector<ToldDigests> told;
    for (const auto& [server, digests] : told_) told.push_back({server, &digests});
    return FindDiffering(told);
  }

  std::map<std::string, google::protobuf::RepeatedPtrField<v1::ChunkDigest>> told_;
};

TEST(CopiesTurn, EachChunkHasItsTurnOnceInAPeriod) {
  for (const uint64_t chunk : {0u, 1u, 63u, 64u, 1000u}) {
    std::set<int64_t> turns;
    for (int64_t step = 128; step < 128 + kDigestPeriod; ++step) {
      if (IsDigested(chunk, step)) turns.insert(step);
    }
    EXPECT_EQ(turns, std::set<int64_t>{128 + static_cast<int64_t>(chunk % 64)}) << chunk;
  }
}

TEST_F(CopiesTest, EqualCopiesAndSingleOnesDoNotDiffer) {
  EXPECT_THAT(Find(), IsEmpty());
  Tell("a", 5, 69, {1, 2, 3});
  Tell("b", 5, 69, {1, 2, 3});
  Tell("a", 69, 69, {4, 5, 6});
  Tell("c", 133, 69, {7, 8, 9});
  told_["d"];  // a server may tell nothing: it was restarted, or copies the chunk
  EXPECT_THAT(Find(), IsEmpty());
}

TEST_F(CopiesTest, DigestsOfDifferentVersionsSayNothing) {
  Tell("a", 5, 69, {1, 2, 3});
  Tell("b", 5, 133, {9, 9, 9});
  EXPECT_THAT(Find(), IsEmpty());
}

TEST_F(CopiesTest, ADifferenceNamesAllServersThatToldOfTheChunk) {
  Tell("a", 5, 69, {1, 2, 3});
  Tell("b", 5, 69, {1, 0x2b, 3});
  Tell("c", 5, 69, {1, 2, 3});
  Tell("a", 4, 69, {1, 1, 1});
  Tell("c", 4, 69, {0xabcd, 1, 1});
  Tell("b", 6, 69, {1});
  Tell("c", 6, 69, {1});
  const auto differing = Find();
  ASSERT_EQ(differing.size(), 2u);
  EXPECT_EQ(ShowDiffering(differing[0]),
            "chunk 4 at version 69: the master has CRC32C 00000001 on 'a', 0000abcd on 'c'");
  EXPECT_EQ(ShowDiffering(differing[1]),
            "chunk 5 at version 69: moment 1 has CRC32C 00000002 on 'a', 0000002b on 'b', 00000002 on 'c'");
  ASSERT_EQ(differing[1].copies_size(), 3);
  EXPECT_EQ(differing[1].copies(1).crc32c(1), 0x2bu);
}

TEST_F(CopiesTest, AnArrayThatOnlyOneServerHasIsADifference) {
  Tell("a", 5, 69, {1, 2, 3});
  Tell("b", 5, 69, {1, 2});
  const auto differing = Find();
  ASSERT_EQ(differing.size(), 1u);
  EXPECT_EQ(ShowDiffering(differing[0]), "chunk 5 at version 69: moment 2 has CRC32C 00000003 on 'a', none on 'b'");
}

}  // namespace
}  // namespace ballast::model
