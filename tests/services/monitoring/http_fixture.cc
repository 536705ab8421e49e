#include "ballast/tests/services/monitoring/http_fixture.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {

HttpAnswer Ask(const std::string& address, const std::string& request) {
  const int fd = ConnectTo(address);
  if (fd < 0) return {};
  // Rings that are taken down interrupt calls of the thread that used them: hence the retries.
  const timeval wait_max = {.tv_sec = 60, .tv_usec = 0};
  (void)::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait_max, sizeof wait_max);
  (void)TEMP_FAILURE_RETRY(::send(fd, request.data(), request.size(), MSG_NOSIGNAL));
  std::string bytes;
  char piece[4096];
  for (ssize_t n = 0; (n = TEMP_FAILURE_RETRY(::recv(fd, piece, sizeof piece, 0))) > 0;) bytes.append(piece, n);
  ::close(fd);
  const size_t end = bytes.find("\r\n\r\n");
  if (bytes.rfind("HTTP/1.1 ", 0) != 0 || end == std::string::npos) return {};
  return {std::atoi(bytes.c_str() + 9), bytes.substr(0, end), bytes.substr(end + 4)};
}

HttpAnswer Get(const std::string& address, const std::string& path) {
  return Ask(address, "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
}

}  // namespace ballast::services
