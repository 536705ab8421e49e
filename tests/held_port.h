// A port for a server that a test stops and starts again.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace ballast {

// A port of 127.0.0.1 that no other program is given while this lives. It is bound, and nobody listens there: a server
// that asks for this port gets it, and the system's search for a free port passes it over.
class HeldPort {
 public:
  HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(at);
    if (::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        ::bind(socket_, reinterpret_cast<sockaddr*>(&at), bytes) != 0 ||
        ::getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &bytes) != 0) {
      std::perror("a port of 127.0.0.1");
      std::abort();
    }
    address_ = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  }
  ~HeldPort() { ::close(socket_); }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;
  const std::string& address() const { return address_; }

 private:
  const int socket_;
  std::string address_;
};

}  // namespace ballast
