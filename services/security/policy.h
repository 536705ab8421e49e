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
enum class Right : uint32_t { kTrain = 1, kRead = 2, kPin = 4, kDrop = 8, kBudget = 16, kStatus = 32 };
using RightSet = uint32_t;
constexpr RightSet operator|(Right a, Right b) { return static_cast<RightSet>(a) | static_cast<RightSet>(b); }
std::string NamesOf(RightSet rights);  // "train or read"

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

 private:
  std::map<std::string, std::string> identities_;  // by digest
};

// rights.yaml: `rights: [{identity: NAME, jobs: GLOB, can: [train, ...]}]`, and
// `quotas: [{identity: NAME, jobs: N, hbm: BYTES, dram: BYTES, nvme: BYTES}]`. Whatever is not granted is refused.
// Immutable. Threads: any.
class Rights {
 public:
  static absl::StatusOr<Rights> Parse(const std::string& text, const std::string& path);
  bool Knows(const std::string& identity) const { return grants_.count(identity) > 0; }
  // Some of `rights` for `job`, the name of a job; what is no such name matches nothing.
  bool MayAny(const std::string& identity, RightSet rights, absl::string_view job) const;
  // Some of `rights`, for whatever job.
  bool MayAnywhere(const std::string& identity, RightSet rights) const;
  const Quota* QuotaOf(const std::string& identity) const;  // null: none

 private:
  struct Grant {
    std::string jobs;  // as fnmatch(3)
    RightSet rights = 0;
  };
  std::map<std::string, std::vector<Grant>> grants_;
  std::map<std::string, Quota> quotas_;
};

}  // namespace ballast::services
