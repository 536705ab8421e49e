#include "ballast/services/gateway/security/guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/gateway/security/authority.h"

namespace ballast::services {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kToken[] = "abc";  // FIPS 180's example
constexpr char kTokens[] =
    "tokens:\n- {identity: alice, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}\n";

class GuardTest : public ::testing::Test {
 protected:
  GuardTest() {
    options_.tokens = dir_ / "tokens.yaml";
    options_.rights = dir_ / "rights.yaml";
    options_.audit_log = dir_ / "audit.log";
    WriteText(options_.tokens, kTokens);
    WriteText(options_.rights, "rights:\n- {identity: alice, jobs: 'a-*', can: [train]}\n");
  }
  void Make() {
    auto guard = Guard::Make(options_);
    ASSERT_TRUE(guard.ok()) << guard.status();
    guard_ = *std::move(guard);
    ASSERT_TRUE(guard_->Watch().ok());
  }
  static CallerShown With(const std::string& peer, const std::vector<std::string>& authorization = {"Bearer abc"}) {
    CallerShown shown;
    shown.peer = peer;
    shown.authorization = authorization;
    return shown;
  }
  uint64_t Denied(Denial why) const { return guard_->counters().denials[static_cast<size_t>(why)]; }
  std::string AuditText() const {
    EXPECT_TRUE(guard_->DrainAudit(absl::Seconds(30)));
    std::ifstream file(options_.audit_log);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  static bool Within(absl::Duration time, const std::function<bool()>& condition) {
    for (const absl::Time end = absl::Now() + time; absl::Now() < end; absl::SleepFor(absl::Milliseconds(50))) {
      if (condition()) return true;
    }
    return condition();
  }

  ScratchDirectory dir_;
  GuardOptions options_;
  std::unique_ptr<Guard> guard_;
};

TEST_F(GuardTest, ATokenIsTakenOnThisMachineAndByTlsAlone) {
  Make();
  for (const char* local :
       {"ipv4:127.0.0.1:1234", "ipv4:127.9.9.9:1", "ipv6:[::1]:1234", "ipv6:%5B::1%5D:1234", "unix:/run/b"}) {
    const auto identity = guard_->Admit(With(local), {Call::kFence, "a-1"});
    ASSERT_TRUE(identity.ok()) << local << identity.status();
    EXPECT_EQ(identity->name(), "alice");
  }
  for (const char* other :
       {"ipv4:10.0.0.1:1234", "ipv4:128.0.0.1:1", "ipv6:[2001:db8::1]:1", "ipv6:[::1:1]:1", "", "ipv4:1.127.0.0:1"}) {
    const auto identity = guard_->Admit(With(other), {Call::kFence, "a-1"});
    EXPECT_EQ(identity.status().code(), absl::StatusCode::kUnauthenticated) << other;
    EXPECT_NE(std::string(identity.status().message()).find("in the clear"), std::string::npos) << other;
  }
  EXPECT_EQ(Denied(Denial::kTokenInClear), 6u);
  CallerShown encrypted = With("ipv4:10.0.0.1:1234");
  encrypted.encrypted = true;
  EXPECT_TRUE(guard_->Admit(encrypted, {Call::kFence, "a-1"}).ok());
}

TEST_F(GuardTest, ABadTokenIsNotSavedByACertificate) {
  options_.tls = {dir_ / "tls.crt", dir_ / "tls.key", dir_ / "ca.crt", ""};
  Authority authority("ca");
  const IssuedPair pair = authority.IssueServer("s");
  WriteText(options_.tls.certificate, pair.certificate);
  WriteText(options_.tls.key, pair.key);
  WriteText(options_.tls.client_ca, authority.certificate());
  WriteText(options_.rights,
            "rights:\n- {identity: alice, kind: token, jobs: 'a-*', can: [train]}\n"
            "- {identity: alice, kind: certificate, jobs: 'a-*', can: [train]}\n");
  Make();
  CallerShown shown = With("ipv4:10.0.0.1:1");
  shown.encrypted = shown.has_certificate = true;
  shown.certificate_name = "alice";
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"Bearer abd"},
                                                {"Bearer abc", "Bearer abc"},
                                                {"Basic abc"},
                                                {"abc"},
                                                {"Bearer "},
                                                {""}}) {
    shown.authorization = wrong;
    EXPECT_EQ(guard_->Admit(shown, {Call::kFence, "a-1"}).status().code(), absl::StatusCode::kUnauthenticated)
        << wrong[0];
  }
  EXPECT_EQ(Denied(Denial::kBadToken), 6u);
  shown.authorization.clear();
  EXPECT_TRUE(guard_->Admit(shown, {Call::kFence, "a-1"}).ok()) << "the certificate's name";
  shown.certificate_name.clear();
  const auto nameless = guard_->Admit(shown, {Call::kFence, "a-1"});
  EXPECT_NE(std::string(nameless.status().message()).find("a certificate without a subject alternative name"),
            std::string::npos)
      << nameless.status();
  EXPECT_EQ(Denied(Denial::kNoIdentity), 1u);
}

