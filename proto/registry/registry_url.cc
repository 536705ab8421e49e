#include "ballast/proto/registry/registry_url.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"

namespace ballast::registry {
namespace {

constexpr absl::string_view kScheme = "etcd://";
constexpr absl::string_view kServers = "servers=";
constexpr size_t kValueBytesMax = 4096;  // as long as a path may be
constexpr size_t kPrefixMax = 256;
constexpr uint32_t kServersMax = 4096;
constexpr size_t kEndpointsMax = 16;

absl::Status Bad(absl::string_view text, absl::string_view why) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      absl::StrCat("'", text, "' ", why,
                                   "; expected etcd://host:port[,host:port...]/prefix[?servers=N], or more after ",
                                   "the '?', joined by '&': ca, certificate, key, user and password_file"));
}

bool IsPrefix(absl::string_view prefix) {
  return !prefix.empty() && prefix.size() <= kPrefixMax && prefix.front() != '/' && prefix.back() != '/' &&
         std::all_of(prefix.begin(), prefix.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' || c == '/';
         });
}

absl::Status TakeQuery(absl::string_view text, absl::string_view query, RegistryUrl* url) {
  const std::pair<absl::string_view, std::string*> texts[] = {{"ca", &url->access.ca},
                                                              {"certificate", &url->access.certificate},
                                                              {"key", &url->access.key},
                                                              {"user", &url->user},
                                                              {"password_file", &url->password_file}};
  for (const absl::string_view part : absl::StrSplit(query, '&')) {
    const std::pair<absl::string_view, absl::string_view> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    if (pair.first == "servers") {
      const bool fits = absl::SimpleAtoi(pair.second, &url->servers) && url->servers > 0 && url->servers <= kServersMax;
      if (!fits) return Bad(text, absl::StrCat("needs a number of servers from 1 to ", kServersMax));
      continue;
    }
    const auto* const known =
        std::find_if(std::begin(texts), std::end(texts), [&](const auto& one) { return one.first == pair.first; });
    if (known == std::end(texts)) return Bad(text, absl::StrCat("has an unknown '", pair.first, "' after its '?'"));
    if (!known->second->empty()) return Bad(text, absl::StrCat("has '", pair.first, "' twice"));
    const bool printable = std::all_of(pair.second.begin(), pair.second.end(),
                                       [](char c) { return absl::ascii_isprint(static_cast<unsigned char>(c)); });
    if (pair.second.empty() || pair.second.size() > kValueBytesMax || !printable) {
      return Bad(text, absl::StrCat("has an invalid value of '", pair.first, "'"));
    }
    *known->second = std::string(pair.second);
  }
  return absl::OkStatus();
}

absl::Status CheckParts(absl::string_view text, const RegistryUrl& url) {
  if (url.access.certificate.empty() != url.access.key.empty()) return Bad(text, "has only one of certificate and key");
  if (!url.access.certificate.empty() && url.access.ca.empty()) {
    return Bad(text, "has a certificate, which needs TLS, without `ca`, the CAs of etcd's members");
  }
  if (url.user.empty() != url.password_file.empty()) return Bad(text, "has only one of user and password_file");
  if (url.user.empty() || !url.access.ca.empty()) return absl::OkStatus();
  for (const std::string& endpoint : url.endpoints) {
    BALLAST_ASSIGN_OR_RETURN(const model::Address address, model::ParseAddress(endpoint, model::AddressUse::kConnect));
    if (model::IsLoopback(address)) continue;
    return Bad(text, absl::StrCat("would send the password to ", endpoint,
                                  " in the clear, where others could read it; add `ca` for TLS"));
  }
  return absl::OkStatus();
}

}  // namespace

bool IsRegistryUrl(absl::string_view text) { return absl::StartsWith(text, kScheme); }

absl::StatusOr<RegistryUrl> ParseRegistryUrl(absl::string_view text) {
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, kScheme)) return Bad(text, "is not a URL of etcd");
  RegistryUrl url;
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(rest, absl::MaxSplits('/', 1));
  url.endpoints = absl::StrSplit(parts.first, ',');
  if (url.endpoints.size() > kEndpointsMax) return Bad(text, "names too many members of etcd");
  for (const std::string& endpoint : url.endpoints) {
    const absl::Status address = model::ParseAddress(endpoint, model::AddressUse::kConnect).status();
    if (!address.ok()) return Bad(text, absl::StrCat("names no member of etcd: ", address.message()));
  }
  const std::pair<absl::string_view, absl::string_view> path = absl::StrSplit(parts.second, absl::MaxSplits('?', 1));
  url.prefix = std::string(path.first);
  if (!IsPrefix(url.prefix)) return Bad(text, "has no prefix of letters, digits, '.', '_', '-' and '/'");
  if (!path.second.empty()) BALLAST_RETURN_IF_ERROR(TakeQuery(text, path.second, &url));
  BALLAST_RETURN_IF_ERROR(CheckParts(text, url));
  return url;
}

absl::StatusOr<std::vector<RegistryUrl>> RegistryUrlIn(const std::vector<std::string>& servers) {
  if (std::none_of(servers.begin(), servers.end(), IsRegistryUrl)) return std::vector<RegistryUrl>();
  const std::string whole = absl::StrJoin(servers, ",");
  if (!IsRegistryUrl(servers.front())) return Bad(whole, "names servers beside a registry");
  BALLAST_ASSIGN_OR_RETURN(RegistryUrl url, ParseRegistryUrl(whole));
  return std::vector<RegistryUrl>{std::move(url)};
}

absl::Status CheckServers(const std::vector<std::string>& servers) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<RegistryUrl> urls, RegistryUrlIn(servers));
  if (!urls.empty()) return absl::OkStatus();
  for (const std::string& server : servers) {
    BALLAST_RETURN_IF_ERROR(model::ParseAddress(server, model::AddressUse::kConnect).status());
  }
  return absl::OkStatus();
}

std::string FormatRegistryUrl(const RegistryUrl& url) {
  return absl::StrCat(kScheme, absl::StrJoin(url.endpoints, ","), "/", url.prefix,
                      url.servers > 1 ? absl::StrCat("?", kServers, url.servers) : "");
}

}  // namespace ballast::registry
