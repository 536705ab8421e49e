// A message that many get, and a table of names.
#include "ballast/proto/base/shared_message.h"

#include <set>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "ballast/proto/model/named.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::model {
namespace {

TEST(SharedMessageTest, IsSerialisedOnceForAll) {
  v1::SealResponse response;
  response.mutable_prepared()->set_step(7);
  const SealAnswer answer = std::make_shared<SealAnswer::element_type>(response);
  EXPECT_EQ((*answer)->prepared().step(), 7);
  absl::Mutex mu;
  std::set<const std::string*> seen;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const std::string& bytes = answer->bytes();
      absl::MutexLock lock(&mu);
      seen.insert(&bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(seen.size(), 1);
  v1::SealResponse read;
  ASSERT_TRUE(read.ParseFromString(**seen.begin()));
  EXPECT_EQ(read.prepared().step(), 7);
}

enum class Colour { kRed, kBlue, kGrey };
constexpr Named<v1::Dtype, Colour> kColours[] = {{v1::DTYPE_F32, Colour::kRed, "red"},
                                                 {v1::DTYPE_BF16, Colour::kBlue, "blue"}};

TEST(NamedTest, ARowIsFoundByEachOfItsWords) {
  ASSERT_NE(Find(kColours, v1::DTYPE_BF16), nullptr);
  EXPECT_EQ(Find(kColours, v1::DTYPE_BF16)->value, Colour::kBlue);
  ASSERT_NE(Find(kColours, Colour::kRed), nullptr);
  EXPECT_EQ(Find(kColours, Colour::kRed)->proto, v1::DTYPE_F32);
  EXPECT_EQ(Find(kColours, Colour::kGrey), nullptr);
  EXPECT_EQ(Find(kColours, v1::DTYPE_UNSPECIFIED), nullptr);
  EXPECT_EQ(NameIn(kColours, Colour::kBlue), "blue");
  EXPECT_EQ(NameIn(kColours, Colour::kGrey), "unknown");
  EXPECT_EQ(*ByName(kColours, "colour", "red"), Colour::kRed);
}

TEST(NamedTest, AnUnknownNameIsToldTheKnownOnes) {
  const absl::Status status = ByName(kColours, "colour", "Red").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), kBadConfig);
  EXPECT_THAT(status.ToString(), ::testing::HasSubstr("colour 'Red': expected one of red, blue"));
}

}  // namespace
}  // namespace ballast::model
