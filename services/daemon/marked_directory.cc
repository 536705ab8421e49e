#include "ballast/services/daemon/marked_directory.h"

#include <google/protobuf/util/json_util.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/storage/io/small_file.h"

namespace ballast::services {
namespace {

uint64_t Draw() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

void WarnOfLostMark(const v1::ServerEntry& entry, uint64_t own, uint64_t etcds) {
  if (own <= etcds + 1) return;
  spdlog::warn(
      "etcd has mark {} of data directory number {}, whose own is {}: etcd lost its data or came back from a backup, "
      "or "
      "`discovery` names another etcd or prefix than before. If there are copies of the directory, see to it that this "
      "one served last as '{}'",
      etcds, model::ShowDisk(entry.disk()), own, entry.server_id());
}

}  // namespace

bool IsNewestCopy(const v1::DirectoryMark& own, const std::optional<v1::DirectoryMark>& etcds) {
  if (!etcds.has_value() || etcds->accepts_any() || own.count() > etcds->count()) return true;
  return own.count() == etcds->count() && own.draw() == etcds->draw();
}

v1::DirectoryMark NextMark(const v1::DirectoryMark& own, const std::optional<v1::DirectoryMark>& etcds, uint64_t draw) {
  const uint64_t known = etcds.has_value() ? etcds->count() : 0;
  v1::DirectoryMark next = own;
  // Not further: while etcd fails, the mark would run ahead of what other copies count meanwhile.
  if (own.count() > known) return next;
  next.set_count(known + 1);
  next.set_draw(draw);
  return next;
}

absl::StatusOr<v1::DirectoryMark> MarkedDirectory::Read(uint64_t disk) const {
  v1::DirectoryMark none, mark;
  none.set_disk(disk);
  const absl::StatusOr<std::string> text = storage::ReadSmallFile(absl::StrCat(path_, "/", kMarkFile));
  if (absl::IsNotFound(text.status())) return none;
  BALLAST_RETURN_IF_ERROR(text.status());
  if (!google::protobuf::util::JsonStringToMessage(*text, &mark).ok()) return none;
  return mark.disk() == disk ? mark : none;
}

absl::StatusOr<MarkedDirectory::Marks> MarkedDirectory::Look(const v1::ServerEntry& entry, absl::Time deadline) const {
  Marks marks;
  // etcd's first: the file may rise meanwhile, and rises before etcd's.
  BALLAST_ASSIGN_OR_RETURN(marks.etcds, registry_->FindMark(entry.server_id(), entry.disk(), deadline));
  BALLAST_ASSIGN_OR_RETURN(marks.own, Read(entry.disk()));
  if (marks.etcds.has_value() && !IsNewestCopy(marks.own, marks.etcds->value)) {
    return OlderCopy(entry, marks.own, marks.etcds->value);
  }
  return marks;
}

absl::Status MarkedDirectory::Check(const v1::ServerEntry& entry, absl::Time deadline) const {
  return Look(entry, deadline).status();
}

absl::StatusOr<bool> MarkedDirectory::RaiseOnce(const v1::ServerEntry& entry, absl::Duration call_timeout) {
  BALLAST_ASSIGN_OR_RETURN(const Marks marks, Look(entry, absl::Now() + call_timeout));
  const auto& [own, found] = marks;
  const std::optional<v1::DirectoryMark> etcds = found.has_value() ? std::optional(found->value) : std::nullopt;
  WarnOfLostMark(entry, own.count(), found.has_value() ? found->value.count() : 0);
  v1::DirectoryMark next = NextMark(own, etcds, Draw());
  const bool raised = next.count() > own.count();
  next.set_address(entry.address());
  next.set_written_seconds(absl::ToUnixSeconds(absl::Now()));
  if (raised) {
    std::string json;
    (void)google::protobuf::util::MessageToJsonString(next, &json);
    BALLAST_RETURN_IF_ERROR(storage::WriteSmallFile(absl::StrCat(path_, "/", kMarkFile), json));
  }
  BALLAST_ASSIGN_OR_RETURN(
      const bool put,
      registry_->PutMark(entry.server_id(), next, found.has_value() ? found->revision : 0, absl::Now() + call_timeout));
  if (put) return raised;
  return model::Error(
      absl::StatusCode::kAborted, model::kBusy,
      absl::StrCat("the key ", registry_->MarkKeyName(entry.server_id(), entry.disk()), " changed meanwhile"));
}

absl::Status MarkedDirectory::Raise(const v1::ServerEntry& entry, absl::Duration call_timeout) {
  BALLAST_ASSIGN_OR_RETURN(const bool raised, RaiseOnce(entry, call_timeout));
  if (raised) return absl::OkStatus();
  return RaiseOnce(entry, call_timeout).status();
}

absl::Status MarkedDirectory::OlderCopy(const v1::ServerEntry& entry, const v1::DirectoryMark& own,
                                        const v1::DirectoryMark& etcds) const {
  const std::string until =
      absl::FormatTime(absl::RFC3339_sec, absl::FromUnixSeconds(etcds.written_seconds()), absl::UTCTimeZone());
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kBadConfig,
      absl::StrCat(
          "data directory '", path_, "' (number ", model::ShowDisk(entry.disk()),
          ") is an older copy of the one that served last as '", entry.server_id(), "', at ", etcds.address(),
          " until ", until, " or later: expected its mark ", etcds.count(), ", found ",
          own.count() == 0 ? std::string("none") : absl::StrCat(own.count()),
          ". Was a backup restored, or a disk cloned? Its jobs would go on at older versions. Start the server "
          "on the directory that served last; or, if that is lost and this copy shall serve instead, run "
          "`ballastctl accept-copy --server ",
          entry.server_id(), " --servers ", registry::FormatRegistryUrl(registry_->url()),
          "` and start this server again"));
}

}  // namespace ballast::services
