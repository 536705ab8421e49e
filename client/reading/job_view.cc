#include "ballast/client/reading/job_view.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/group/pins.h"
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

absl::Status NotReady(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kFailedPrecondition, reason, message);
}

bool AllPromise(const Sight& sight, const v1::Epoch& epoch) {
  return std::all_of(sight.answers.begin(), sight.answers.end(),
                     [&](const v1::GetJobResponse& answer) { return model::Compare(answer.promised(), epoch) == 0; });
}

// Which servers' answers to wait for: not those whose silence is known, unless all are silent.
std::vector<bool> Awaited(const Router& router) {
  std::vector<bool> awaited(router.server_count(), true);
  const std::vector<Router::SilentServer> silent = router.Silent();
  if (silent.size() >= awaited.size()) return awaited;
  for (const Router::SilentServer& server : silent) awaited[std::min<size_t>(server.place, awaited.size() - 1)] = false;
  return awaited;
}

// The table without members that have nothing to read: a reader needs a holder of each chunk.
absl::StatusOr<v1::Table> ThereOf(const v1::Table& table, const Sight& sight) {
  std::vector<bool> there;
  for (const v1::Member& member : table.members()) {
    there.push_back(std::any_of(sight.answers.begin(), sight.answers.end(), [&](const v1::GetJobResponse& answer) {
      return answer.server_id() == member.server_id() && answer.disk() == member.disk() && answer.exists() &&
             !answer.state_lost();
    }));
  }
  const std::string lacking = model::ShardsWithout(table, there);
  if (lacking.empty()) return model::LeaveOut(table, there);
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                      absl::StrCat("no server that answers holds ", lacking, " of the job; start the missing ones"));
}

}  // namespace

absl::Status JobView::Meet(absl::Time deadline) {
  JobKey key(router_->transport(0)->registry(), job_);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  may_change_ = key.has_places();
  BALLAST_RETURN_IF_ERROR(
      members_.Identify(key, Spares::kPassOver, {.members = kPatience, .spares = absl::ZeroDuration()}, deadline));
  return members_.FollowKey(job_, key);
}

absl::StatusOr<std::vector<std::unique_ptr<Transport>>> JobView::ConnectAnew(absl::Time deadline) const {
  Transport* const any = router_->transport(0);
  JobKey key(any->registry(), job_);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  if (!key.has_places()) {
    return NotReady(model::kKeyLost, absl::StrCat("etcd has no key of job '", job_, "' any more: it was dropped, or ",
                                                  "etcd lost it. ", model::kHowToRestoreKey));
  }
  std::vector<std::unique_ptr<Transport>> servers;
  for (const v1::Member& member : key.value().table().members()) {
    BALLAST_ASSIGN_OR_RETURN(servers.emplace_back(), any->Another(member));
  }
  return servers;
}

// Where servers may change: answers of those that give one soon.
absl::StatusOr<Sight> JobView::Ask(bool with_open, absl::Time deadline) const {
  if (!may_change_) return LookAt(router_, job_, with_open, deadline);
  v1::GetJobRequest ask;
  ask.set_job(job_);
  ask.set_without_open(!with_open);
  const auto asked = AskAll<v1::GetJobRequest, v1::GetJobResponse>(router_, &Transport::GetJob,
                                                                   absl::StrCat("GetJob of job '", job_, "'"), ask,
                                                                   std::min(deadline, absl::Now() + kPatience));
  const std::vector<bool> needed = Awaited(*router_);
  std::vector<v1::GetJobResponse> answers;
  absl::Status failed;
  for (const auto& answer : asked->Await(needed, /*grace=*/absl::ZeroDuration(), absl::InfiniteFuture())) {
    if (!answer.has_value()) continue;
    if (answer->ok()) {
      answers.push_back(**answer);
    } else {
      failed = answer->status();
    }
  }
  if (answers.empty()) return failed;
  return SightOf(std::move(answers));
}

bool JobView::IsOfPlan(const Sight& sight) const {
  return sight.answers.size() == router_->server_count() && AllPromise(sight, plan_->open().epoch());
}

bool JobView::HasMoved(absl::Time deadline) const {
  if (!may_change_) return false;
  const absl::StatusOr<Sight> sight = Ask(/*with_open=*/false, deadline);
  return !sight.ok() || !IsOfPlan(*sight);
}

