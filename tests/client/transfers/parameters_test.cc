// Working parameters, pulled to their places.
#include "ballast/client/transfers/parameters.h"

#include <cstring>
#include <memory>
#include <vector>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/transfers/transfers_fixture.h"

namespace ballast::client {
namespace {

class ParametersTest : public TransfersTest {
 protected:
  ParametersTest() : TransfersTest(/*world_size=*/1) {
    for (FakeServer* server : servers_.servers) {
      server->on_pull = [this](const v1::PullRequest& request, absl::Span<std::byte> to) {
        if (!fails_.ok()) return fails_;
        for (uint64_t i = 0; i < to.size() / 2; ++i) {
          const auto value =
              static_cast<kernels::bf16>(request.begin() + i + 7 * static_cast<uint64_t>(request.version()));
          std::memcpy(to.data() + 2 * i, &value, 2);
        }
        return absl::OkStatus();
      };
    }
  }
  // The element of the unit at a version.
  static kernels::bf16 At(uint64_t element, int64_t version) {
    return static_cast<kernels::bf16>(element + 7 * static_cast<uint64_t>(version));
  }
  void ExpectUnit(const UnitBuffer& buffer, uint32_t unit, int64_t version) {
    const auto* elements = reinterpret_cast<const kernels::bf16*>(buffer.data.get());
    for (const OwnedSlice& owned : view(unit).slices) {
      for (uint64_t i = owned.slice.range.begin; i < owned.slice.range.end; ++i) {
        ASSERT_EQ(elements[i], At(i, version)) << i;
      }
    }
  }
  size_t Pulls() { return servers_[0].pulled().size() + servers_[1].pulled().size(); }

  absl::Status fails_;
  Group group_{collective_[0].get(), servers_.router.get()};
  Parameters parameters_{&seat_, &group_};

 private:
  static inline std::vector<std::unique_ptr<Collective>> collective_ = MakeLoopbackGroup(1);
};

TEST_F(ParametersTest, AUnitIsPulledToItsPlacesAtTheSeatsVersion) {
  auto unit = parameters_.Acquire(0);
  ASSERT_TRUE(unit.ok()) << unit.status();
  ExpectUnit(**unit, 0, 6);
  EXPECT_EQ(parameters_.pulled_bytes(), 2 * view(0).owned_elements);
  for (uint32_t server = 0; server < 2; ++server) {
    for (const v1::PullRequest& pull : servers_[server].pulled()) {
      EXPECT_EQ(pull.content(), v1::CONTENT_WORKING);
      const uint64_t chunk = seat_.units->Find(pull.unit(), {pull.begin(), pull.end()})->slice.chunk;
      EXPECT_EQ(seat_.units->plan().SourceFor(chunk, seat_.rank()), server);
    }
  }
  parameters_.Return(*std::move(unit));
}

TEST_F(ParametersTest, APrefetchedUnitIsPulledOnceUnlessTheVersionChanged) {
  parameters_.Prefetch(0);
  parameters_.Prefetch(0);
  auto unit = parameters_.Acquire(0);
  ASSERT_TRUE(unit.ok()) << unit.status();
  EXPECT_EQ(Pulls(), view(0).slices.size());
  parameters_.Return(*std::move(unit));
  parameters_.Prefetch(1);
  seat_.version = 7;
  unit = parameters_.Acquire(1);
  ASSERT_TRUE(unit.ok()) << unit.status();
  ExpectUnit(**unit, 1, 7);
  parameters_.Return(*std::move(unit));
}

TEST_F(ParametersTest, AFailedPullIsTheAcquiresError) {
  fails_ = model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone, "past");
  EXPECT_EQ(model::ReasonOf(parameters_.Acquire(0).status()), model::kVersionGone);
  fails_ = absl::OkStatus();
  auto unit = parameters_.Acquire(0);
  ASSERT_TRUE(unit.ok()) << unit.status();
  ExpectUnit(**unit, 0, 6);
  parameters_.Return(*std::move(unit));
}

TEST_F(ParametersTest, ARangeIsReadInChunksWithItsContent) {
  std::vector<kernels::bf16> read(400);
  const model::Range range{65536 - 150, 65536 + 250};
  const absl::Span<std::byte> to(reinterpret_cast<std::byte*>(read.data()), 2 * read.size());
  ASSERT_EQ(parameters_.Read(0, range, v1::CONTENT_WORKING, 4, to), absl::OkStatus());
  for (uint64_t i = 0; i < read.size(); ++i) ASSERT_EQ(read[i], At(range.begin + i, 4));
  EXPECT_EQ(Pulls(), 2);
  // Masters are fp32, whatever the parameters.
  EXPECT_EQ(model::ReasonOf(parameters_.Read(0, range, v1::CONTENT_MASTER, 4, to)), model::kBadLength);
  std::vector<float> masters(read.size());
  ASSERT_EQ(parameters_.Read(0, range, v1::CONTENT_MASTER, 4,
                             {reinterpret_cast<std::byte*>(masters.data()), 4 * masters.size()}),
            absl::OkStatus());
  EXPECT_EQ(Pulls(), 4);
  for (uint32_t server = 0; server < 2; ++server) {
    const auto pulled = servers_[server].pulled();
    EXPECT_TRUE(pulled.empty() || pulled.back().content() == v1::CONTENT_MASTER);
  }
}

TEST_F(ParametersTest, RunsGoToTheirOwnPlaces) {
  std::vector<kernels::bf16> first(20), second(30);
  const std::vector<PullRun> runs = {{{10, 30}, {reinterpret_cast<std::byte*>(first.data()), 40}},
                                     {{60000, 60030}, {reinterpret_cast<std::byte*>(second.data()), 60}}};
  const std::shared_ptr<Tally> tally = parameters_.StartPull(0, runs);
  ASSERT_EQ(parameters_.AwaitPull(*tally, absl::Seconds(2)), absl::OkStatus());
  EXPECT_EQ(first[19], At(29, 6));
  EXPECT_EQ(second[0], At(60000, 6));
  EXPECT_GE(parameters_.pull_seconds(), 2);
}

TEST(BufferPoolTest, TheSmallestBufferThatFitsIsReused) {
  BufferPool pool;
  auto small = pool.Take(100), large = pool.Take(1000);
  EXPECT_GE(small->capacity, 100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small->data.get()) % 64, 0);
  const std::byte* const at = small->data.get();
  pool.Return(std::move(large));
  pool.Return(std::move(small));
  small = pool.Take(64);
  EXPECT_EQ(small->data.get(), at);
  large = pool.Take(5000);  // in place of one that is too small
  EXPECT_GE(large->capacity, 5000);
}

}  // namespace
}  // namespace ballast::client
