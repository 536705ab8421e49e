// The beats and marks of a server's entry, against an etcd of this test's own.
#include "ballast/services/daemon/registration.h"

#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/tests/client/transport/small_etcd.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::services {
namespace {

using client::SmallEtcd;

constexpr char kEntryKey[] = "/test/servers/a";
constexpr char kMarkKey[] = "/test/directories/a/0000000000000007";

// Also for what must come only at some time, whenever that is.
void Until(const std::function<bool()>& holds) {
  const absl::Time end = absl::Now() + absl::Minutes(2);
  while (!holds() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(5));
  ASSERT_TRUE(holds());
}

class RegistrationTest : public ::testing::Test {
 protected:
  void Register() {
    registration = std::make_unique<Registration>(
        *registry::ParseRegistryUrl(etcd.url()), directory.path(),
        Registration::Times{.lease = absl::Milliseconds(300), .mark = absl::ZeroDuration()});
    ASSERT_EQ(registration->made(), absl::OkStatus());
    Announce();
  }
  void Announce() {
    v1::ServerEntry entry;
    entry.set_server_id("a");
    entry.set_disk(7);
    entry.set_address("127.0.0.1:1");
    registration->Announce(entry, [this](v1::ServerEntry*) {
      ++beats;
      return changes.load();
    });
  }
  uint64_t Marked() const {
    v1::DirectoryMark mark;
    (void)google::protobuf::util::JsonStringToMessage(etcd.Get(kMarkKey), &mark);
    return mark.count();
  }
  bool registered() const { return !etcd.Get(kEntryKey).empty(); }
  // etcd's mark is of a newer copy than any here.
  void MarkAnotherCopy() { etcd.Set(kMarkKey, R"({"disk":"7","count":"50","draw":"1"})"); }
  // Two whole beats.
  void AwaitBeats() {
    const int before = beats;
    Until([&] { return beats >= before + 3; });
  }

  SmallEtcd etcd;
  ScratchDirectory directory;
  std::atomic<int> beats = 0;
  std::atomic<uint64_t> changes = 0;
  std::unique_ptr<Registration> registration;
};

TEST_F(RegistrationTest, MarksOnlyAfterChangesAndAtTheEnd) {
  Register();
  ASSERT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  Until([&] { return Marked() == 1; });
  AwaitBeats();
  EXPECT_EQ(Marked(), 1u) << "nothing has changed";
  ++changes;
  Until([&] { return Marked() == 2; });
  AwaitBeats();
  EXPECT_EQ(Marked(), 2u);
  registration.reset();
  EXPECT_EQ(Marked(), 2u);
  EXPECT_FALSE(registered());
}

TEST_F(RegistrationTest, TheLastChangesAreMarkedAtTheEnd) {
  registration =
      std::make_unique<Registration>(*registry::ParseRegistryUrl(etcd.url()), directory.path(), Registration::Times());
  Announce();
  ASSERT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  Until([&] { return Marked() == 1; });
  ++changes;
  registration.reset();
  EXPECT_EQ(Marked(), 2u);
}

TEST_F(RegistrationTest, AnOlderCopyHasNoEntry) {
  MarkAnotherCopy();
  Register();
  const absl::Status named = registration->AwaitName(nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(named)) << named;
  EXPECT_EQ(model::ReasonOf(named), model::kBadConfig);
  EXPECT_FALSE(registered());
}

TEST_F(RegistrationTest, WithoutTheRightToMarksAServerRegisters) {
  etcd.Refuse("/directories/");
  Register();
  EXPECT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  EXPECT_TRUE(registered());
  etcd.Refuse("");
  Until([&] { return Marked() == 1; });
}

TEST_F(RegistrationTest, ADirectoryThatTakesNoMarkKeepsNoServerFromItsName) {
  std::filesystem::create_directory(directory / "ballast-mark.new");
  Register();
  EXPECT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  AwaitBeats();
  EXPECT_TRUE(registered());
  EXPECT_EQ(Marked(), 0u);
  std::filesystem::remove(directory / "ballast-mark.new");
  Until([&] { return Marked() == 1; });
}

TEST_F(RegistrationTest, AMarkThatCannotBeReadIsNoOlderOne) {
  MarkAnotherCopy();
  std::filesystem::create_directory(directory / "ballast-mark");  // read fails (EISDIR)
  Register();
  EXPECT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  AwaitBeats();
  EXPECT_TRUE(registered());
  // It is read again, and then tells.
  std::filesystem::remove(directory / "ballast-mark");
  Until([&] { return !registered(); });
  const absl::Status named = registration->AwaitName(nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(named)) << named;
}

TEST_F(RegistrationTest, AfterABeatThatFailedTheNextAnnounceLearnsOfAnOlderCopy) {
  MarkAnotherCopy();
  etcd.SetSilent(true);
  Register();
  EXPECT_EQ(registration->AwaitName(nullptr), absl::OkStatus()) << "a server starts without etcd";
  etcd.SetSilent(false);
  Announce();
  const absl::Status named = registration->AwaitName(nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(named)) << named;
}

TEST_F(RegistrationTest, ABeatThatFindsAnOlderCopyIsNotForgotten) {
  MarkAnotherCopy();
  etcd.SetSilent(true);
  Register();
  EXPECT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  etcd.SetSilent(false);
  Until([&] { return absl::IsFailedPrecondition(registration->AwaitName(nullptr)); });
}

TEST_F(RegistrationTest, ADiskThatHangsKeepsTheLease) {
  const std::string file = directory / "ballast-mark.new";
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);  // nobody reads it: open waits
  Register();
  EXPECT_EQ(registration->AwaitName(nullptr), absl::OkStatus());
  EXPECT_TRUE(registered());
  const int64_t kept = etcd.kept_leases();
  Until([&] { return etcd.kept_leases() >= kept + 3; });
  EXPECT_TRUE(registered());
  EXPECT_EQ(Marked(), 0u);
  const int reader = open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  Until([&] { return Marked() == 1; });
  close(reader);
}

}  // namespace
}  // namespace ballast::services
