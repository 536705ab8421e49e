// Sockets that listen, and how their peers are called.
#include "ballast/proto/base/listening_sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/descriptor.h"
#include "gtest/gtest.h"

namespace ballast::model {
namespace {

std::vector<Descriptor> Own(const std::vector<int>& sockets) {
  std::vector<Descriptor> owned;
  for (const int fd : sockets) owned.emplace_back(fd);
  return owned;
}

// A connection to a port of this host.
Descriptor Connect(uint16_t port) {
  Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to), 0) << std::strerror(errno);
  return fd;
}

TEST(ListenOnTest, AFreePortIsTakenAndTold) {
  Address address{.host = "127.0.0.1", .port = 0};
  const auto sockets = ListenOn(&address, 4);
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  const std::vector<Descriptor> owned = Own(*sockets);
  ASSERT_EQ(owned.size(), 1);
  ASSERT_NE(address.port, 0);
  EXPECT_EQ(::fcntl(owned[0].get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_EQ(::fcntl(owned[0].get(), F_GETFL) & O_NONBLOCK, O_NONBLOCK);
  EXPECT_LT(::accept(owned[0].get(), nullptr, nullptr), 0) << "it would block";
  const Descriptor client = Connect(address.port);
  EXPECT_EQ(PeerName(client.get()), absl::StrCat("ipv4:127.0.0.1:", address.port));
}

TEST(ListenOnTest, APortThatSomebodyHoldsIsRefused) {
  Address address{.host = "127.0.0.1", .port = 0};
  const auto first = ListenOn(&address, 4);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::vector<Descriptor> owned = Own(*first);
  Address again = address;
  const auto second = ListenOn(&again, 4);
  EXPECT_EQ(second.status(), absl::UnavailableError(std::strerror(EADDRINUSE)));
}

TEST(ListenOnTest, AnAddressThatIsNotThisHostsIsRefused) {
  Address address{.host = "203.0.113.7", .port = 0};  // of no host: for documentation
  EXPECT_EQ(ListenOn(&address, 4).status(), absl::UnavailableError(std::strerror(EADDRNOTAVAIL)));
}

TEST(PeerNameTest, IsSpeltAsGrpcSpellsIt) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  v4.sin_port = htons(4711);
  v4.sin_addr.s_addr = htonl(0x0a000003);
  EXPECT_EQ(PeerName(address), "ipv4:10.0.0.3:4711");

  address = {};
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(80);
  v6.sin6_scope_id = 3;
  ASSERT_EQ(::inet_pton(AF_INET6, "fe80::1", &v6.sin6_addr), 1);
  EXPECT_EQ(PeerName(address), "ipv6:[fe80::1]:80");
  ASSERT_EQ(::inet_pton(AF_INET6, "::ffff:10.0.0.4", &v6.sin6_addr), 1);
  EXPECT_EQ(PeerName(address), "ipv4:10.0.0.4:80") << "one client has one name on both families";
}

TEST(PeerNameTest, WhatHasNoHostHasNoName) {
  sockaddr_storage address{};
  auto& local = reinterpret_cast<sockaddr_un&>(address);
  local.sun_family = AF_UNIX;
  std::strcpy(local.sun_path, "/run/of/nobody");
  EXPECT_EQ(PeerName(address), "unknown");
  EXPECT_EQ(PeerName(-1), "unknown");
}

}  // namespace
}  // namespace ballast::model
