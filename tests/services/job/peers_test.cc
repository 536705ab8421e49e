#include "ballast/services/job/peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/proto/model/epoch_plan.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

v1::FenceRequest Fence(const std::string& id, const std::string& page, int count = 1) {
  v1::FenceRequest request;
  for (int i = 0; i < count; ++i) {
    v1::Peer* peer = request.add_peers();
    peer->set_server_id(id);
    peer->set_page(page);
  }
  return request;
}

TEST(Peers, TellsAllOtherMembersWithTheirPages) {
  Peers peers;
  peers.Set(Fence("b", "10.0.0.2:9070"));
  v1::JobStatus status;
  for (const char* id : {"a", "b", "c"}) status.add_member_ids(id);
  peers.Tell("a", &status);
  ASSERT_EQ(status.peers_size(), 2);
  EXPECT_EQ(status.peers(0).server_id(), "b");
  EXPECT_EQ(status.peers(0).page(), "10.0.0.2:9070");
  EXPECT_EQ(status.peers(1).server_id(), "c");
  EXPECT_EQ(status.peers(1).page(), "");
  // The next fence names all servers anew.
  peers.Set(Fence("c", "c:1"));
  status.clear_peers();
  peers.Tell("a", &status);
  EXPECT_EQ(status.peers(0).page(), "");
  EXPECT_EQ(status.peers(1).page(), "c:1");
}

TEST(Peers, TakesAddressesAlone) {
  for (const char* page : {"", "host:1", "10.0.0.2:9070", "[::1]:65535"}) {
    EXPECT_EQ(Peers::Check(Fence("b", page)), absl::OkStatus()) << page;
  }
  for (const std::string page :
       {"javascript:alert(1)", "host", "host:0", "host:65536", "host:1/path", "a b:1", "\"><b>:1", "user@host:1"}) {
    const absl::Status refused = Peers::Check(Fence("b", page));
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << page;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("the page of peer 'b' is not host:port")) << page;
  }
  EXPECT_FALSE(Peers::Check(Fence("b", std::string(300, 'h') + ":1")).ok());
  EXPECT_FALSE(Peers::Check(Fence("", "host:1")).ok());
  EXPECT_FALSE(Peers::Check(Fence(std::string(65, 'x'), "host:1")).ok());
  EXPECT_TRUE(Peers::Check(Fence("b", "", model::kMembersMax)).ok());
  EXPECT_FALSE(Peers::Check(Fence("b", "", model::kMembersMax + 1)).ok());
}

}  // namespace
}  // namespace ballast::services
