#include "ballast/services/tools/key_age.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/registry/roster.h"

namespace ballast::services {

absl::Status CheckKeyIsNewest(const std::string& job, const v1::JobKey& key,
                              const std::vector<v1::ServerEntry>& entries, const Asking& asking,
                              registry::Registry* registry) {
  std::vector<v1::Member> missing;
  const std::vector<v1::ServerEntry> members = registry::MembersAmong(key, entries, &missing);
  std::vector<std::string> addresses;
  for (const v1::ServerEntry& member : members) addresses.push_back(member.address());
  v1::Epoch newest = key.claimed();
  std::string knows;
  for (const ServerView& server : LookAt(addresses, asking)) {
    for (const v1::JobStatus& known : server.status.jobs()) {
      if (known.name() != job || model::Compare(known.epoch(), newest) <= 0) continue;
      newest = known.epoch();
      knows = server.status.server_id();
    }
  }
  if (knows.empty()) return absl::OkStatus();
  // A group may have claimed since the key was read.
  BALLAST_ASSIGN_OR_RETURN(const auto again, registry->FindJob(job, absl::Now() + asking.timeout));
  if (again.has_value() && model::Compare(again->value.claimed(), newest) >= 0) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kKeyLost,
      absl::StrCat("the key ", registry->JobKeyName(job), " is older than the job: it was claimed by epoch ",
                   key.claimed().counter(), ", and server '", knows, "' knows epoch ", newest.counter(),
                   ". Did etcd come back from a backup? ", model::kHowToRestoreKey));
}

}  // namespace ballast::services
