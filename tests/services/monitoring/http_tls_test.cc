// The HTTP port by TLS, asked by httplib's client with real certificates.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/address.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/monitoring/doorman.h"
#include "ballast/services/monitoring/http_port.h"
#include "ballast/services/monitoring/tls.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "ballast/tests/services/gateway/security/authority.h"
#include "ballast/tests/services/monitoring/http_fixture.h"

namespace ballast::services {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class HttpTlsTest : public ::testing::Test {
 protected:
  HttpTlsTest() {
    std::filesystem::create_directory(dir_ / "crl");
    options_.tls = {dir_ / "tls.crt", dir_ / "tls.key", dir_ / "ca.crt", dir_ / "crl"};
    options_.audit_log = "none";
    Install(authority_.IssueServer("server"));
    WriteText(options_.tls.client_ca, authority_.certificate());
    WriteText(dir_ / "crl/ca.pem", authority_.Revocations({}));
    Trust(authority_);
  }
  void Install(const IssuedPair& pair) {
    WriteText(options_.tls.certificate, pair.certificate);
    WriteText(options_.tls.key, pair.key);
  }
  void Trust(const Authority& authority) { WriteText(dir_ / "trusted.crt", authority.certificate()); }
  // Before Watch, as a server that still recovers.
  void Start() {
    auto guard = Guard::Make(options_);
    ASSERT_TRUE(guard.ok()) << guard.status();
    guard_ = *std::move(guard);
    auto port = HttpPort::Start("127.0.0.1:0", &progress_, &guard_->counters(), guard_.get());
    ASSERT_TRUE(port.ok()) << port.status();
    port_ = *std::move(port);
  }
  void Serve() {
    ASSERT_TRUE(guard_->Watch().ok());
    port_->Serve(server_.get(), "127.0.0.1:7070");
  }
  // Status and body; status 0: the handshake failed.
  std::pair<int, std::string> Get(const std::string& path, const IssuedPair& shown = {}) {
    return GetFrom(port_->address(), path, shown);
  }
  std::pair<int, std::string> GetFrom(const std::string& from, const std::string& path, const IssuedPair& shown = {}) {
    const auto address = model::ParseAddress(from, model::AddressUse::kConnect);
    std::string certificate, key;
    if (!shown.key.empty()) {
      WriteText(certificate = dir_ / "shown.crt", shown.certificate);
      WriteText(key = dir_ / "shown.key", shown.key);
    }
    httplib::SSLClient client(address->host, address->port, certificate, key);
    client.set_ca_cert_path((dir_ / "trusted.crt").c_str());
    client.enable_server_certificate_verification(true);
    client.set_connection_timeout(60);
    client.set_read_timeout(60);
    client.set_write_timeout(60);
    const httplib::Result result = client.Get(path);
    return result ? std::pair(result->status, result->body) : std::pair(0, httplib::to_string(result.error()));
  }

