#include "ballast/client/collective/gloo_collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/collective/group.h"

namespace ballast::client {
namespace {

using testing::HasSubstr;

// A killed process leaves its peers with an error that names it, at once.
TEST(GlooCollective, AKilledPeerIsNamed) {
  const ScratchDirectory directory;
  const auto sit_down = [&](int rank) {
    auto rendezvous = FileRendezvous::Join({.directory = directory.path(), .rank = rank, .world_size = 2});
    EXPECT_TRUE(rendezvous.ok()) << rendezvous.status();
    auto seat = MakeGloo(rendezvous->get(), rank, 2, GlooOptions{});
    EXPECT_TRUE(seat.ok()) << seat.status();
    return *std::move(seat);
  };
  const pid_t child = fork();
  if (child == 0) {
    const auto seat = sit_down(1);
    if (!seat->Exchange("one").ok()) _exit(1);
    for (;;) pause();
  }
  const auto seat = sit_down(0);
  ASSERT_TRUE(seat->Exchange("one").ok());
  kill(child, SIGKILL);
  int wait_status = 0;
  ASSERT_EQ(waitpid(child, &wait_status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(wait_status));
  // Its sockets are closed now, so this writes to a broken connection, which must not raise SIGPIPE.
  const absl::Time start = absl::Now();
  const absl::Status status = seat->Exchange("two").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kRankMissing);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 lost rank 1 of 2"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
}

TEST(GlooCollective, ARankThatNeverConnectsIsMissing) {
  const ScratchDirectory directory;
  std::vector<std::unique_ptr<FileRendezvous>> joined(2);
  OnEveryRank(2, [&](int r) {
    auto rendezvous = FileRendezvous::Join({.directory = directory.path(), .rank = r, .world_size = 2});
    ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
    joined[r] = *std::move(rendezvous);
  });
  joined[1] = nullptr;  // died before it connected
  GlooOptions options;
  options.timeout = absl::Milliseconds(500);
  const absl::Status status = MakeGloo(joined[0].get(), 0, 2, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kRankMissing);
  EXPECT_THAT(std::string(status.message()), HasSubstr("connecting the group: rank 0 waited for 'gloo/"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 of 2 does not run"));
}

TEST(GlooCollective, BadHostAndInterfaceAreNamed) {
  const ScratchDirectory directory;
  auto rendezvous = FileRendezvous::Join({.directory = directory.path(), .rank = 0, .world_size = 1});
  ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
  GlooOptions options;
  options.interface = "nosuch0";
  absl::Status status = MakeGloo(rendezvous->get(), 0, 1, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 cannot listen at interface 'nosuch0'"));
  options.interface.clear();
  options.host = "no such host";
  status = MakeGloo(rendezvous->get(), 0, 1, options).status();
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("host 'no such host'"));
  options.host = "192.0.2.1";  // reserved for documentation
  status = MakeGloo(rendezvous->get(), 0, 1, options).status();
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no address of it belongs to this machine"));
  EXPECT_EQ(model::ReasonOf(MakeGloo(rendezvous->get(), 2, 2, {}).status()), model::kBadConfig);
}

}  // namespace
}  // namespace ballast::client
