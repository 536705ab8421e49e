#include "ballast/services/gateway/security/policy.h"

#include <fnmatch.h>
#include <openssl/sha.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/byte_sizes.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"

namespace ballast::services {
namespace {

constexpr size_t kFileBytesMax = 1 << 20;
constexpr size_t kEntriesMax = 4096;
constexpr size_t kIdentityBytesMax = 2048;  // as long as a SPIFFE ID may be
constexpr size_t kQuotedBytesMax = 80;      // of a bad value, in a message

constexpr std::pair<Right, const char*> kRightNames[] = {
    {Right::kTrain, "train"},   {Right::kRead, "read"},     {Right::kPin, "pin"},  {Right::kDrop, "drop"},
    {Right::kBudget, "budget"}, {Right::kStatus, "status"}, {Right::kCopy, "copy"}};
constexpr char kRightsExpected[] = "a list of train, read, pin, drop, budget, status and copy";

absl::Status Bad(const std::string& path, const YAML::Mark& mark, absl::string_view message) {
  const int line = mark.line + 1;  // a mark of no place is line -1
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      line > 0 ? absl::StrCat(path, ":", line, ": ", message) : absl::StrCat(path, ": ", message));
}

std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::CEscape(text.substr(0, kQuotedBytesMax)), text.size() > kQuotedBytesMax ? "..." : "",
                      "'");
}

std::string Shown(const YAML::Node& node) {
  if (!node.IsDefined()) return "nothing";
  return node.IsScalar() ? Quoted(node.Scalar()) : node.IsMap() ? "a map" : node.IsSequence() ? "a list" : "null";
}

// An entry of a list: `key: value`, with keys of a fixed set.
class Entry {
 public:
  Entry(const std::string* path, const YAML::Node& node) : path_(path), node_(node) {}

  absl::Status CheckKeys(const std::vector<std::string>& known) const {
    if (!node_.IsMap()) return Wrong(absl::StrCat("expected {", absl::StrJoin(known, ", "), "}, got ", Shown(node_)));
    std::set<std::string> seen;
    for (const auto& pair : node_) {
      const std::string key = pair.first.IsScalar() ? pair.first.Scalar() : "";
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        return Wrong(absl::StrCat("unknown key ", Quoted(key), "; expected one of ", absl::StrJoin(known, ", ")));
      }
      if (!seen.insert(key).second) return Wrong(absl::StrCat("key '", key, "' comes twice; keep one"));
    }
    return absl::OkStatus();
  }
  bool Has(const char* key) const { return node_[key].IsDefined(); }
  absl::StatusOr<std::string> Text(const char* key, const char* expected, size_t bytes_max) const {
    const YAML::Node value = node_[key];
    const bool fits =
        value.IsDefined() && value.IsScalar() && !value.Scalar().empty() && value.Scalar().size() <= bytes_max;
    if (fits) return value.Scalar();
    return WrongValue(key, expected);
  }
  absl::StatusOr<std::string> Identity() const {
    BALLAST_ASSIGN_OR_RETURN(
        std::string identity,
        Text("identity", "a SPIFFE ID, a name of the certificate, or any name of a token's holder", kIdentityBytesMax));
    const bool plain = std::all_of(identity.begin(), identity.end(), [](char c) { return absl::ascii_isgraph(c); });
    if (!plain) return WrongValue("identity", "letters, digits and punctuation");
    return identity;
  }
  // None: of either kind.
  absl::StatusOr<std::optional<IdentityKind>> Kind() const {
    if (!Has("kind")) return std::nullopt;
    BALLAST_ASSIGN_OR_RETURN(const std::string name, Text("kind", "token or certificate", kQuotedBytesMax));
    if (name == kKindNames[0]) return IdentityKind::kToken;
    if (name == kKindNames[1]) return IdentityKind::kCertificate;
    return WrongValue("kind", "token or certificate");
  }
  int line() const { return node_.Mark().line + 1; }
  absl::StatusOr<uint64_t> Bytes(const char* key) const {
    const absl::StatusOr<std::string> text = Text(key, "bytes, such as 64GiB", kQuotedBytesMax);
    if (!text.ok()) return text.status();
    const absl::StatusOr<uint64_t> bytes = model::ParseBytes(*text);
    if (!bytes.ok()) return WrongValue(key, "bytes, such as 64GiB");
    return bytes;
  }
  absl::StatusOr<RightSet> Can() const {
    const YAML::Node list = node_["can"];
    if (!list.IsDefined() || !list.IsSequence() || list.size() == 0) return WrongValue("can", kRightsExpected);
    RightSet rights = 0;
    for (const YAML::Node& item : list) {
      const std::string name = item.IsScalar() ? item.Scalar() : "";
      const auto* found = std::find_if(std::begin(kRightNames), std::end(kRightNames),
                                       [&](const auto& right) { return right.second == name; });
      if (found == std::end(kRightNames)) {
        return Wrong(absl::StrCat("can: expected ", kRightsExpected, ", got ", Shown(item)));
      }
      rights |= static_cast<RightSet>(found->first);
    }
    return rights;
  }
  absl::Status Wrong(absl::string_view message) const { return Bad(*path_, node_.Mark(), message); }
  absl::Status WrongValue(const char* key, absl::string_view expected) const {
    return Wrong(absl::StrCat(key, ": expected ", expected, ", got ", Shown(node_[key])));
  }

 private:
  const std::string* path_;
  const YAML::Node node_;
};

