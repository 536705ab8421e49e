// How a trainer or an operator proves its identity and checks the servers': files of certificates and of a token.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/base/address.h"

namespace ballast::model {

// Paths; an empty path leaves its part out. Programs read the files again when they change.
struct Access {
  std::string ca;           // PEM: CAs of the servers. With it every connection is TLS, and servers' names are checked
  std::string certificate;  // PEM: the client's own, then its issuers in turn; with `key`
  std::string key;          // PEM, without a passphrase
  std::string token_file;   // a bearer token
  std::vector<std::string> paths() const { return {ca, certificate, key, token_file}; }
};

struct AccessContent {
  std::string ca, certificate, key;  // PEM
  std::string authorization;         // "Bearer ..."; empty: no token
};

// Reads and checks the files. INVALID_ARGUMENT (BAD_CONFIG), naming the file: unreadable, no PEM, a key that is not the
// certificate's, a token with something else than printable characters.
absl::StatusOr<AccessContent> ReadAccess(const Access& access);

// INVALID_ARGUMENT (BAD_CONFIG) if a token would travel to `server` in the clear, where others could read it; or if the
// parts of `access` do not fit together.
absl::Status CheckAccess(const Access& access, const Address& server);

}  // namespace ballast::model