// A certificate for DNS:operator had the rights of the token `operator`.
TEST_F(GuardTest, ATokensHolderAndACertificateOfOneNameAreTwo) {
  options_.tls = {dir_ / "tls.crt", dir_ / "tls.key", dir_ / "ca.crt", ""};
  Authority authority("ca");
  const IssuedPair pair = authority.IssueServer("s");
  WriteText(options_.tls.certificate, pair.certificate);
  WriteText(options_.tls.key, pair.key);
  WriteText(options_.tls.client_ca, authority.certificate());
  // Which of the two a right is for must be said.
  const auto refused = Guard::Make(options_);
  EXPECT_EQ(model::ReasonOf(refused.status()), model::kBadConfig);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("rights.yaml:2: identity 'alice' holds a token"),
                    HasSubstr("expected `kind: token` or `kind: certificate`")));
  CallerShown by_token = With("ipv4:10.0.0.1:1"), by_certificate = With("ipv4:10.0.0.1:1", {});
  by_token.encrypted = by_certificate.encrypted = by_certificate.has_certificate = true;
  by_certificate.certificate_name = "alice";
  WriteText(options_.rights,
            "rights:\n- {identity: alice, kind: token, jobs: 'a-*', can: [train]}\n"
            "- {identity: alice, kind: certificate, jobs: 'c-*', can: [train]}\n"
            "- {identity: bob, jobs: '*', can: [train]}\n"
            "quotas:\n- {identity: alice, kind: token, jobs: 3}\n");
  Make();
  const auto may = [&](const CallerShown& shown, const char* job) {
    return guard_->Admit(shown, {Call::kFence, job}).ok();
  };
  EXPECT_TRUE(may(by_token, "a-1"));
  EXPECT_FALSE(may(by_token, "c-1"));
  EXPECT_TRUE(may(by_certificate, "c-1"));
  EXPECT_FALSE(may(by_certificate, "a-1"));
  EXPECT_NE(Guard::QuotaOf(*guard_->Admit(by_token, {Call::kFence, "a-1"})), nullptr);
  EXPECT_EQ(Guard::QuotaOf(*guard_->Admit(by_certificate, {Call::kFence, "c-1"})), nullptr);
  by_certificate.certificate_name = "bob";
  EXPECT_TRUE(may(by_certificate, "c-1")) << "nobody holds a token by this name";
  // A later token of that name is not taken: its right is not said to be of one kind.
  WriteText(options_.tokens,
            "tokens:\n- {identity: bob, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}\n");
  guard_->Reload();
  EXPECT_EQ(guard_->counters().tokens.refused, 1u);
  EXPECT_TRUE(may(by_token, "a-1")) << "the old tokens hold";
}

TEST_F(GuardTest, OptionsThatDoNotFitAreRefused) {
  const auto bad = [this](const char* said, const std::function<void(GuardOptions*)>& change) {
    GuardOptions options = options_;
    change(&options);
    const auto guard = Guard::Make(options);
    ASSERT_EQ(model::ReasonOf(guard.status()), model::kBadConfig) << said;
    EXPECT_NE(std::string(guard.status().message()).find(said), std::string::npos) << guard.status();
  };
  bad("belong together", [](GuardOptions* o) { o->tls.certificate = "x"; });
  bad("need TLS", [](GuardOptions* o) { o->tls.client_ca = "x"; });
  bad("set tls.client_ca, too", [](GuardOptions* o) { o->tls = {"x", "x", "", "x"}; });
  bad("this server knows no identities", [](GuardOptions* o) { o->tokens = ""; });
  bad("no-such.yaml: expected a file", [this](GuardOptions* o) { o->rights = dir_ / "no-such.yaml"; });
  bad("audit_log: expected a path", [this](GuardOptions* o) { o->audit_log = dir_ / "tokens.yaml/x"; });
}

