#include "ballast/proto/registry/registry_url.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/model/address.h"
#include "ballast/proto/model/status.h"

namespace ballast::registry {
namespace {

constexpr absl::string_view kScheme = "etcd://";
constexpr absl::string_view kServers = "servers=";
constexpr size_t kPrefixMax = 256;
constexpr uint32_t kServersMax = 4096;
constexpr size_t kEndpointsMax = 16;

absl::Status Bad(absl::string_view text, absl::string_view why) {
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadConfig,
      absl::StrCat("'", text, "' ", why, "; expected etcd://host:port[,host:port...]/prefix[?servers=N]"));
}

bool IsPrefix(absl::string_view prefix) {
  return !prefix.empty() && prefix.size() <= kPrefixMax && prefix.front() != '/' && prefix.back() != '/' &&
         std::all_of(prefix.begin(), prefix.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' || c == '/';
         });
}

}  // namespace

bool IsRegistryUrl(absl::string_view text) { return absl::StartsWith(text, kScheme); }

absl::StatusOr<RegistryUrl> ParseRegistryUrl(absl::string_view text) {
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, kScheme)) return Bad(text, "is no URL of etcd");
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
  absl::string_view query = path.second;
  if (query.empty()) return url;
  if (!absl::ConsumePrefix(&query, kServers) || !absl::SimpleAtoi(query, &url.servers) || url.servers == 0 ||
      url.servers > kServersMax) {
    return Bad(text, absl::StrCat("has another query than servers=N, 1 to ", kServersMax));
  }
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
