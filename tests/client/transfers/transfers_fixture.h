// One rank's seat on two servers that keep what they get.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ballast/client/transfers/seat.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/tests/client/fake_server.h"
#include "gtest/gtest.h"

namespace ballast::client {

// Rank 0 of two, on two servers.
class TransfersTest : public ::testing::Test {
 protected:
  explicit TransfersTest(uint32_t world_size = 2) {
    auto plan = model::EpochPlan::Make(OpenOnFakes(2, world_size));
    EXPECT_TRUE(plan.ok()) << plan.status();
    seat_.job = "job";
    seat_.router = servers_.router.get();
    const auto shared = std::make_shared<const model::EpochPlan>(*std::move(plan));
    seat_.units = std::make_shared<UnitMap>(shared, 0);
    servers_.router->SetRoutes(shared, absl::Seconds(5));
    seat_.version = 6;
    seat_.attempt = 2;
    seat_.step_timeout = absl::Minutes(2);
  }
  const UnitView& view(uint32_t unit) const { return seat_.units->unit(unit); }
  // A gradient of the unit whose i-th own element is i.
  std::vector<kernels::bf16> GradientOf(uint32_t unit) const {
    std::vector<kernels::bf16> gradient(view(unit).owned_elements);
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<kernels::bf16>(i);
    return gradient;
  }
  static absl::Span<const std::byte> BytesOf(const std::vector<kernels::bf16>& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(kernels::bf16)};
  }
  // All that the servers got, as (unit, first element) -> payload; each from the server that has the chunk.
  std::map<std::pair<uint32_t, uint64_t>, std::string> Received(v1::SliceKind kind) {
    std::map<std::pair<uint32_t, uint64_t>, std::string> received;
    for (uint32_t server = 0; server < 2; ++server) {
      for (const FakeServer::Pushed& push : servers_[server].pushed()) {
        if (push.header.kind() != kind) continue;
        const OwnedSlice* owned = seat_.units->Find(push.header.unit(), {push.header.begin(), push.header.end()});
        EXPECT_NE(owned, nullptr) << push.header.ShortDebugString();
        EXPECT_TRUE(seat_.units->plan().Has(server, owned->slice.chunk));
        EXPECT_EQ(push.header.job(), "job");
        EXPECT_EQ(push.header.epoch().counter(), 3);
        EXPECT_EQ(push.header.step(), 7);
        EXPECT_EQ(push.header.attempt(), 2);
        EXPECT_EQ(push.header.rank(), 0);
        received[{push.header.unit(), push.header.begin()}] = push.payload;
      }
    }
    return received;
  }
  size_t Count() { return servers_[0].pushed().size() + servers_[1].pushed().size(); }

  FakeServers servers_{2};
  Seat seat_;
};

}  // namespace ballast::client
