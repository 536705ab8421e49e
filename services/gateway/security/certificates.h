// Checks a server's certificate files before gRPC sees them: gRPC 1.51 takes a key that does not match its certificate,
// and then refuses every new connection.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ballast/services/gateway/security/counters.h"

namespace ballast::services {

// PEM files. `certificate` alone decides whether there is TLS.
struct CertificatePaths {
  std::string certificate;    // the server's, then the intermediates up to (or with) its CA
  std::string key;            // without a passphrase
  std::string client_ca;      // CAs whose clients are let in; empty: clients need no certificate
  std::string crl_directory;  // revocations by these CAs, files of any name; empty: none
  bool enabled() const { return !certificate.empty(); }
};

// The content of the files, once everything was checked.
struct Certificates {
  std::string pair;                         // PEM: key, then certificates; one text, so that no reader mixes two pairs
  std::string client_ca;                    // PEM: the CAs that are valid now
  std::map<std::string, std::string> crls;  // PEM by the file name that OpenSSL looks for: "1a2b3c4d.r0"
  std::vector<std::string> names;           // hosts and addresses that the certificate is for
  // The earliest end among the certificates of each file; InfiniteFuture without the file.
  absl::Time certificate_not_after = absl::InfiniteFuture();
  absl::Time client_ca_not_after = absl::InfiniteFuture();
  absl::Time crl_not_after = absl::InfiniteFuture();
};

// Reads and checks the files. INVALID_ARGUMENT (BAD_CONFIG), naming the file, what was expected, what came and the fix:
// - a file is unreadable, no PEM, or longer than 1 MiB;
// - the key is not the certificate's, or needs a passphrase;
// - a certificate of the chain is outside of its dates, is not issued by its successor, or the first is no server's;
// - client_ca holds a certificate that is no CA, or no CA that is valid now;
// - a list of revocations has a wrong signature or is outdated, or a CA has none (gRPC would let its clients in).
absl::StatusOr<Certificates> ReadCertificates(const CertificatePaths& paths, absl::Time now);

// May a client with this certificate come in? `certificate`, and `chain`, what came with it: PEM. OK if the chain leads
// to a CA of `files`, with dates that hold `now`, and nothing is revoked. Else UNAUTHENTICATED (NO_IDENTITY) with what
// was shown and what is wanted, and `why`. Without a certificate: UNAUTHENTICATED as well.
absl::Status CheckClient(const Certificates& files, absl::string_view certificate, absl::string_view chain,
                         absl::Time now, Denial* why);
// The subject of the first certificate of `pem`; empty: there is none.
std::string SubjectOf(absl::string_view pem);

}  // namespace ballast::services