// Calls take(list, entry) for each entry of the lists of `text`; the names of the lists are `lists`, the first of which
// must be there.
template <typename Take>
absl::Status ForEachEntry(const std::string& text, const std::string& path, const std::vector<std::string>& lists,
                          const Take& take) {
  if (text.size() > kFileBytesMax) return Bad(path, YAML::Mark::null_mark(), "expected at most 1 MiB");
  try {
    const YAML::Node root = YAML::Load(text);
    if (!root.IsMap() || !root[lists[0]].IsDefined()) {
      return Bad(path, root.Mark(), absl::StrCat("expected `", lists[0], ":` with a list, got ", Shown(root)));
    }
    BALLAST_RETURN_IF_ERROR(Entry(&path, root).CheckKeys(lists));
    size_t count = 0;
    for (const std::string& name : lists) {
      const YAML::Node list = root[name];
      if (!list.IsDefined() || list.IsNull()) continue;
      if (!list.IsSequence()) return Bad(path, list.Mark(), absl::StrCat(name, ": expected a list, got ", Shown(list)));
      for (const YAML::Node& item : list) {
        if (++count > kEntriesMax)
          return Bad(path, item.Mark(), absl::StrCat("expected at most ", kEntriesMax, " entries"));
        BALLAST_RETURN_IF_ERROR(take(name, Entry(&path, item)));
      }
    }
  } catch (const YAML::Exception& error) {
    return Bad(path, error.mark, absl::StrCat("not YAML: ", error.msg));
  }
  return absl::OkStatus();
}

// Of names of jobs, or with a meaning in a pattern.
bool IsOfPattern(char c) { return absl::ascii_isalnum(c) || absl::StrContains("._-*?[]!^:", c); }

std::string Digest(absl::string_view token) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

}  // namespace

std::string NamesOf(RightSet rights) {
  std::vector<std::string> names;
  for (const auto& [right, name] : kRightNames) {
    if ((rights & static_cast<RightSet>(right)) != 0) names.push_back(name);
  }
  return absl::StrJoin(names, " or ");
}

absl::StatusOr<Tokens> Tokens::Parse(const std::string& text, const std::string& path) {
  Tokens tokens;
  const auto take = [&](const std::string&, const Entry& entry) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(entry.CheckKeys({"identity", "sha256"}));
    BALLAST_ASSIGN_OR_RETURN(std::string identity, entry.Identity());
    constexpr char kExpected[] = "the 64 hexadecimal digits that `sha256sum` prints for the token without a newline";
    BALLAST_ASSIGN_OR_RETURN(const std::string digits, entry.Text("sha256", kExpected, 2 * SHA256_DIGEST_LENGTH));
    const bool hexadecimal = digits.size() == 2 * SHA256_DIGEST_LENGTH &&
                             std::all_of(digits.begin(), digits.end(), [](char c) { return absl::ascii_isxdigit(c); });
    if (!hexadecimal) return entry.WrongValue("sha256", kExpected);
    if (!tokens.identities_.emplace(absl::HexStringToBytes(digits), std::move(identity)).second) {
      return entry.Wrong("sha256: this token is listed twice; a token has one holder");
    }
    return absl::OkStatus();
  };
  BALLAST_RETURN_IF_ERROR(ForEachEntry(text, path, {"tokens"}, take));
  return tokens;
}

const std::string* Tokens::IdentityOf(absl::string_view token) const {
  const auto found = identities_.find(Digest(token));
  return found == identities_.end() ? nullptr : &found->second;
}

bool Tokens::HasHolder(absl::string_view identity) const {
  return std::any_of(identities_.begin(), identities_.end(),
                     [&](const auto& holder) { return holder.second == identity; });
}

