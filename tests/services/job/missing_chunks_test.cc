// Which of the chunks that a server lacks a round of copies looks at.
#include "ballast/services/job/missing_chunks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kLacking = CopyNeed::kLacking, kMoving = CopyNeed::kMoving;

class MissingChunksTest : public testing::Test {
 protected:
  // Chunks with an odd number lack copies.
  void Update(uint64_t changes) {
    missing_.Update({.plan = nullptr, .changes = changes, .unfilled = &unfilled_}, [this](uint64_t chunk) {
      ++judged_;
      return chunk % 2 == 1 ? kLacking : kMoving;
    });
  }
  std::vector<uint64_t> All(CopyNeed need) const {
    std::vector<uint64_t> chunks;
    for (const uint64_t* at = missing_.First(need); at != nullptr; at = missing_.Next(need, *at)) chunks.push_back(*at);
    return chunks;
  }

  std::map<uint64_t, int64_t> unfilled_ = {{1, 5}, {2, 5}, {3, 5}, {4, 5}, {7, 5}};
  int judged_ = 0;
  MissingChunks missing_;
};

TEST_F(MissingChunksTest, EachNeedHasItsOwnInOrder) {
  EXPECT_THAT(All(kLacking), IsEmpty());
  Update(1);
  EXPECT_THAT(All(kLacking), ElementsAre(1, 3, 7));
  EXPECT_THAT(All(kMoving), ElementsAre(2, 4));
}

TEST_F(MissingChunksTest, AChunkIsJudgedOnceForEachChange) {
  Update(1);
  EXPECT_EQ(judged_, 5);
  for (const uint64_t chunk : {3, 2}) {
    unfilled_.erase(chunk);
    missing_.Filled(chunk);
    Update(1);
  }
  EXPECT_EQ(judged_, 5);
  EXPECT_THAT(All(kLacking), ElementsAre(1, 7));
  EXPECT_THAT(All(kMoving), ElementsAre(4));
  unfilled_[2] = 9;  // it is damaged
  Update(2);
  EXPECT_EQ(judged_, 5 + 4);
  EXPECT_THAT(All(kMoving), ElementsAre(2, 4));
}

TEST_F(MissingChunksTest, ATurnGoesOnWhereItStayed) {
  Update(1);
  EXPECT_EQ(missing_.Stay(kLacking, 3), 0u);
  EXPECT_THAT(All(kLacking), ElementsAre(3, 7));
  EXPECT_THAT(All(kMoving), ElementsAre(2, 4));
  missing_.Filled(3);
  EXPECT_THAT(All(kLacking), ElementsAre(7));
  EXPECT_EQ(missing_.Stay(kLacking, 0), 3u);
  EXPECT_THAT(All(kLacking), ElementsAre(1, 7));
  missing_.Stay(kMoving, 4);
  missing_.Return();
  EXPECT_THAT(All(kMoving), ElementsAre(2, 4));
}

}  // namespace
}  // namespace ballast::services