  ScratchDirectory dir_;
  Authority authority_{"ca"};
  const IssuedPair client_ = authority_.IssueClient("spiffe://t/prometheus");
  GuardOptions options_;
  std::unique_ptr<Guard> guard_;
  RecoveryProgress progress_;
  TestServer server_{"s"};
  std::unique_ptr<HttpPort> port_;
};

TEST_F(HttpTlsTest, ProbesNeedNoCertificateAndTheRestDoes) {
  Start();
  EXPECT_EQ(Get("/livez").first, 200);
  EXPECT_EQ(Get("/readyz").first, 503) << "it recovers";
  Serve();
  EXPECT_EQ(Get("/readyz").first, 200);
  for (const char* path : {"/", "/metrics", "/status.json", "/steps.json", "/page.js"}) {
    const auto [refused, why] = Get(path);
    EXPECT_EQ(refused, 403) << path;
    EXPECT_THAT(why, HasSubstr("expected a client certificate from a CA of the server's tls.client_ca"));
    EXPECT_EQ(Get(path, client_).first, 200) << path;
  }
  EXPECT_THAT(Get("/metrics", client_).second, HasSubstr("ballast_tls_not_after_timestamp_seconds"));
  const Authority another("ca");
  EXPECT_EQ(Get("/livez", Authority("ca").IssueClient("spiffe://t/prometheus")).first, 0) << "of another CA";
  Trust(another);
  EXPECT_EQ(Get("/livez").first, 0) << "another server's CA";
}

TEST_F(HttpTlsTest, NoCertificateIsAskedForWithoutClientCa) {
  options_.tls.client_ca = options_.tls.crl_directory = "";
  Start();
  Serve();
  EXPECT_EQ(Get("/metrics").first, 200);
  EXPECT_EQ(services::Get(port_->address(), "/livez").status, 0) << "in the clear";
  EXPECT_EQ(Get("/livez").first, 200) << "after that";
}

TEST_F(HttpTlsTest, NewCertificatesAndRevocationsHoldForTheNextConnection) {
  Start();
  Serve();
  ASSERT_EQ(Get("/metrics", client_).first, 200);
  WriteText(dir_ / "crl/ca.pem", authority_.Revocations({client_.serial}));
  guard_->Reload();
  EXPECT_EQ(Get("/metrics", client_).first, 0) << "revoked";
  EXPECT_EQ(Get("/metrics", authority_.IssueClient("spiffe://t/other")).first, 200);

  Authority next("ca-2");
  Install(next.IssueServer("server-2"));
  guard_->Reload();
  EXPECT_EQ(Get("/livez").first, 0) << "the client does not trust the new CA yet";
  Trust(next);
  EXPECT_EQ(Get("/livez").first, 200);
  WriteText(options_.tls.key, next.IssueServer("other").key);
  guard_->Reload();
  EXPECT_EQ(Get("/livez").first, 200) << "a bad pair is not taken";
}

// As the rpc port: a CA of `client_ca` may have an issuer that nobody knows.
TEST_F(HttpTlsTest, TakesWhatTheRpcPortTakes) {
  Authority intermediate("intermediate", absl::Now() + absl::Hours(48), &authority_);
  WriteText(options_.tls.client_ca, intermediate.certificate());
  options_.tls.crl_directory = "";
  Start();
  Serve();
  const IssuedPair client = intermediate.IssueClient("spiffe://t/prometheus");
  ASSERT_TRUE(guard_->MeetClient(client.certificate, "").ok());
  EXPECT_EQ(Get("/metrics", client).first, 200);
  EXPECT_EQ(Get("/metrics", authority_.IssueClient("spiffe://t/other")).first, 0);
}

TEST_F(HttpTlsTest, TellsWhoIsRefusedAndWhichCertificateWasWanted) {
  options_.audit_log = dir_ / "audit.log";
  Start();
  Serve();
  EXPECT_EQ(Get("/livez", Authority("strangers").IssueClient("spiffe://t/prometheus")).first, 0);
  EXPECT_EQ(guard_->counters().denials[static_cast<size_t>(Denial::kUnknownCa)], 1);
  EXPECT_EQ(services::Get(port_->address(), "/livez").status, 0) << "in the clear";
  EXPECT_EQ(guard_->counters().denials[static_cast<size_t>(Denial::kNoTls)], 1);
  EXPECT_EQ(Get("/livez", client_).first, 200);
  port_.reset();
  guard_.reset();  // writes what it queued
  std::ifstream audit(options_.audit_log);
  const std::string lines((std::istreambuf_iterator<char>(audit)), {});
  EXPECT_THAT(
      lines,
      ContainsRegex("call=handshake .*peer=\"ipv4:127.0.0.1:[0-9]+\".*why=unknown_ca.*strangers.*expected one from"));
  EXPECT_THAT(lines, ContainsRegex("call=handshake .*peer=\"ipv4:127.0.0.1:[0-9]+\".*why=no_tls"));
}

// An answer larger than the socket takes at once.
TEST_F(HttpTlsTest, LargeAnswers) {
  Start();
  const std::string body(size_t{20} << 20, 'x');
  auto tls = TlsSessions::Make(guard_.get());
  ASSERT_TRUE(tls.ok()) << tls.status();
  const auto door = Doorman::Start(
      "127.0.0.1:0",
      [&](const std::string&, bool certified) {
        return absl::StrCat("HTTP/1.1 200 OK\r\nContent-Length: ", body.size() + 1, "\r\n\r\n", body,
                            certified ? 1 : 0);
      },
      *std::move(tls));
  ASSERT_TRUE(door.ok()) << door.status();
  EXPECT_TRUE(GetFrom((*door)->address(), "/", client_).second == body + "1");
  EXPECT_TRUE(GetFrom((*door)->address(), "/").second == body + "0");
}

TEST_F(HttpTlsTest, ClientsThatAreSilentAmidTheHandshakeHoldNobodyUp) {
  Start();
  Serve();
  std::vector<int> silent;
  for (int i = 0; i < 300; ++i) {
    silent.push_back(ConnectTo(port_->address()));
    (void)::send(silent.back(), "\x16\x03\x01", 3, MSG_NOSIGNAL);  // the head of a handshake
  }
  EXPECT_EQ(Get("/status.json", client_).first, 200);
  for (const int fd : silent) ::close(fd);
}

}  // namespace
}  // namespace ballast::services
