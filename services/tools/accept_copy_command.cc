#include "ballast/services/tools/accept_copy_command.h"

#include <cstdio>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

constexpr int kAccepted = 0, kNotAccepted = 1, kWrong = 2;

int Complain(const absl::Status& status, int code) {
  std::fprintf(stderr, "ballastctl: accept-copy: %s\n", std::string(status.message()).c_str());
  return code;
}

absl::Status AcceptOne(const std::string& id, v1::DirectoryMark mark, int64_t revision, registry::Registry* registry,
                       absl::Time deadline) {
  mark.set_accepts_any(true);
  BALLAST_ASSIGN_OR_RETURN(const bool put, registry->PutMark(id, mark, revision, deadline));
  const std::string key = registry->MarkKeyName(id, mark.disk());
  if (!put) {
    return model::Error(absl::StatusCode::kAborted, model::kBusy,
                        absl::StrCat("the key ", key, " changed meanwhile: a copy serves already; run `status`"));
  }
  const std::string until =
      absl::FormatTime(absl::RFC3339_sec, absl::FromUnixSeconds(mark.written_seconds()), absl::UTCTimeZone());
  std::printf("%s: the copy that starts next serves, instead of the one that did at %s until %s or later\n",
              key.c_str(), Printable(mark.address()).c_str(), until.c_str());
  return absl::OkStatus();
}

absl::Status Accept(const std::string& id, registry::Registry* registry, absl::Duration timeout) {
  if (!model::IsServerId(id)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("--server: '", Printable(id), "' is no server id"));
  }
  const absl::Time deadline = absl::Now() + timeout;
  BALLAST_ASSIGN_OR_RETURN(const auto holder, registry->Find(id, deadline));
  BALLAST_ASSIGN_OR_RETURN(const auto marks, registry->ListMarks(id, deadline));
  bool accepted = false;
  for (const auto& found : marks) {
    if (holder.has_value() && holder->value.disk() == found.value.disk()) continue;
    BALLAST_RETURN_IF_ERROR(AcceptOne(id, found.value, found.revision, registry, deadline));
    accepted = true;
  }
  if (accepted) return absl::OkStatus();
  if (holder.has_value()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadConfig,
                        absl::StrCat("server '", id, "' is registered at ", Printable(holder->value.address()),
                                     ": stop it first, if a copy shall serve instead"));
  }
  return model::Error(absl::StatusCode::kNotFound, model::kBadConfig,
                      absl::StrCat("etcd has no mark of server '", id, "', and any copy of its directory may start"));
}

}  // namespace

int RunAcceptCopy(const AcceptCopyCommand& command) {
  const auto urls = registry::RegistryUrlIn(command.servers);
  if (!urls.ok()) return Complain(urls.status(), kWrong);
  if (urls->empty()) {
    return Complain(absl::InvalidArgumentError("only a registry knows which copy served last: expected --servers "
                                               "etcd://host:port/prefix, got a list"),
                    kWrong);
  }
  registry::Registry registry(urls->front());
  for (const std::string& id : command.named) {
    const absl::Status accepted = Accept(id, &registry, command.asking.timeout);
    if (!accepted.ok()) return Complain(accepted, kNotAccepted);
  }
  return kAccepted;
}

}  // namespace ballast::services
