// Counters of identities and certificates since the server's start. services/monitoring turns them into Prometheus
// families; README.md names them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ballast::services {

// Why a call was refused; from kNoCertificate on: why a connection was, in its handshake.
enum class Denial {
  kNoIdentity,
  kBadToken,
  kTokenInClear,
  kNoRight,
  kQuota,
  kNoCertificate,
  kCertificateExpired,
  kCertificateEarly,
  kCertificateRevoked,
  kUnknownCa,
  kBadCertificate,
  kNoTls
};
inline constexpr std::array<const char*, 12> kDenialNames = {"no_identity",
                                                             "bad_token",
                                                             "token_in_clear",
                                                             "no_right",
                                                             "quota",
                                                             "no_certificate",
                                                             "certificate_expired",
                                                             "certificate_early",
                                                             "certificate_revoked",
                                                             "unknown_ca",
                                                             "bad_certificate",
                                                             "no_tls"};

// Threads: any.
struct SecurityCounters {
  // Reads of a kind of file. `taken`: the new content holds; `refused`: it was bad, and the old content holds.
  struct Reloads {
    std::atomic<uint64_t> taken{0}, refused{0};
  };
  Reloads tls, tokens, rights;
  std::array<std::atomic<uint64_t>, kDenialNames.size()> denials{};
  // Unix seconds at which the certificates in use end; 0: there is none.
  std::atomic<int64_t> certificate_not_after{0}, client_ca_not_after{0}, crl_not_after{0};

  void Count(Denial why) { denials[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed); }
};

}  // namespace ballast::services
