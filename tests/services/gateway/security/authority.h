// A certificate authority for tests: makes certificates, keys and lists of revocations as PEM.
#pragma once

#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ballast::services {

struct IssuedPair {
  std::string certificate;  // PEM
  std::string key;          // PEM
  long serial = 0;
};

struct IssueOptions {
  std::string alternative_names;  // as OpenSSL spells them: "DNS:localhost,IP:127.0.0.1"; empty: none
  absl::Time not_before = absl::Now() - absl::Hours(1);
  absl::Time not_after = absl::Now() + absl::Hours(24);
  bool server = true;  // may be a server's
};

class Authority {
 public:
  // `issuer`: of an intermediate one; null: a root.
  explicit Authority(const std::string& name, absl::Time not_after = absl::Now() + absl::Hours(48),
                     const Authority* issuer = nullptr);
  const std::string& certificate() const { return certificate_pem_; }
  IssuedPair Issue(const std::string& name, const IssueOptions& options);
  // A certificate for localhost and 127.0.0.1.
  IssuedPair IssueServer(const std::string& name);
  IssuedPair IssueClient(const std::string& spiffe_id);
  std::string Revocations(const std::vector<long>& serials, absl::Time next = absl::Now() + absl::Hours(1)) const;

 private:
  std::shared_ptr<EVP_PKEY> key_;
  std::shared_ptr<X509> certificate_;
  std::string certificate_pem_;
};

void WriteText(const std::string& path, const std::string& text);

}  // namespace ballast::services
