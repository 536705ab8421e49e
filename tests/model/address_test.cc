#include "ballast/proto/base/address.h"

#include <gtest/gtest.h>

#include <string>

#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

TEST(AddressTest, ReadsHostAndPort) {
  const struct {
    const char *text, *host;
    uint16_t port;
  } kRows[] = {
      {"localhost:7070", "localhost", 7070},
      {"127.0.0.1:1", "127.0.0.1", 1},
      {"0.0.0.0:65535", "0.0.0.0", 65535},
      {"node-7.rack_3.example:9070", "node-7.rack_3.example", 9070},
      {"[::1]:7070", "::1", 7070},
      {"[::]:7070", "::", 7070},
      {"[fe80::1%eth0]:80", "fe80::1%eth0", 80},
  };
  for (const auto& row : kRows) {
    for (const AddressUse use : {AddressUse::kConnect, AddressUse::kListen}) {
      const auto address = ParseAddress(row.text, use);
      ASSERT_TRUE(address.ok()) << address.status();
      EXPECT_EQ(address->host, row.host);
      EXPECT_EQ(address->port, row.port);
      EXPECT_EQ(FormatAddress(*address), row.text);
    }
  }
}

TEST(AddressTest, RefusesTheRestByName) {
  const std::string kNoPort = "has no port", kBadPort = "has no port from 1 to 65535", kNoHost = "has no host";
  const std::string kHost = "has a host with something else than letters",
                    kBrackets = "has no IPv6 address in its brackets";
  const struct {
    std::string text, why;
  } kRows[] = {
      {"localhost:65536", kBadPort},
      {"localhost:99999", kBadPort},
      {"localhost:4294974366", kBadPort},
      {"localhost:-1", kBadPort},
      {"localhost:+80", kBadPort},
      {"localhost:", kBadPort},
      {"localhost:80 ", kBadPort},
      {"localhost: 80", kBadPort},
      {"localhost:0x50", kBadPort},
      {"localhost:http", kBadPort},
      {"localhost:80\n", kBadPort},
      {"", kNoPort},
      {"localhost", kNoPort},
      {"[::1]", kNoPort},
      {":7070", kNoHost},
      {":", kNoHost},
      {" localhost:80", kHost},
      {" :80", kHost},
      {"local host:80", kHost},
      {"a:1,b:2", kHost},
      {"http://a:80", kHost},
      {"unix:/run/a:80", kHost},
      {"a:b:80", kHost},
      {"::1:7070", "has an IPv6 address without brackets"},
      {"[]:80", kBrackets},
      {"[:80", kBrackets},
      {"[::1:80", kBrackets},
      {"[localhost]:80", kBrackets},
      {"[::1]x:80", kBrackets},
      {"[::1%]:80", kBrackets},
      {"[127.0.0.1]:80", kBrackets},
      {"[::1]:70000", kBadPort},
  };
  for (const auto& row : kRows) {
    for (const AddressUse use : {AddressUse::kConnect, AddressUse::kListen}) {
      const absl::Status status = ParseAddress(row.text, use).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.text;
      EXPECT_EQ(ReasonOf(status), kBadConfig);
      const std::string expected = "'" + row.text + "' " + row.why;
      EXPECT_EQ(status.message().substr(0, expected.size()), expected);
    }
  }
}

TEST(AddressTest, PortZeroIsForListeningOnly) {
  EXPECT_EQ(ParseAddress("127.0.0.1:0", AddressUse::kListen)->port, 0);
  const absl::Status status = ParseAddress("127.0.0.1:0", AddressUse::kConnect).status();
  EXPECT_NE(status.message().find("'127.0.0.1:0' has port 0; expected a port from 1 to"), absl::string_view::npos)
      << status;
}

}  // namespace
}  // namespace ballast::model
