// Addresses of servers, for listening and connecting: host:port, parsed here only.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::model {

struct Address {
  std::string host;  // a name or an IPv4 address; an IPv6 address without its brackets
  uint16_t port = 0;
};

enum class AddressUse {
  kConnect,
  kListen,  // port 0 takes a free port
};

// Reads `name:port`, `1.2.3.4:port` or `[v6]:port`, with nothing around it. Names are not looked up.
// INVALID_ARGUMENT (BAD_CONFIG) for anything else, such as a port above 65535, which resolvers take modulo 2^16.
absl::StatusOr<Address> ParseAddress(absl::string_view text, AddressUse use);

std::string FormatAddress(const Address& address);

// 127.0.0.0/8, ::1 or `localhost`: bytes to it stay on this machine. Other names are not looked up.
bool IsLoopback(const Address& address);

}  // namespace ballast::model