absl::StatusOr<int64_t> JobView::Look(absl::Time deadline) {
  bool follows = plan_ == nullptr;
  BALLAST_ASSIGN_OR_RETURN(Sight sight, Ask(follows, deadline));
  if (!follows && !IsOfPlan(sight)) {
    if (may_change_) {
      return NotReady(model::kStaleEpoch,
                      absl::StrCat("the group of job '", job_, "' has gone on, or a server is lost"));
    }
    follows = true;
    BALLAST_ASSIGN_OR_RETURN(sight, Ask(follows, deadline));
  }
  if (!sight.exists) return Missing();
  if (follows) BALLAST_RETURN_IF_ERROR(Follow(&sight, deadline));
  BALLAST_RETURN_IF_ERROR(CheckReadable(sight));
  life_ = PinsOf(sight.answers).life;
  return sight.version;
}

absl::Status JobView::Follow(Sight* sight, absl::Time deadline) {
  const v1::OpenRequest* const newest = NewestOpen(sight->answers);
  if (newest == nullptr) {
    return NotReady(model::kBadRequest, absl::StrCat("job '", job_, "' has no values yet: no group has opened it"));
  }
  v1::OpenRequest open = *newest;
  // The order of servers before an earlier Match is forgotten.
  if (plan_ != nullptr) BALLAST_RETURN_IF_ERROR(Meet(deadline));
  if (open.has_table()) {
    may_change_ = router_->transport(0)->registry() != nullptr;
    BALLAST_ASSIGN_OR_RETURN(*open.mutable_table(), ThereOf(open.table(), *sight));
  }
  BALLAST_RETURN_IF_ERROR(LeaveOthersOut(open, job_, &members_, sight));
  for (const v1::GetJobResponse& answer : sight->answers) {
    if (answer.open().spec_digest() == open.spec_digest()) continue;
    return NotReady(model::kNotOpen,
                    absl::StrCat("server '", answer.server_id(), "' does not have the newest Open of job '", job_,
                                 "': a group is opening it; try again"));
  }
  if (plan_ != nullptr && model::Compare(plan_->open().epoch(), open.epoch()) == 0) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan plan, model::EpochPlan::Make(open));
  BALLAST_ASSIGN_OR_RETURN(optimizer_, model::OptimizerOf(open.spec()));
  BALLAST_RETURN_IF_ERROR(members_.Match(open));
  plan_ = std::make_shared<const model::EpochPlan>(std::move(plan));
  if (may_change_) router_->SetRoutes(plan_, kPatience, Router::Follows::kAnyGroup);
  return absl::OkStatus();
}

absl::Status JobView::CheckReadable(const Sight& sight) const {
  BALLAST_RETURN_IF_ERROR(members_.CheckAnswers(sight.answers));
  for (const v1::GetJobResponse& answer : sight.answers) {
    const std::string server = absl::StrCat("server '", answer.server_id(), "' ");
    if (answer.state_lost()) {
      return NotReady(model::kStateLost, absl::StrCat(server, "was restarted without the state of job '", job_,
                                                      "'; start the job's group again, and read then"));
    }
    if (!answer.exists()) {
      return NotReady(model::kNotOpen, absl::StrCat(server, "does not have job '", job_, "' open yet; try again"));
    }
    if (!answer.leases_pins()) {
      return model::Error(
          absl::StatusCode::kUnimplemented, model::kUnsupported,
          absl::StrCat(server, "would keep a reader's version for ever if the reader dies, as it is of an ",
                       "earlier release; run the same release on all servers and readers"));
    }
  }
  if (sight.version >= 0) return absl::OkStatus();
  return NotReady(model::kBadRequest,
                  absl::StrCat("job '", job_, "' has no values yet; its group gives them with its first step"));
}

absl::Status JobView::CheckLife(uint64_t life, absl::Time deadline) const {
  BALLAST_ASSIGN_OR_RETURN(Sight sight, Ask(/*with_open=*/false, deadline));
  // Who left the job has dropped it.
  if (may_change_) std::erase_if(sight.answers, [](const v1::GetJobResponse& answer) { return !answer.exists(); });
  if (!sight.answers.empty() && PinsOf(sight.answers).life == life) return absl::OkStatus();
  return NotReady(model::kVersionGone, absl::StrCat("job '", job_, "' was dropped while it was read; read again"));
}

absl::Status JobView::Missing() const {
  return model::Error(absl::StatusCode::kNotFound, model::kJobMissing,
                      absl::StrCat("the servers have no job '", job_, "'; check its name and the servers"));
}

}  // namespace ballast::client
