// URLs of registries, and lists of servers that users give.
#include "ballast/proto/registry/registry_url.h"

#include <gmock/gmock.h>

#include "ballast/proto/base/status.h"

namespace ballast::registry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(RegistryUrl, ReadsMembersPrefixAndNumberOfServers) {
  const auto url = ParseRegistryUrl("etcd://a.example:2379,[::1]:2380/training/run-7?servers=12");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_THAT(url->endpoints, ElementsAre("a.example:2379", "[::1]:2380"));
  EXPECT_EQ(url->prefix, "training/run-7");
  EXPECT_EQ(url->servers, 12u);
  EXPECT_EQ(FormatRegistryUrl(*url), "etcd://a.example:2379,[::1]:2380/training/run-7?servers=12");
  EXPECT_EQ(ParseRegistryUrl("etcd://a:1/x")->servers, 1u);
}

TEST(RegistryUrl, RefusesEverythingElse) {
  for (const char* text :
       {"", "a:1", "http://a:1/x", "etcd://", "etcd://a:1", "etcd://a:1/", "etcd://a/x", "etcd://a:0/x",
        "etcd://a:1//x", "etcd://a:1/x/", "etcd://a:1/x y", "etcd://a:1/x?servers=0", "etcd://a:1/x?servers=4097",
        "etcd://a:1/x?servers=2&ttl=1", "etcd://a:1,/x", "etcd://a:1/x\n"}) {
    const absl::Status status = ParseRegistryUrl(text).status();
    EXPECT_EQ(model::ReasonOf(status), model::kBadConfig) << "'" << text << "'";
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected etcd://host:port")) << "'" << text << "'";
  }
}

TEST(RegistryUrl, TakesFilesAndAUserThatFitTogether) {
  const auto url = ParseRegistryUrl(
      "etcd://a:1,b:2/x?ca=/etc/a,b.crt&servers=2&certificate=c.crt&key=c.key&user=ballast&password_file=/run/p=w");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_EQ(url->servers, 2u);
  EXPECT_THAT(url->files(), ElementsAre("/etc/a,b.crt", "c.crt", "c.key", "/run/p=w"));
  EXPECT_EQ(url->user, "ballast");
  EXPECT_EQ(FormatRegistryUrl(*url), "etcd://a:1,b:2/x?servers=2") << "messages tell of no files";
  EXPECT_TRUE(ParseRegistryUrl("etcd://127.0.0.1:1/x?user=u&password_file=p").ok());
  for (const auto& [query, why] : {std::pair{"certificate=c&ca=a", "has only one of certificate and key"},
                                   {"certificate=c&key=k", "without `ca`"},
                                   {"user=u", "has only one of user and password_file"},
                                   {"user=u&password_file=p", "would send the password to a:1 in the clear"},
                                   {"ca=a&ca=b", "has 'ca' twice"},
                                   {"ca=", "has an invalid value of 'ca'"},
                                   {"ca=a\nb", "has an invalid value of 'ca'"},
                                   {"password=p", "has an unknown 'password'"}}) {
    const absl::Status status = ParseRegistryUrl(std::string("etcd://a:1/x?") + query).status();
    EXPECT_EQ(model::ReasonOf(status), model::kBadConfig) << query;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
}

TEST(RegistryUrl, IsFoundInAListThatWasCutAtCommas) {
  EXPECT_TRUE(RegistryUrlIn({"a:1", "b:2"})->empty());
  const auto urls = RegistryUrlIn({"etcd://a:1", "b:2/x?servers=2"});
  ASSERT_TRUE(urls.ok()) << urls.status();
  EXPECT_THAT(urls->at(0).endpoints, ElementsAre("a:1", "b:2"));
  EXPECT_FALSE(RegistryUrlIn({"a:1", "etcd://b:2/x"}).ok());
  EXPECT_FALSE(RegistryUrlIn({"etcd://a:1/x", "etcd://b:2/x"}).ok());
  EXPECT_TRUE(CheckServers({"a:1", "[::1]:2"}).ok());
  EXPECT_TRUE(CheckServers({"etcd://a:1", "b:2/x"}).ok());
  EXPECT_FALSE(CheckServers({"a:1", "b"}).ok());
}

}  // namespace
}  // namespace ballast::registry
