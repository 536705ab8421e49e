// What every backend's collectives have in common: checks, own parts, and that an error is for good.
#include "ballast/client/collective/backends/pairwise_collective.h"

#include <cstring>
#include <string>
#include <vector>

#include "ballast/proto/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;

// Rank 1 of three; the others send `byte` in every place that they fill.
class EchoingCollective : public PairwiseCollective {
 public:
  EchoingCollective() : PairwiseCollective(1, 3) {}
  absl::Status Transfer(absl::Span<const Source> to, absl::Span<const Target> from) override {
    ++transfers;
    EXPECT_TRUE(to[1].empty() && from[1].empty()) << "to itself";
    if (!fails.ok()) return fails;
    sent.assign({to[0].size(), to[2].size()});
    for (const size_t r : {0, 2}) std::memset(from[r].data(), byte, from[r].size());
    return absl::OkStatus();
  }

  int transfers = 0;
  uint8_t byte = 0;
  absl::Status fails;
  std::vector<size_t> sent;
};

TEST(PairwiseCollectiveTest, AGatherKeepsTheOwnPart) {
  EchoingCollective collective;
  collective.byte = 7;
  std::vector<std::byte> all(6, std::byte{1});
  const std::vector<uint64_t> offsets = {0, 2, 5, 6};
  ASSERT_EQ(collective.AllGather(offsets, absl::MakeSpan(all)), absl::OkStatus());
  EXPECT_THAT(all, ElementsAre(std::byte{7}, std::byte{7}, std::byte{1}, std::byte{1}, std::byte{1}, std::byte{7}));
  EXPECT_THAT(collective.sent, ElementsAre(3, 3));
}

TEST(PairwiseCollectiveTest, ArgumentsThatDoNotFitSendNothingAndBreakNothing) {
  EchoingCollective collective;
  std::vector<std::byte> all(6);
  for (const std::vector<uint64_t>& offsets :
       {std::vector<uint64_t>{0, 2, 5}, std::vector<uint64_t>{0, 3, 2, 6}, std::vector<uint64_t>{0, 2, 5, 7}}) {
    EXPECT_EQ(model::ReasonOf(collective.AllGather(offsets, absl::MakeSpan(all))), model::kBadLength);
  }
  const std::vector<absl::Span<const std::byte>> to(3, absl::MakeConstSpan(all).subspan(0, 2));
  const std::vector<absl::Span<std::byte>> from = {absl::MakeSpan(all).subspan(0, 2), absl::MakeSpan(all).subspan(2, 1),
                                                   absl::MakeSpan(all).subspan(3, 2)};
  EXPECT_EQ(model::ReasonOf(collective.AllToAll(to, from)), model::kBadLength);
  EXPECT_EQ(model::ReasonOf(collective.Exchange(std::string((1 << 20) + 1, 'x')).status()), model::kBadLength);
  EXPECT_EQ(collective.transfers, 0);
  EXPECT_TRUE(collective.Exchange("").ok());
}

TEST(PairwiseCollectiveTest, AnExchangeSendsTheSizeThenTheBytes) {
  EchoingCollective collective;
  const auto all = collective.Exchange("mine");  // the others announce nothing
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT(*all, ElementsAre("", "mine", ""));
  EXPECT_THAT(collective.sent, ElementsAre(4, 4));
  collective.byte = 0xff;
  EXPECT_EQ(model::ReasonOf(collective.Exchange("mine").status()), model::kBadLength)
      << "an announcement of 2^64 bytes";
}

TEST(PairwiseCollectiveTest, AFailedTransferIsForGood) {
  EchoingCollective collective;
  collective.fails = absl::UnavailableError("rank 2 is gone");
  EXPECT_EQ(collective.Exchange("mine").status(), collective.fails);
  collective.fails = absl::OkStatus();
  EXPECT_EQ(collective.Exchange("mine").status(), absl::UnavailableError("rank 2 is gone"));
  EXPECT_EQ(collective.transfers, 1);
}

}  // namespace
}  // namespace ballast::client
