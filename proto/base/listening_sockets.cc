#include "ballast/proto/base/listening_sockets.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"

namespace ballast::model {
namespace {

// -1, with errno.
int Listen(const addrinfo& at, int backlog) {
  const int fd = ::socket(at.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  (void)::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd, at.ai_addr, at.ai_addrlen) == 0 && ::listen(fd, backlog) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

uint16_t PortOf(int fd) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  (void)::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length);
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

}  // namespace

absl::StatusOr<std::vector<int>> ListenOn(Address* address, int backlog) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address->host.c_str(), std::to_string(address->port).c_str(), &hints, &found) != 0) {
    return absl::UnavailableError(std::strerror(EADDRNOTAVAIL));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, ::freeaddrinfo);
  std::vector<int> sockets;
  int error = EADDRNOTAVAIL;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    // Further addresses of a name get the port that the first one got.
    auto* const port = at->ai_family == AF_INET6 ? &reinterpret_cast<sockaddr_in6*>(at->ai_addr)->sin6_port
                                                 : &reinterpret_cast<sockaddr_in*>(at->ai_addr)->sin_port;
    *port = htons(address->port);
    const int fd = Listen(*at, backlog);
    if (fd < 0) error = errno;
    // A family that the machine has not is no matter; a port that somebody holds is.
    if (fd < 0 && error == EADDRINUSE) {
      for (const int open : sockets) ::close(open);
      return absl::UnavailableError(std::strerror(error));
    }
    if (fd < 0) continue;
    if (address->port == 0) address->port = PortOf(fd);
    sockets.push_back(fd);
  }
  if (sockets.empty()) return absl::UnavailableError(std::strerror(error));
  return sockets;
}

std::string PeerName(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  if (address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &in.sin_addr, text.data(), text.size());
    return absl::StrCat("ipv4:", text.data(), ":", ntohs(in.sin_port));
  }
  if (address.ss_family != AF_INET6) return "unknown";
  const auto& in6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) {
    ::inet_ntop(AF_INET, &in6.sin6_addr.s6_addr[12], text.data(), text.size());
    return absl::StrCat("ipv4:", text.data(), ":", ntohs(in6.sin6_port));
  }
  ::inet_ntop(AF_INET6, &in6.sin6_addr, text.data(), text.size());
  return absl::StrCat("ipv6:[", text.data(), "]:", ntohs(in6.sin6_port));
}

std::string PeerName(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "unknown";
  return PeerName(address);
}

}  // namespace ballast::model
