#include "ballast/proto/base/address.h"

#include <arpa/inet.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

constexpr uint32_t kPortMax = 65535;

bool IsName(absl::string_view host) {
  return !host.empty() && std::all_of(host.begin(), host.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_';
  });
}

// With a zone, such as fe80::1%eth0.
bool IsV6(absl::string_view host) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(host, absl::MaxSplits('%', 1));
  const bool zoned = parts.first.size() < host.size();
  in6_addr ignored;
  return inet_pton(AF_INET6, std::string(parts.first).c_str(), &ignored) == 1 && (!zoned || IsName(parts.second));
}

// Digits only: SimpleAtoi alone takes signs and spaces.
bool ReadPort(absl::string_view text, uint32_t* port) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); }) &&
         absl::SimpleAtoi(text, port) && *port <= kPortMax;
}

}  // namespace

absl::StatusOr<Address> ParseAddress(absl::string_view text, AddressUse use) {
  const auto refuse = [text](absl::string_view why) {
    return Error(
        absl::StatusCode::kInvalidArgument, kBadConfig,
        absl::StrCat("'", text, "' ", why, "; expected host:port, with an IPv6 address in brackets: [::1]:7070"));
  };
  const size_t colon = text.rfind(':');
  const bool bracketed = !text.empty() && text.front() == '[';
  if (colon == text.npos || (bracketed && text.back() == ']')) return refuse("has no port");
  absl::string_view host = text.substr(0, colon);
  uint32_t port = 0;
  if (host.empty()) return refuse("has no host");
  if (bracketed) {
    host = host.substr(1, host.size() - 2);
    if (text[colon - 1] != ']' || !IsV6(host)) return refuse("has no IPv6 address in its brackets");
  } else if (!IsName(host)) {
    return refuse(IsV6(host) ? "has an IPv6 address without brackets"
                             : "has a host with something else than letters, digits, '.', '-' and '_'");
  }
  if (!ReadPort(text.substr(colon + 1), &port)) return refuse(absl::StrCat("has no port from 1 to ", kPortMax));
  if (port == 0 && use == AddressUse::kConnect) {
    return refuse(absl::StrCat("has port 0; expected a port from 1 to ", kPortMax));
  }
  return Address{std::string(host), static_cast<uint16_t>(port)};
}

std::string FormatAddress(const Address& address) {
  const bool v6 = absl::StrContains(address.host, ':');
  return v6 ? absl::StrCat("[", address.host, "]:", address.port) : absl::StrCat(address.host, ":", address.port);
}

bool IsLoopback(const Address& address) {
  in_addr v4 = {};
  if (inet_pton(AF_INET, address.host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6 = {};
  if (inet_pton(AF_INET6, address.host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return address.host == "localhost";
}

}  // namespace ballast::model