absl::Status Rights::CheckKinds(const Tokens& tokens) const {
  for (const auto& [identity, line] : without_kind_) {
    if (!tokens.HasHolder(identity)) continue;
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat(
            path_, ":", line, ": identity ", Quoted(identity),
            " holds a token, and a certificate of that name would have the same rights; expected `kind: token` "
            "or `kind: certificate` in each entry of this identity"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Rights> Rights::Parse(const std::string& text, const std::string& path, IdentityKind kind) {
  Rights rights;
  rights.path_ = path;
  const auto is_of_kind = [&](const Entry& entry, const std::string& identity) -> absl::StatusOr<bool> {
    BALLAST_ASSIGN_OR_RETURN(const std::optional<IdentityKind> named, entry.Kind());
    if (!named.has_value()) rights.without_kind_.emplace(identity, entry.line());
    return named.value_or(kind) == kind;
  };
  const auto take_grant = [&](const Entry& entry) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(entry.CheckKeys({"identity", "kind", "jobs", "can"}));
    BALLAST_ASSIGN_OR_RETURN(const std::string identity, entry.Identity());
    constexpr char kExpected[] = "a pattern of names of jobs, such as 'team-a-*'";
    BALLAST_ASSIGN_OR_RETURN(std::string jobs, entry.Text("jobs", kExpected, 256));
    if (!std::all_of(jobs.begin(), jobs.end(), IsOfPattern)) return entry.WrongValue("jobs", kExpected);
    BALLAST_ASSIGN_OR_RETURN(const RightSet can, entry.Can());
    if ((can & static_cast<RightSet>(Right::kBudget)) != 0 && jobs != "*") {
      return entry.Wrong("budget is a right on the whole server: give it in an entry with jobs: '*'");
    }
    BALLAST_ASSIGN_OR_RETURN(const bool counts, is_of_kind(entry, identity));
    if (counts) rights.grants_[identity].push_back({std::move(jobs), can});
    return absl::OkStatus();
  };
  const auto take_quota = [&](const Entry& entry) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(entry.CheckKeys({"identity", "kind", "jobs", "hbm", "dram", "nvme"}));
    BALLAST_ASSIGN_OR_RETURN(const std::string identity, entry.Identity());
    Quota quota;
    if (entry.Has("jobs")) {
      BALLAST_ASSIGN_OR_RETURN(const std::string text, entry.Text("jobs", "a number", 20));
      uint64_t jobs = 0;
      if (!absl::SimpleAtoi(text, &jobs)) return entry.WrongValue("jobs", "a number");
      quota.jobs = jobs;
    }
    for (size_t tier = 0; tier < kTierNames.size(); ++tier) {
      if (!entry.Has(kTierNames[tier])) continue;
      BALLAST_ASSIGN_OR_RETURN(quota.bytes[tier], entry.Bytes(kTierNames[tier]));
    }
    BALLAST_ASSIGN_OR_RETURN(const bool counts, is_of_kind(entry, identity));
    if (counts && !rights.quotas_.emplace(identity, quota).second) {
      return entry.Wrong(absl::StrCat("the identity ", Quoted(identity), " has a quota above; keep one"));
    }
    return absl::OkStatus();
  };
  BALLAST_RETURN_IF_ERROR(
      ForEachEntry(text, path, {"rights", "quotas"}, [&](const std::string& list, const Entry& entry) {
        return list == "rights" ? take_grant(entry) : take_quota(entry);
      }));
  for (const auto& [identity, quota] : rights.quotas_) {
    if (rights.MayAnywhere(identity, static_cast<RightSet>(Right::kTrain))) continue;
    return Bad(
        path, YAML::Mark::null_mark(),
        absl::StrCat("the quota of ", Quoted(identity),
                     " has no effect, because no entry of `rights` lets this identity train; is the name misspelt?"));
  }
  return rights;
}

bool Rights::MayAny(const std::string& identity, RightSet rights, absl::string_view job) const {
  const auto found = grants_.find(identity);
  if (found == grants_.end() || !model::IsJobName(job)) return false;
  const std::string name(job);
  return std::any_of(found->second.begin(), found->second.end(), [&](const Grant& grant) {
    return (grant.rights & rights) != 0 && ::fnmatch(grant.jobs.c_str(), name.c_str(), 0) == 0;
  });
}

bool Rights::MayAnywhere(const std::string& identity, RightSet rights) const {
  const auto found = grants_.find(identity);
  if (found == grants_.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(),
                     [&](const Grant& grant) { return (grant.rights & rights) != 0; });
}

const Quota* Rights::QuotaOf(const std::string& identity) const {
  const auto found = quotas_.find(identity);
  return found == quotas_.end() ? nullptr : &found->second;
}

}  // namespace ballast::services
