#include "ballast/client/group/opens.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::client {
namespace {

// The deadline passed while a server was busy with the request, not while it was down.
bool IsAtWork(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) && model::ReasonOf(status) == model::kBusy;
}

}  // namespace

absl::Status TryOpen(Router* router, v1::OpenRequest open, absl::Time deadline) {
  BALLAST_RETURN_IF_ERROR(model::EpochPlan::Make(open).status());
  open.set_dry_run(true);
  return router
      ->CallAll<v1::OpenRequest, v1::OpenResponse>(
          &Transport::Open, absl::StrCat("Space for job '", open.spec().name(), "'"), open, deadline)
      .status();
}

absl::Status SendOpen(Router* router, const v1::OpenRequest& open, absl::Time deadline) {
  return router
      ->CallAll<v1::OpenRequest, v1::OpenResponse>(&Transport::Open,
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
  BALLAST_RETURN_IF_ERROR(is_first ? SendFirstOpen(router, *open, options.open_timeout)
                                   : SendOpen(router, *open, deadline));
  change->Tell(open->table());
  return absl::OkStatus();
}

}  // namespace ballast::client
