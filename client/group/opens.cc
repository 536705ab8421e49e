#include "ballast/client/group/opens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::client {

absl::Status TryOpen(Router* router, v1::OpenRequest open, absl::Time deadline) {
  BALLAST_RETURN_IF_ERROR(model::EpochPlan::Make(open).status());
  open.set_dry_run(true);
  return CallAll<v1::OpenRequest, v1::OpenResponse>(
             router, &Transport::Open, absl::StrCat("Space for job '", open.spec().name(), "'"), open, deadline)
      .status();
}

absl::Status SendOpen(Router* router, const v1::OpenRequest& open, absl::Time deadline) {
  return CallAll<v1::OpenRequest, v1::OpenResponse>(router, &Transport::Open,
                                                    absl::StrCat("Open of job '", open.spec().name(), "'"), open,
                                                    deadline, static_cast<uint32_t>(model::MembersOf(open).size()))
      .status();
}

absl::Status SendFirstOpen(Router* router, const v1::OpenRequest& open, absl::Duration timeout) {
  for (;;) {
    const absl::Status opened = SendOpen(router, open, absl::Now() + timeout);
    if (!IsAtWork(opened)) return opened;
  }
}

std::vector<absl::StatusOr<v1::OpenResponse>> SendOpenTo(Router* router, const std::string& what,
                                                         const std::shared_ptr<const v1::OpenRequest>& open,
                                                         const std::vector<OpenTo>& servers, absl::Time deadline,
                                                         absl::Duration grace) {
  std::vector<bool> needed;
  std::shared_ptr<const v1::OpenRequest> brief;
  const auto answers = std::make_shared<Answers<v1::OpenResponse>>(static_cast<uint32_t>(servers.size()));
  for (uint32_t i = 0; i < servers.size(); ++i) {
    needed.push_back(servers[i].needed);
    if (servers[i].briefly && brief == nullptr)
      brief = std::make_shared<const v1::OpenRequest>(model::MakeBrief(*open));
    router->Call<v1::OpenRequest, v1::OpenResponse>(
        &Transport::Open, servers[i].server, what, servers[i].briefly ? brief : open, deadline,
        [answers, i](absl::StatusOr<v1::OpenResponse> answer) { answers->Add(i, std::move(answer)); });
  }
  std::vector<absl::StatusOr<v1::OpenResponse>> all;
  for (const auto& answer : answers->Await(needed, grace, absl::InfiniteFuture())) {  // each ends by its deadline
    all.push_back(answer.has_value() ? *answer
                                     : model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                                                    absl::StrCat("no answer within ", absl::FormatDuration(grace),
                                                                 " after those of all members")));
  }
  return all;
}

namespace {

// To the members of the next table, which come first among the router's servers. `first`: as SendFirstOpen.
absl::Status SendToMembers(Router* router, Change* change, const SessionOptions& options, bool first,
                           absl::Time deadline) {
  const std::shared_ptr<const v1::OpenRequest> open = change->plan()->shared_open();
  std::vector<OpenTo> servers;
  for (const v1::Member& member : open->table().members()) {
    servers.push_back({static_cast<uint32_t>(servers.size()), change->HasSpec(member, *open)});
  }
  for (;;) {
    const absl::Time until = first ? absl::Now() + options.open_timeout : deadline;
    const auto answers =
        SendOpenTo(router, absl::StrCat("Open of job '", open->spec().name(), "'"), open, servers, until);
    const auto failed = std::find_if(answers.begin(), answers.end(), [](const auto& answer) { return !answer.ok(); });
    if (failed == answers.end()) return absl::OkStatus();
    if (first && IsAtWork(failed->status())) continue;
    for (size_t m = 0; m < answers.size(); ++m) {
      if (IsSilence(answers[m].status()) && !IsAtWork(answers[m].status()))
        change->NoteUnopened(open->table().members(static_cast<int>(m)));
    }
    return failed->status();
  }
}

}  // namespace

absl::Status OpenNext(Router* router, Members* members, JobKey* key, Change* change, const SessionOptions& options,
                      absl::Time deadline, v1::OpenRequest* open) {
  const model::Found& found = change->found();
  open->set_base(found.base);
  open->clear_base_decision();
  if (found.decision.has_value()) *open->mutable_base_decision() = *found.decision;
  open->mutable_tensor_steps()->Assign(found.tensor_steps.begin(), found.tensor_steps.end());
  BALLAST_ASSIGN_OR_RETURN(*open->mutable_table(), change->Next(*open, deadline));
  members->PutFirst(open->table());
  // Before the Opens: whoever comes next goes by this table, and finds its servers in it.
  BALLAST_RETURN_IF_ERROR(key->WriteTable(open->table(), open->epoch(), deadline));
  const bool is_first = change->newest() == nullptr || change->Joins(open->table());
  BALLAST_RETURN_IF_ERROR(SendToMembers(router, change, options, is_first, deadline));
  change->Tell(open->table());
  return absl::OkStatus();
}

}  // namespace ballast::client
