#include "ballast/proto/base/access.h"

#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/gateway/security/authority.h"

namespace ballast::services {
namespace {

using model::Access;

TEST(Access, NeedsPartsThatBelongTogether) {
  const auto check = [](const Access& access, const std::string& address) {
    return std::string(
        model::CheckAccess(access, *model::ParseAddress(address, model::AddressUse::kConnect)).message());
  };
  const Access token = {"", "", "", "token"};
  EXPECT_NE(check(token, "10.0.0.1:1").find("in the clear"), std::string::npos);
  EXPECT_NE(check(token, "node-1:1").find("in the clear"), std::string::npos) << "a name could be anywhere";
  EXPECT_NE(check(token, "127.0.0.1.example:1").find("in the clear"), std::string::npos);
  EXPECT_NE(check(token, "[::ffff:1.2.3.4]:1").find("in the clear"), std::string::npos);
  for (const char* local : {"127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"}) EXPECT_EQ(check(token, local), "");
  EXPECT_EQ(check({"ca", "", "", "token"}, "node-1:1"), "");
  EXPECT_EQ(check({"ca", "certificate", "key", ""}, "node-1:1"), "");
  EXPECT_EQ(check({}, "node-1:1"), "");
  EXPECT_NE(check({"ca", "certificate", "", ""}, "127.0.0.1:1").find("belong together"), std::string::npos);
  EXPECT_NE(check({"", "certificate", "key", ""}, "127.0.0.1:1").find("needs TLS"), std::string::npos);
}

class AccessTest : public ::testing::Test {
 protected:
  AccessTest() {
    const IssuedPair pair = authority_.IssueClient("spiffe://t/x");
    WriteText(access_.ca, authority_.certificate());
    WriteText(access_.certificate, pair.certificate);
    WriteText(access_.key, pair.key);
    WriteText(access_.token_file, "  secret\n");
  }
  void ExpectBad(const std::string& said) const {
    const auto read = model::ReadAccess(access_);
    ASSERT_EQ(model::ReasonOf(read.status()), model::kBadConfig) << said;
    EXPECT_NE(std::string(read.status().message()).find(said), std::string::npos) << read.status();
  }
  ScratchDirectory dir_;
  Authority authority_{"ca"};
  const Access access_ = {dir_ / "ca", dir_ / "crt", dir_ / "key", dir_ / "token"};
};

TEST_F(AccessTest, ReadsAll) {
  const auto read = model::ReadAccess(access_);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->ca, authority_.certificate());
  EXPECT_EQ(read->authorization, "Bearer secret");
}

TEST_F(AccessTest, RefusesByName) {
  WriteText(access_.token_file, "two words");
  ExpectBad("token: expected one token");
  WriteText(access_.token_file, "\n");
  ExpectBad("token: expected one token");
  WriteText(access_.token_file, std::string(5000, 'a'));
  ExpectBad("token: expected one token");
  WriteText(access_.key, authority_.IssueClient("spiffe://t/x").key);
  ExpectBad("key: the key does not belong to");
  WriteText(access_.key, "none");
  ExpectBad("key: expected a private key as PEM");
  WriteText(access_.certificate, "none");
  ExpectBad("crt: expected a certificate as PEM");
  WriteText(access_.ca, "none");
  ExpectBad("ca: expected certificates of CAs as PEM");
}

}  // namespace
}  // namespace ballast::services
