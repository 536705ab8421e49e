// The contract of every Collective.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/collective/group.h"

namespace ballast::client {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr absl::Duration kShort = absl::Milliseconds(300);

std::byte Pattern(int from, int to, uint64_t i) {
  return static_cast<std::byte>(from * 31 + to * 17 + i * 7 + (i >> 8));
}

class CollectiveTest : public testing::TestWithParam<std::tuple<Backend, int>> {
 protected:
  Backend backend() const { return std::get<0>(GetParam()); }
  int world() const { return std::get<1>(GetParam()); }

  void RunAllGather(const std::vector<uint64_t>& sizes) {
    const auto group = MakeGroup(backend(), world(), kLong);
    std::vector<uint64_t> offsets(1);
    for (const uint64_t size : sizes) offsets.push_back(offsets.back() + size);
    OnEveryRank(world(), [&](int r) {
      std::vector<std::byte> all(offsets.back());
      for (uint64_t i = offsets[r]; i < offsets[r + 1]; ++i) all[i] = Pattern(r, 0, i);
      const absl::Status status = group[r]->AllGather(offsets, absl::MakeSpan(all));
      ASSERT_TRUE(status.ok()) << status;
      uint64_t wrong = 0;
      for (int from = 0; from < world(); ++from) {
        for (uint64_t i = offsets[from]; i < offsets[from + 1]; ++i) wrong += all[i] != Pattern(from, 0, i);
      }
      EXPECT_EQ(wrong, 0u);
    });
  }

  void RunAllToAll(const std::function<uint64_t(int, int)>& size, int rounds = 1) {
    const auto group = MakeGroup(backend(), world(), kLong);
    OnEveryRank(world(), [&](int r) {
      std::vector<std::vector<std::byte>> out(world()), in(world());
      std::vector<absl::Span<const std::byte>> to;
      std::vector<absl::Span<std::byte>> from;
      for (int peer = 0; peer < world(); ++peer) {
        out[peer].resize(size(r, peer));
        for (uint64_t i = 0; i < out[peer].size(); ++i) out[peer][i] = Pattern(r, peer, i);
        in[peer].resize(size(peer, r));
        to.push_back(out[peer]);
        from.push_back(absl::MakeSpan(in[peer]));
      }
      for (int round = 0; round < rounds; ++round) {
        for (auto& bytes : in) std::fill(bytes.begin(), bytes.end(), std::byte{0xee});
        const absl::Status status = group[r]->AllToAll(to, from);
        ASSERT_TRUE(status.ok()) << status;
        uint64_t wrong = 0;
        for (int peer = 0; peer < world(); ++peer) {
          for (uint64_t i = 0; i < in[peer].size(); ++i) wrong += in[peer][i] != Pattern(peer, r, i);
        }
        ASSERT_EQ(wrong, 0u);
      }
    });
  }
};

TEST_P(CollectiveTest, KnowsItsPlace) {
  const auto group = MakeGroup(backend(), world(), kLong);
  for (int r = 0; r < world(); ++r) {
    EXPECT_EQ(group[r]->rank(), r);
    EXPECT_EQ(group[r]->world_size(), world());
  }
}

TEST_P(CollectiveTest, ExchangeInRankOrder) {
  const auto group = MakeGroup(backend(), world(), kLong);
  OnEveryRank(world(), [&](int r) {
    for (int round = 0; round < 20; ++round) {
      // Lengths differ by rank, some are zero.
      const auto text = [&](int rank) { return std::string((rank + round) % 3 * 1000, static_cast<char>('a' + rank)); };
      const auto all = group[r]->Exchange(text(r));
      ASSERT_TRUE(all.ok()) << all.status();
      ASSERT_EQ(all->size(), static_cast<size_t>(world()));
      for (int rank = 0; rank < world(); ++rank) ASSERT_EQ((*all)[rank], text(rank));
    }
  });
}

TEST_P(CollectiveTest, ExchangeTakesOneMebibyteAndNoMore) {
  const auto group = MakeGroup(backend(), world(), kLong);
  OnEveryRank(world(), [&](int r) {
    const auto refused = group[r]->Exchange(std::string((1 << 20) + 1, 'x'));
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(model::ReasonOf(refused.status()), model::kBadLength);
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("1048577 bytes; expected at most 1048576"));
    // Refused before anything was sent: the group goes on.
    const auto all = group[r]->Exchange(std::string(1 << 20, 'x'));
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_EQ(all->back().size(), size_t{1} << 20);
  });
}

TEST_P(CollectiveTest, AllGatherOfUnevenParts) {
  std::vector<uint64_t> sizes;
  for (int r = 0; r < world(); ++r) sizes.push_back(1000 * static_cast<uint64_t>(r) + 13);
  RunAllGather(sizes);
}