TEST_F(GuardTest, FilesAreTakenWhenTheyChangeAndBadOnesAreNot) {
  Make();
  const auto may = [this](const char* job) {
    return guard_->Admit(With("ipv4:127.0.0.1:1"), {Call::kFence, job}).ok();
  };
  EXPECT_FALSE(may("b-1"));
  WriteText(options_.rights, "rights:\n- {identity: alice, jobs: 'b-*', can: [train]}\n");
  EXPECT_TRUE(Within(absl::Minutes(1), [&] { return may("b-1"); }));
  EXPECT_FALSE(may("a-1"));
  // Counted once it holds.
  EXPECT_TRUE(Within(absl::Minutes(1), [&] { return guard_->counters().rights.taken == 1; }));

  WriteText(options_.rights, "rights: everything\n");
  EXPECT_TRUE(Within(absl::Minutes(1), [&] { return guard_->counters().rights.refused == 1; }));
  EXPECT_TRUE(may("b-1")) << "the old file holds";
  std::filesystem::remove(options_.rights);
  EXPECT_TRUE(Within(absl::Minutes(1), [&] { return guard_->counters().rights.refused == 2; }));
  EXPECT_TRUE(may("b-1"));
  EXPECT_FALSE(may("c-1")) << "a file that is gone opens nothing";

  // At once, when it is asked for.
  WriteText(options_.tokens, "tokens: []\n");
  guard_->Reload();
  EXPECT_FALSE(may("b-1"));
  EXPECT_EQ(guard_->counters().tokens.taken, 1u);
}

// Whoever fences all the time keeps no job's thread.
TEST_F(GuardTest, AQuotaThatIsNeverStillIsAskedSoOftenAndNoMore) {
  WriteText(options_.rights,
            "rights:\n- {identity: alice, jobs: 'a-*', can: [train]}\nquotas:\n- {identity: alice, nvme: 1GiB}\n");
  Make();
  int looks = 0;
  const auto none = [] { return std::vector<v1::JobStatus>(); };
  const auto lease = guard_->AskGrowth("a-1", {0, 0, 1}, [&] {
    if (++looks <= 10 * Guard::kQuotaTries) {
      EXPECT_TRUE(guard_->AskGrowth("a-2", {0, 0, 1}, none).ok());  // and ends
    }
    return none();
  });
  EXPECT_EQ(looks, Guard::kQuotaTries);
  EXPECT_EQ(lease.status().code(), absl::StatusCode::kResourceExhausted) << "as any growth that is refused";
  EXPECT_EQ(model::ReasonOf(lease.status()), model::kBusy);
}

TEST_F(GuardTest, TheAuditLogTellsWhoDidWhat) {
  Make();
  const CallerShown shown = With("ipv4:127.0.0.1:77");
  const auto identity = guard_->Admit(shown, {Call::kFence, "a-1"});
  ASSERT_TRUE(identity.ok());
  guard_->Audit(*identity, shown, {Call::kFence, "a-1"}, absl::OkStatus());
  guard_->Audit(*identity, shown, {Call::kOpen, "a-1"},
                model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, "5 bytes are short"));
  guard_->Audit(*identity, shown, {Call::kPush, "a-1"}, absl::OkStatus());
  (void)guard_->Admit(shown, {Call::kDropJob, "evil\"\nverdict=ok"});
  const std::string text = AuditText();
  EXPECT_NE(
      text.find("audit call=Fence identity=\"alice\" kind=token peer=\"ipv4:127.0.0.1:77\" job=\"a-1\" verdict=ok\n"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("call=Open identity=\"alice\" kind=token peer=\"ipv4:127.0.0.1:77\" job=\"a-1\" verdict=failed "
                      "code=RESOURCE_EXHAUSTED reason=\"BUDGET\" message=\"5 bytes are short\"\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("job=\"evil\\\"\\nverdict=ok\" verdict=denied why=no_right"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << "no line for a push: " << text;

  // Rotated: the new file gets the lines after Reload.
  std::filesystem::rename(options_.audit_log, dir_ / "audit.log.1");
  guard_->Reload();
  guard_->Audit(*identity, shown, {Call::kDropJob, "a-1"}, absl::OkStatus());
  EXPECT_NE(AuditText().find("call=DropJob"), std::string::npos);
}

TEST_F(GuardTest, AFloodOfRefusalsDoesNotFillTheLog) {
  Make();
  constexpr int kCalls = 5000;
  const absl::Time began = absl::Now();
  for (int i = 0; i < kCalls; ++i) (void)guard_->Admit(With("ipv4:10.0.0.1:1"), {Call::kFence, "a-1"});
  const auto seconds = absl::ToInt64Seconds(absl::Now() - began) + 2;
  const std::string text = AuditText();
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), AuditLog::kDenialsPerSecond * seconds);
  EXPECT_EQ(Denied(Denial::kTokenInClear), static_cast<uint64_t>(kCalls)) << "all are counted";
  absl::SleepFor(absl::Milliseconds(1100));
  (void)guard_->Admit(With("ipv4:10.0.0.1:1"), {Call::kFence, "a-1"});
  EXPECT_NE(AuditText().find(" denials_left_out="), std::string::npos);
}

}  // namespace
}  // namespace ballast::services
