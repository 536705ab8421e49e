#include "ballast/client/group/sight.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {

absl::StatusOr<Sight> LookAt(Router* router, const std::string& job, bool with_open, absl::Time deadline) {
  v1::GetJobRequest ask;
  ask.set_job(job);
  ask.set_without_open(!with_open);
  BALLAST_ASSIGN_OR_RETURN(auto answers,
                           (CallAll<v1::GetJobRequest, v1::GetJobResponse>(
                               router, &Transport::GetJob, absl::StrCat("GetJob of job '", job, "'"), ask, deadline)));
  return SightOf(std::move(answers));
}

Sight SightOf(std::vector<v1::GetJobResponse> answers) {
  Sight sight;
  sight.answers = std::move(answers);
  for (const v1::GetJobResponse& answer : sight.answers) {
    if (answer.exists()) sight.version = std::max(sight.version, answer.committed());
    sight.exists = sight.exists || answer.exists();
  }
  return sight;
}

const v1::OpenRequest* NewestOpen(absl::Span<const v1::GetJobResponse> answers) {
  const v1::OpenRequest* newest = nullptr;
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.has_open() && (newest == nullptr || model::Compare(answer.open().epoch(), newest->epoch()) > 0)) {
      newest = &answer.open();
    }
  }
  return newest;
}

absl::Status LeaveOthersOut(const v1::OpenRequest& open, const std::string& job, Members* members, Sight* sight) {
  BALLAST_RETURN_IF_ERROR(members->LeaveOthersOut(job, model::MembersOf(open)));
  std::erase_if(sight->answers,
                [members](const v1::GetJobResponse& answer) { return !members->Has(answer.server_id()); });
  return absl::OkStatus();
}

}  // namespace ballast::client