TEST_P(CollectiveTest, AllGatherOfEmptyParts) {
  std::vector<uint64_t> sizes(world(), 0);
  RunAllGather(sizes);
  sizes.back() = 77;
  RunAllGather(sizes);
}

TEST_P(CollectiveTest, AllGatherOf8MebibyteParts) { RunAllGather(std::vector<uint64_t>(world(), uint64_t{8} << 20)); }

TEST_P(CollectiveTest, AllToAllOfUnevenAndEmptyParts) {
  RunAllToAll([](int from, int to) { return static_cast<uint64_t>((from * 3 + to * 5) % 4 * 999); }, 20);
}

TEST_P(CollectiveTest, AllToAllOf8MebibyteParts) {
  RunAllToAll([](int from, int to) { return (uint64_t{8} << 20) + static_cast<uint64_t>(from + to); }, 2);
}

TEST_P(CollectiveTest, BadArgumentsAreRefused) {
  const auto group = MakeGroup(backend(), world(), kLong);
  std::vector<std::byte> all(100);
  std::vector<uint64_t> offsets(world() + 1, 0);
  offsets.back() = 101;
  absl::Status status = group[0]->AllGather(offsets, absl::MakeSpan(all));
  EXPECT_EQ(model::ReasonOf(status), model::kBadLength);
  EXPECT_THAT(std::string(status.message()), HasSubstr("end at 101 in a buffer of 100 bytes"));
  offsets.pop_back();
  EXPECT_EQ(model::ReasonOf(group[0]->AllGather(offsets, absl::MakeSpan(all))), model::kBadLength);
  EXPECT_EQ(model::ReasonOf(group[0]->AllToAll({}, {})), model::kBadLength);
}

TEST_P(CollectiveTest, ARankThatLeavesGivesUnavailable) {
  if (world() == 1) GTEST_SKIP() << "needs a peer";
  auto group = MakeGroup(backend(), world(), kLong);
  const absl::Time start = absl::Now();
  OnEveryRank(world(), [&](int r) {
    ASSERT_TRUE(group[r]->Exchange("here").ok());
    if (r == world() - 1) {
      group[r] = nullptr;
      return;
    }
    const absl::Status status = group[r]->Exchange("more").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kRankMissing);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank "));
    // The group is unusable from then on.
    EXPECT_FALSE(group[r]->Exchange("more").ok());
  });
  EXPECT_LT(absl::Now() - start, kLong / 2);
}

TEST_P(CollectiveTest, ARankThatStandsStillGivesRankMissing) {
  if (world() == 1) GTEST_SKIP() << "needs a peer";
  const int still = world() - 1;
  // Gloo's limit is also that of connecting, which takes long on a busy machine.
  auto group = MakeGroup(backend(), world(), backend() == Backend::kLoopback ? kShort : absl::Seconds(5));
  std::atomic<int> named = 0;
  absl::Notification all_failed;
  std::atomic<int> left = world() - 1;
  OnEveryRank(world(), [&](int r) {
    if (r == still) {
      all_failed.WaitForNotification();
      return;
    }
    const absl::Status status = group[r]->Exchange("hello").status();
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable)) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kRankMissing);
    // As the last of all that have not come: others may be late.
    const bool tells =
        status.code() == absl::StatusCode::kDeadlineExceeded &&
        std::string(status.message()).find(absl::StrCat(" ", still, " of ", world())) != std::string::npos;
    if (tells) ++named;
    if (--left == 0) all_failed.Notify();
  });
  // The first rank to give up names the missing rank; further ranks may hear of the loss from the first.
  EXPECT_GE(named, 1);
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveTest,
                         testing::Combine(testing::Values(Backend::kLoopback, Backend::kGloo),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           const bool loopback = std::get<0>(info.param) == Backend::kLoopback;
                           return absl::StrCat(loopback ? "Loopback" : "Gloo", std::get<1>(info.param));
                         });

TEST(LoopbackCollective, SizesThatDoNotMatchAreAnError) {
  const auto group = MakeLoopbackGroup(2, kLong);
  OnEveryRank(2, [&](int r) {
    std::vector<std::byte> bytes(8 + r), target(8);
    std::vector<absl::Span<const std::byte>> to(2);
    std::vector<absl::Span<std::byte>> from(2);
    to[1 - r] = bytes;
    from[1 - r] = absl::MakeSpan(target);
    const absl::Status status = group[r]->AllToAll(to, from);
    // Rank 1's nine bytes do not fit rank 0's eight.
    if (r == 0) {
      EXPECT_EQ(model::ReasonOf(status), model::kBadLength);
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 sends rank 0 9 bytes where 8 are expected"));
    }
  });
}

}  // namespace
}  // namespace ballast::client
