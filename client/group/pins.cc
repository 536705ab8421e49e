#include "ballast/client/group/pins.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {

absl::StatusOr<Pins> AskPins(Router* router, const std::string& job, bool may_change, absl::Time deadline) {
  v1::GetJobRequest ask;
  ask.set_job(job);
  ask.set_without_open(true);
  BALLAST_ASSIGN_OR_RETURN(auto answers, (CallAll<v1::GetJobRequest, v1::GetJobResponse>(router, &Transport::GetJob,
                                                                                         "GetJob", ask, deadline)));
  if (may_change) std::erase_if(answers, [](const v1::GetJobResponse& answer) { return !answer.exists(); });
  return PinsOf(answers);
}

Pins PinsOf(absl::Span<const v1::GetJobResponse> answers) {
  Pins pins;
  pins.servers = static_cast<uint32_t>(answers.size());
  bool told = true;
  std::map<int64_t, PinnedOn> versions;
  std::set<uint64_t> lives;
  std::set<int64_t> not_told;  // versions of which some server does not tell the epoch
  for (const v1::GetJobResponse& answer : answers) {
    told = told && answer.life() != 0;
    // Whatever the order of servers. Those of a job with a table all tell the table's.
    if (lives.insert(answer.life()).second) pins.life ^= answer.life();
    for (int i = 0; i < answer.durable_versions_size(); ++i) {
      const v1::Epoch decided_by = i < answer.decided_by_size() ? answer.decided_by(i) : v1::Epoch();
      const int64_t version = answer.durable_versions(i);
      PinnedOn& pin = versions[version];
      ++pin.servers;
      pin.kept.version = version;
      pin.differs = pin.differs || !model::MayBeSame(pin.kept.decided_by, decided_by);
      if (decided_by.counter() == 0) {
        not_told.insert(version);
      } else if (pin.kept.decided_by.counter() == 0) {
        pin.kept.decided_by = decided_by;
      }
    }
  }
  if (!told) pins.life = 0;
  for (auto& [version, pin] : versions) {
    pin.kept.life = pins.life;
    if (not_told.contains(version)) pin.kept.decided_by.Clear();  // all servers tell, or it is not known
    pins.versions.push_back(std::move(pin));
  }
  return pins;
}

bool IsBeforeFill(const KeptVersion& kept, const v1::Table& table) {
  // An epoch that is not told may be older.
  return table.has_last_fill() &&
         (kept.decided_by.counter() == 0 || model::Compare(kept.decided_by, table.last_fill()) < 0);
}

absl::Status DropPartialPins(Router* router, const v1::OpenRequest& open, absl::Time deadline) {
  if (open.spec().durability() == v1::DURABILITY_NONE) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const Pins pins, AskPins(router, open.spec().name(), open.has_table(), deadline));
  for (const PinnedOn& pin : pins.versions) {
    if (pin.servers == pins.servers || IsBeforeFill(pin.kept, open.table())) continue;
    v1::UnpinRequest request;
    request.set_job(open.spec().name());
    request.set_version(pin.kept.version);
    request.set_durable(true);
    *request.mutable_epoch() = open.epoch();
    const std::string what = absl::StrCat("Unpin of version ", pin.kept.version, ", which only some servers have");
    BALLAST_RETURN_IF_ERROR(
        (CallAll<v1::UnpinRequest, v1::UnpinResponse>(router, &Transport::Unpin, what, request, deadline)).status());
  }
  return absl::OkStatus();
}

}  // namespace ballast::client
