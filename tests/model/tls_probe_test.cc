#include "ballast/proto/base/tls_probe.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "absl/time/clock.h"
#include "ballast/proto/base/descriptor.h"

namespace ballast::model {
namespace {

constexpr int kRounds = 100;

// As a server without room, or a proxy before a server that is down.
void CloseEach(int listener) {
  for (int round = 0; round < kRounds; ++round) const Descriptor connection(::accept(listener, nullptr, nullptr));
}

// OpenSSL still sends an alert to a peer that is gone.
TEST(TlsProbe, AConnectionThatEndsEndsNoProcess) {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  ASSERT_EQ(::listen(listener.get(), 16), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &length), 0);
  std::thread server(CloseEach, listener.get());
  Address address;
  address.host = "127.0.0.1";
  address.port = ntohs(at.sin_port);
  for (int round = 0; round < kRounds; ++round) {
    (void)ProbeTls(address, AccessContent(), absl::Now() + absl::Seconds(30));
  }
  server.join();
}

}  // namespace
}  // namespace ballast::model
