#include "ballast/client/group/members.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/fake_server.h"

namespace ballast::client {
namespace {

std::string PageOf(const std::string& told, const std::string& reached) {
  v1::IdentifyResponse identity;
  identity.set_server_id("one");
  identity.set_page(told);
  const v1::Peer peer = MakePeer(identity, reached);
  EXPECT_EQ(peer.server_id(), "one");
  return peer.page();
}

TEST(Members, APageIsWhereABrowserElsewhereFindsIt) {
  EXPECT_EQ(PageOf("10.0.0.2:9070", "node2:7070"), "10.0.0.2:9070");
  EXPECT_EQ(PageOf("0.0.0.0:9070", "node2:7070"), "node2:9070");
  EXPECT_EQ(PageOf("[::]:9070", "[fd00::2]:7070"), "[fd00::2]:9070");
  EXPECT_EQ(PageOf("127.0.0.1:9070", "127.0.0.1:7070"), "127.0.0.1:9070");
  EXPECT_EQ(PageOf("127.0.0.1:9070", "localhost:7070"), "127.0.0.1:9070");
  // On another machine loopback would be the reader's own.
  EXPECT_EQ(PageOf("127.0.0.1:9070", "node2:7070"), "");
  EXPECT_EQ(PageOf("[::1]:9070", "10.0.0.2:7070"), "");
}

TEST(Members, NoPageWhereNoneIsTold) {
  EXPECT_EQ(PageOf("", "node2:7070"), "");
  EXPECT_EQ(PageOf("javascript:alert(1)", "node2:7070"), "");
  EXPECT_EQ(PageOf("10.0.0.2:9070", "embedded"), "");
}

TEST(Members, OnlySlicesNeedSharedMemory) {
  auto made = std::make_unique<FakeServer>("one");
  FakeServer* const server = made.get();
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(std::move(made));
  Router router(std::move(transports), {});
  const JobKey key(nullptr, "job");
  for (const Members::Uses uses : {Members::Uses::kSlices, Members::Uses::kCalls}) {
    Members members(&router, uses);
    ASSERT_EQ(
        members.Identify(key, Spares::kConnect, {absl::Seconds(2), absl::Seconds(2)}, absl::Now() + absl::Seconds(10)),
        absl::OkStatus());
    EXPECT_EQ(members.ids(), std::vector<std::string>{"one"});
    EXPECT_EQ(server->shares_memory, uses == Members::Uses::kSlices);
  }
}

// Nobody would wait for its answer.
TEST(Members, WhoBecameAMemberSinceTheServersWereAskedIsNamed) {
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(std::make_unique<FakeServer>("one"));
  Router router(std::move(transports), {});
  Members members(&router);
  ASSERT_EQ(members.Identify(JobKey(nullptr, "job"), Spares::kConnect, {absl::Seconds(2), absl::Seconds(2)},
                             absl::Now() + absl::Seconds(10)),
            absl::OkStatus());
  v1::Table before, now;
  before.add_members()->set_server_id("silent");
  now = before;
  now.add_members()->set_server_id("one");
  EXPECT_EQ(members.CheckNoneIsNew("job", before, now), absl::OkStatus());
  now.add_members()->set_server_id("two");
  const absl::Status is_new = members.CheckNoneIsNew("job", before, now);
  EXPECT_EQ(model::ReasonOf(is_new), model::kStaleEpoch);
  EXPECT_TRUE(absl::StrContains(is_new.message(), "has just made server 'two' a member")) << is_new;
}

}  // namespace
}  // namespace ballast::client
