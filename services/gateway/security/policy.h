// Tokens and their holders, identities and their rights, as two YAML files tell.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::services {

// A bit each.
enum class Right : uint32_t { kTrain = 1, kRead = 2, kPin = 4, kDrop = 8, kBudget = 16, kStatus = 32, kCopy = 64 };
using RightSet = uint32_t;
constexpr RightSet operator|(Right a, Right b) { return static_cast<RightSet>(a) | static_cast<RightSet>(b); }
std::string NamesOf(RightSet rights);  // "train or read"

// By what a caller shows its identity. A certificate's name and a token's holder of equal spelling are two identities.
enum class IdentityKind { kToken, kCertificate };
inline constexpr std::array<const char*, 2> kKindNames = {"token", "certificate"};

inline constexpr std::array<const char*, 3> kTierNames = {"hbm", "dram", "nvme"};
using TierUse = std::array<uint64_t, kTierNames.size()>;  // bytes by tier

struct Quota {
  std::optional<uint64_t> jobs;
  std::array<std::optional<uint64_t>, kTierNames.size()> bytes;  // by tier
};

// tokens.yaml: `tokens: [{identity: NAME, sha256: 64 hexadecimal digits}]`. Immutable. Threads: any.
class Tokens {
 public:
  // INVALID_ARGUMENT (BAD_CONFIG) with path:line, what was expected and what came.
  static absl::StatusOr<Tokens> Parse(const std::string& text, const std::string& path);
  // The token's holder; null: nobody.
  const std::string* IdentityOf(absl::string_view token) const;
  bool HasHolder(absl::string_view identity) const;

 private:
  std::map<std::string, std::string> identities_;  // by digest
};

// rights.yaml: `rights: [{identity: NAME, jobs: GLOB, can: [train, ...]}]`, and
// `quotas: [{identity: NAME, jobs: N, hbm: BYTES, dram: BYTES, nvme: BYTES}]`, with `kind: token` or
// `kind: certificate` where the identity is meant as one of them alone. Whatever is not granted is refused. Immutable.
// Threads: any.
class Rights {
 public:
  // The rights and quotas of identities of `kind`, those of entries without a kind included.
  static absl::StatusOr<Rights> Parse(const std::string& text, const std::string& path,
                                      IdentityKind kind = IdentityKind::kToken);
  // For a server that takes tokens and certificates: INVALID_ARGUMENT (BAD_CONFIG) naming the line if an entry without
  // a kind is of an identity that holds a token: a certificate of that name would have the token's rights.
  absl::Status CheckKinds(const Tokens& tokens) const;
  bool Knows(const std::string& identity) const { return grants_.count(identity) > 0; }
  // Some of `rights` for `job`, the name of a job; what is no such name matches nothing.
  bool MayAny(const std::string& identity, RightSet rights, absl::string_view job) const;
  // Some of `rights`, for whatever job.
  bool MayAnywhere(const std::string& identity, RightSet rights) const;
  const Quota* QuotaOf(const std::string& identity) const;                // null: none
  const std::map<std::string, Quota>& quotas() const { return quotas_; }  // by identity

 private:
  struct Grant {
    std::string jobs;  // as fnmatch(3)
    RightSet rights = 0;
  };
  std::string path_;
  std::map<std::string, int> without_kind_;  // identities, and a line that names each
  std::map<std::string, std::vector<Grant>> grants_;
  std::map<std::string, Quota> quotas_;
};

}  // namespace ballast::services
