#include "ballast/services/gateway/security/certificates.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/security/served_certificates.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/gateway/security/authority.h"

namespace ballast::services {
namespace {

std::string Slurp(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class CertificatesTest : public ::testing::Test {
 protected:
  CertificatesTest() : paths_{dir_ / "tls.crt", dir_ / "tls.key", dir_ / "ca.crt", ""} {
    std::filesystem::create_directory(dir_ / "crl");
    Write(authority_.IssueServer("server"));
    WriteText(paths_.client_ca, authority_.certificate());
  }
  void Write(const IssuedPair& pair) {
    WriteText(paths_.certificate, pair.certificate);
    WriteText(paths_.key, pair.key);
  }
  absl::StatusOr<Certificates> Read() const { return ReadCertificates(paths_, absl::Now()); }
  void ExpectBad(const std::string& said) const {
    const auto read = Read();
    ASSERT_FALSE(read.ok()) << said;
    EXPECT_EQ(model::ReasonOf(read.status()), model::kBadConfig);
    EXPECT_NE(std::string(read.status().message()).find(said), std::string::npos) << read.status();
  }

  ScratchDirectory dir_;
  Authority authority_{"ca"}, other_{"other"};
  CertificatePaths paths_;
};

TEST_F(CertificatesTest, TakesAPairAndSaysWhenItEnds) {
  Write(authority_.Issue("s", {.alternative_names = "DNS:localhost", .not_after = absl::Now() + absl::Hours(3)}));
  const auto read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_NEAR(absl::ToDoubleHours(read->certificate_not_after - absl::Now()), 3, 0.1);
  EXPECT_NEAR(absl::ToDoubleHours(read->client_ca_not_after - absl::Now()), 48, 0.1);
  EXPECT_EQ(read->crl_not_after, absl::InfiniteFuture());
  EXPECT_NE(read->pair.find("PRIVATE KEY"), std::string::npos);
}

TEST_F(CertificatesTest, TakesAChainInItsOrderOnly) {
  const IssuedPair leaf = authority_.IssueServer("s");
  WriteText(paths_.key, leaf.key);
  WriteText(paths_.certificate, leaf.certificate + authority_.certificate());
  EXPECT_TRUE(Read().ok()) << Read().status();
  WriteText(paths_.certificate, leaf.certificate + other_.certificate());
  ExpectBad("is not issued by the next one");
  // Same name, another key.
  WriteText(paths_.certificate, leaf.certificate + Authority("ca").certificate());
  ExpectBad("is not issued by the next one");
}

TEST_F(CertificatesTest, RefusesAKeyOfAnother) {
  WriteText(paths_.key, authority_.IssueServer("s").key);
  ExpectBad("the key does not belong to");
}

TEST_F(CertificatesTest, RefusesDates) {
  Write(authority_.Issue("s", {.not_after = absl::Now() - absl::Minutes(1)}));
  ExpectBad("is valid from");
  Write(authority_.Issue("s", {.not_before = absl::Now() + absl::Hours(1)}));
  ExpectBad("is valid from");
}

TEST_F(CertificatesTest, RefusesWhatIsNoServersPem) {
  Write(authority_.IssueClient("spiffe://x/client"));
  ExpectBad("is not a server certificate");
  WriteText(paths_.certificate, "hello");
  ExpectBad("expected certificates as PEM");
  WriteText(paths_.certificate, "");
  ExpectBad("it is empty");
  std::filesystem::remove(paths_.certificate);
  ExpectBad("it cannot be opened");
  Write(authority_.IssueServer("s"));
  WriteText(paths_.key, "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n");
  ExpectBad(paths_.key);
  WriteText(paths_.certificate, authority_.certificate().substr(0, 200));
  ExpectBad("expected certificates as PEM");
}

TEST_F(CertificatesTest, RefusesClientCasThatLetNobodyIn) {
  WriteText(paths_.client_ca, authority_.IssueServer("s").certificate);
  ExpectBad("is not a CA");
  const Authority ended("ended", absl::Now() - absl::Hours(1));
  WriteText(paths_.client_ca, ended.certificate());
  ExpectBad("no CA is valid now");
  WriteText(paths_.client_ca, ended.certificate() + authority_.certificate());
  const auto read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->client_ca, authority_.certificate()) << "the one that has ended is left out";
}

TEST_F(CertificatesTest, RefusesRevocationsThatWouldNotHold) {
  paths_.crl_directory = dir_ / "crl";
  ExpectBad("no list of revocations by");
  const std::string file = dir_ / "crl/any-name.pem";
  WriteText(file, other_.Revocations({1}));
  ExpectBad("no list of revocations by");
  WriteText(file, Authority("ca").Revocations({1}));  // the name alone is right
  ExpectBad("no list of revocations by");
  WriteText(file, authority_.Revocations({1}, absl::Now() - absl::Minutes(1)));
  ExpectBad("put a new one there");
  WriteText(file, "x");
  ExpectBad("expected a list of revocations as PEM");
  WriteText(file, authority_.Revocations({1}, absl::Now() + absl::Hours(5)));
  const auto read = Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_NEAR(absl::ToDoubleHours(read->crl_not_after - absl::Now()), 5, 0.1);
  ASSERT_EQ(read->crls.size(), 1u);
  EXPECT_EQ(read->crls.begin()->first.substr(8), ".r0");
}

TEST_F(CertificatesTest, ABadPairLeavesTheCopyAsItWas) {
  paths_.crl_directory = dir_ / "crl";
  WriteText(dir_ / "crl/list", authority_.Revocations({1}));
  SecurityCounters counters;
  ServedCertificates served(paths_);
  ASSERT_TRUE(served.Load(absl::Now(), &counters).ok());
  const std::string pair = Slurp(served.pair_path()), ca = Slurp(served.client_ca_path());
  ASSERT_NE(pair.find("CERTIFICATE"), std::string::npos);
  const int64_t ends = counters.certificate_not_after;
  EXPECT_GT(ends, absl::ToUnixSeconds(absl::Now()));
  EXPECT_GT(counters.crl_not_after, absl::ToUnixSeconds(absl::Now()));

  const std::string path = served.pair_path();
  WriteText(paths_.key, authority_.IssueServer("s").key);
  EXPECT_FALSE(served.Load(absl::Now(), &counters).ok());
  EXPECT_EQ(Slurp(served.pair_path()), pair);
  EXPECT_EQ(Slurp(served.client_ca_path()), ca);
  EXPECT_EQ(counters.certificate_not_after, ends);

  Write(authority_.IssueServer("next"));
  ASSERT_TRUE(served.Load(absl::Now(), &counters).ok());
  EXPECT_EQ(served.pair_path(), path) << "gRPC watches a path";
  EXPECT_NE(Slurp(served.pair_path()), pair);
  EXPECT_NE(Slurp(served.client_ca_path()), ca) << "else gRPC would not read new revocations";
}

TEST_F(CertificatesTest, ANewCertificateWithoutANameOfTheOldIsWarnedOf) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  SecurityCounters counters;
  ServedCertificates served(paths_);
  ASSERT_TRUE(served.Load(absl::Now(), &counters).ok());
  Write(authority_.Issue("more", {.alternative_names = "DNS:localhost,IP:127.0.0.1,DNS:more.example,IP:::1"}));
  ASSERT_TRUE(served.Load(absl::Now(), &counters).ok());
  EXPECT_EQ(log.str(), "");
  Write(authority_.Issue("other", {.alternative_names = "DNS:more.example,DNS:other.example"}));
  ASSERT_TRUE(served.Load(absl::Now(), &counters).ok());
  spdlog::set_default_logger(before);
  EXPECT_NE(log.str().find("is for more.example, other.example, and no longer for localhost, 127.0.0.1, ::1:"),
            std::string::npos)
      << log.str();
}

TEST_F(CertificatesTest, TheKeyIsOnNoDisk) {
  SecurityCounters counters;
  ServedCertificates served(paths_);
  ASSERT_TRUE(served.Load(absl::Now(), &counters).ok());
  EXPECT_EQ(std::filesystem::read_symlink(served.pair_path()).string().rfind("/memfd:", 0), 0u);
}

// gRPC takes the times in whole seconds to tell whether it read one pair.
TEST(MemoryFile, EachContentHasASecondOfItsOwn) {
  MemoryFile file;
  ASSERT_TRUE(file.Replace("one", 100).ok());
  struct stat first = {}, second = {};
  ASSERT_EQ(::stat(file.path().c_str(), &first), 0);
  // A reader that opened the old content keeps it.
  const int reader = ::open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_TRUE(file.Replace("second", 101).ok());
  ASSERT_EQ(::stat(file.path().c_str(), &second), 0);
  EXPECT_EQ(second.st_mtime, first.st_mtime + 1);
  char bytes[16] = {};
  EXPECT_EQ(::read(reader, bytes, sizeof bytes), 3);
  ::close(reader);
  EXPECT_EQ(Slurp(file.path()), "second");
}

}  // namespace
}  // namespace ballast::services
