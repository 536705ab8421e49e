#include "ballast/client/group/change.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/group/change_lines.h"
#include "ballast/client/group/fencing.h"
#include "ballast/client/group/opens.h"
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/model/wish.h"

namespace ballast::client {
namespace {

// Servers delete files, and a group that opens its job waits meanwhile.
constexpr absl::Duration kDropTimeout = absl::Seconds(10);

// The server's disk failed, or is full: the job has stopped there until somebody looks after the disk, and what the
// server has of it is out of reach.
bool HasStopped(const absl::Status& status) {
  const std::string reason = model::ReasonOf(status);
  return reason == model::kIo || reason == model::kDiskFull;
}

// As a server's answer to GetJob.
std::vector<std::optional<absl::StatusOr<v1::GetJobResponse>>> JobsOf(const Answers<v1::FenceResponse>::All& fenced) {
  std::vector<std::optional<absl::StatusOr<v1::GetJobResponse>>> jobs(fenced.size());
  for (size_t i = 0; i < fenced.size(); ++i) {
    if (!fenced[i].has_value()) continue;
    if (fenced[i]->ok()) {
      jobs[i] = (*fenced[i])->job();
    } else {
      jobs[i] = fenced[i]->status();
    }
  }
  return jobs;
}

}  // namespace

void Change::Report(const std::string& line) const {
  if (options_.progress) options_.progress(absl::StrCat("job '", options_.job, "': ", line));
}

const v1::OpenRequest* Change::newest() const {
  const v1::OpenRequest* newest = nullptr;
  for (const v1::GetJobResponse& answer : answers_) {
    if (!choice_.IsMember(answer) || !answer.has_open()) continue;
    if (newest == nullptr || model::Compare(answer.open().epoch(), newest->epoch()) > 0) newest = &answer.open();
  }
  return newest;
}

// A wish that cannot be read must not stop the job.
absl::Status Change::ReadWish(absl::Time deadline) {
  absl::StatusOr<v1::Wish> wish = key_->ReadWish(deadline);
  if (absl::IsUnavailable(wish.status())) return wish.status();
  if (wish.ok()) {
    choice_.SetWish(*std::move(wish));
  } else {
    Report(absl::StrCat("the wish for its servers is not heeded: ", wish.status().message()));
  }
  return absl::OkStatus();
}

// The error of a member whose state is needed ends the opening; a drained one's does not, nor that of a server that may
// join.
absl::Status Change::CheckFailed(const v1::Member& server, const absl::Status& status) {
  const bool is_member = choice_.IsMember(server);
  if (IsSilence(status) && is_member) return absl::OkStatus();
  if (is_member) errors_.push_back(absl::StrCat(". Server '", server.server_id(), "' says: ", status.message()));
  // Whose state is lost, or on a broken disk, has no copy; whether the others are enough is for FindBase to say.
  const bool needed = is_member && !absl::c_linear_search(wish().not_(), server.server_id()) && !IsRemoved(server);
  if (needed && !absl::IsDataLoss(status) && !HasStopped(status)) return status;
  const bool is_new = choice_.Exclude(server.server_id());
  if ((fences_ || needed) && is_new)
    Report(absl::StrCat("server '", server.server_id(), "' is left out: ", status.message()));
  return absl::OkStatus();
}

absl::StatusOr<bool> Change::Take(const std::vector<Response>& responses) {
  const std::vector<v1::Member> servers = members_->all();
  bool members_answered = true, removed_answered = true;
  answers_.clear();
  errors_.clear();
  for (size_t i = 0; i < responses.size(); ++i) {
    if (!responses[i].has_value()) {
      bool* const answered = IsRemoved(servers[i]) ? &removed_answered : &members_answered;
      *answered = *answered && !choice_.IsMember(servers[i]);
    } else if (responses[i]->ok()) {
      answers_.push_back(**responses[i]);
    } else {
      BALLAST_RETURN_IF_ERROR(CheckFailed(servers[i], responses[i]->status()));
    }
  }
  BALLAST_RETURN_IF_ERROR(Find());
  return members_answered && (removed_answered || found_.enough());
}

absl::StatusOr<const model::Layout*> Change::FindLayout() const {
  const v1::OpenRequest* const open = newest();
  const std::string digest = open == nullptr ? "" : open->spec_digest();
  if (plan_ != nullptr && !digest.empty() && plan_->open().spec_digest() == digest) return &plan_->layout();
  if (open != nullptr && model::IsBrief(*open)) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("the group opened job '", options_.job, "' with further tensors in the meantime"));
  }
  BALLAST_ASSIGN_OR_RETURN(layout_, model::Layout::Make(open == nullptr ? spec_ : open->spec()));
  return &layout_;
}

absl::Status Change::Find() {
  BALLAST_ASSIGN_OR_RETURN(const model::Layout* const layout, FindLayout());
  removes_ = FindWithoutRemoved(*layout);
  if (removes_) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(found_, FindBy(*layout, answers_));
  return absl::OkStatus();
}

absl::StatusOr<model::Found> Change::FindBy(const model::Layout& layout,
                                            absl::Span<const v1::GetJobResponse> answers) const {
  if (fences_) return model::FindBase(now(), layout, answers);
  return model::FindFilled(now(), answers);
}

bool Change::FindWithoutRemoved(const model::Layout& layout) {
  not_removed_.clear();
  std::vector<v1::GetJobResponse> answers;
  std::vector<std::string> removed;
  for (const v1::GetJobResponse& answer : answers_) {
    if (choice_.IsRemoved(answer)) {
      removed.push_back(absl::StrCat("'", answer.server_id(), "'"));
    } else {
      answers.push_back(answer);
    }
  }
  if (removed.empty()) return false;
  auto found = FindBy(layout, answers);
  if (found.ok() && found->enough()) {
    found_ = *std::move(found);
    return true;
  }
  not_removed_ = absl::StrCat("the wish to remove ", absl::StrJoin(removed, ", "),
                              " at once is not heeded, since the others are not enough: ",
                              found.ok() ? model::ShowWait(now(), *found) : std::string(found.status().message()));
  return false;
}

absl::Status Change::NotEnough() const {
  // With durability none: whoever could have the rest has lost it.
  if (found_.silent.empty()) BALLAST_RETURN_IF_ERROR(model::Resolve(answers_).status());
  return model::Error(
      absl::StatusCode::kUnavailable, model::kServerDown,
      absl::StrCat("job '", options_.job, "' cannot go on: ", model::ShowWait(now(), found_), ShowErrors()));
}

std::string Change::ShowErrors() const { return absl::StrJoin(errors_, ""); }

absl::Status Change::Gather(const Await& await, absl::Time deadline) {
  const std::vector<v1::Member> servers = members_->all();
  std::vector<bool> needed;
  for (const v1::Member& server : servers) needed.push_back(choice_.IsMember(server));
  std::vector<Response> responses;
  absl::Time until = std::min(deadline, absl::Now() + options_.failover_after);
  for (;;) {
    responses = await(needed, until);
    BALLAST_ASSIGN_OR_RETURN(const bool members_answered, Take(responses));
    const bool over = absl::Now() >= deadline;
    if (found_.enough() && (members_answered || over)) break;
    if (members_answered || over) return NotEnough();
    until = std::min(deadline, absl::Now() + absl::Seconds(1));
  }
  for (size_t i = 0; i < servers.size(); ++i) {
    const bool silent = !responses[i].has_value() || IsSilence(responses[i]->status());
    if (silent && !needed[i]) choice_.NoteAbsent(servers[i]);
  }
  std::vector<std::string> answered;
  for (const v1::GetJobResponse& answer : answers_) answered.push_back(answer.server_id());
  members_->KeepOnly(answered);
  return members_->CheckAnswers(answers_);
}

absl::StatusOr<Sight> Change::Look(const v1::JobSpec& spec, absl::Time deadline) {
  choice_.SetTable(key_->value().table());
  spec_ = spec;
  BALLAST_RETURN_IF_ERROR(ReadWish(deadline));
  v1::GetJobRequest ask;
  ask.set_job(options_.job);
  const auto asked = AskAll<v1::GetJobRequest, v1::GetJobResponse>(
      router_, &Transport::GetJob, absl::StrCat("GetJob of job '", options_.job, "'"), ask, deadline);
  const auto await = [&](const std::vector<bool>& needed, absl::Time until) {
    return asked->Await(needed, grace_, until);
  };
  BALLAST_RETURN_IF_ERROR(Gather(await, deadline));
  if (!not_removed_.empty()) Report(not_removed_);
  ExcludeRemoved();
  Sight sight;
  for (const v1::GetJobResponse& answer : answers_) {
    if (!choice_.IsMember(answer) && !choice_.IsLeftOver(answer)) continue;
    sight.answers.push_back(answer);
    sight.exists = sight.exists || answer.exists();
    if (answer.exists()) sight.version = std::max(sight.version, answer.committed());
  }
  return sight;
}

// With what it has it would count as filled, and that is not wanted any more.
void Change::ExcludeRemoved() {
  for (const v1::GetJobResponse& answer : answers_) {
    const bool removed =
        absl::c_any_of(wish().now(), [&](const v1::Removal& one) { return one.server_id() == answer.server_id(); });
    if (!removed || !choice_.IsLeftOver(answer) || !choice_.Exclude(answer.server_id())) continue;
    Report(absl::StrCat("server '", answer.server_id(), "' was removed and has not dropped what it had, so it cannot ",
                        "join: the job's next change has it dropped, or `ballastctl drop --job ", options_.job,
                        "` at that server's address"));
  }
}

absl::Status Change::Claimed(const v1::Epoch& epoch, absl::Time deadline) {
  epoch_ = epoch;
  const v1::Table before = choice_.SetTable(key_->value().table());
  BALLAST_RETURN_IF_ERROR(members_->CheckNoneIsNew(options_.job, before, now()));
  BALLAST_RETURN_IF_ERROR(ReadWish(deadline));
  BALLAST_RETURN_IF_ERROR(Find());
  ExcludeOtherJobs();
  std::vector<std::string> stay;
  const std::vector<v1::Member> servers = members_->all();
  for (const v1::Member& server : servers) {
    if (choice_.IsMember(server)) stay.push_back(server.server_id());
  }
  for (const v1::Member& server : choice_.Servers(Known(servers))) stay.push_back(server.server_id());
  for (const v1::GetJobResponse& answer : answers_) {
    if (choice_.IsLeftOver(answer)) stay.push_back(answer.server_id());
  }
  members_->KeepOnly(stay);
  return absl::OkStatus();
}

void Change::ExcludeOtherJobs() {
  for (const v1::GetJobResponse& answer : answers_) {
    if (choice_.IsMember(answer)) continue;
    // One that was fenced alone, by an opening that failed, has a life of its own until its first Open.
    const bool opened = answer.opened().counter() != 0 || answer.has_open();
    const bool other = opened && answer.life() != 0 && answer.life() != now().life();
    const bool later = model::Compare(answer.promised(), epoch_) >= 0;
    if (!other && !later) continue;
    if (choice_.Exclude(answer.server_id())) {
      Report(absl::StrCat("server '", answer.server_id(), "' cannot join: it has another job of this name, ",
                          "dropped elsewhere and made again; drop it there too (`ballastctl drop --job ", options_.job,
                          "` at that server's address)"));
    }
  }
}

absl::Status Change::Fence(const std::string& group, bool expect_empty, absl::Time deadline) {
  fences_ = true;
  std::vector<uint64_t> promised;
  for (const std::string& id : members_->ids()) {
    const auto answer = std::find_if(answers_.begin(), answers_.end(),
                                     [&](const v1::GetJobResponse& one) { return one.server_id() == id; });
    promised.push_back(answer->promised().counter());
  }
  Fencing fencing(router_, options_.job, std::move(promised), members_->peers());
  fencing.Raise(epoch_);
  fencing.Name(group);
  BALLAST_ASSIGN_OR_RETURN(const auto fenced, fencing.Ask(expect_empty, deadline));
  const auto await = [&](const std::vector<bool>& needed, absl::Time until) {
    return JobsOf(fenced->Await(needed, grace_, until));
  };
  return Gather(await, deadline);
}

KnownServers Change::Known(const std::vector<v1::Member>& servers) const {
  return {servers, answers_, members_->away(), found_, removes_};
}

v1::Table Change::Plan() const {
  const std::vector<v1::Member> servers = members_->all();
  const absl::StatusOr<const model::Layout*> layout = FindLayout();  // was made before
  return choice_.NextTable(Known(servers), **layout, epoch_);
}

bool Change::IsNeeded() const {
  const v1::Table next = Plan();
  return !model::SameTable(next, now()) && !model::OnlySettles(now(), next);
}

bool Change::Joins(const v1::Table& next) const {
  return std::any_of(next.members().begin(), next.members().end(),
                     [&](const v1::Member& member) { return model::Compare(member.since(), epoch_) == 0; });
}

void Change::NoteUnopened(const v1::Member& member) {
  if (model::Compare(member.since(), epoch_) == 0) choice_.NoteAbsent(member);
}

void Change::Tell(const v1::Table& next) const {
  if (!options_.progress) return;
  std::vector<bool> removed;
  for (const v1::Member& member : now().members()) removed.push_back(model::IsRemoved(wish(), member));
  for (const std::string& line : ShowChange(options_.job, now(), next, found_, options_.failover_after, removed)) {
    options_.progress(line);
  }
}

void Change::DropLeft(const v1::Table& next) {
  v1::DropJobRequest drop;
  drop.set_job(options_.job);
  *drop.mutable_epoch() = epoch_;
  const auto request = std::make_shared<const v1::DropJobRequest>(drop);
  const std::vector<v1::Member> servers = members_->all();
  const auto first = static_cast<uint32_t>(next.members_size());
  const auto count = static_cast<uint32_t>(servers.size());
  if (first == count) return;
  const auto dropped = std::make_shared<Answers<v1::DropJobResponse>>(count - first);
  for (uint32_t i = first; i < count; ++i) {
    router_->Call<v1::DropJobRequest, v1::DropJobResponse>(
        &Transport::DropJob, i, absl::StrCat("Drop of job '", options_.job, "'"), request, absl::Now() + kDropTimeout,
        [dropped, at = i - first](absl::StatusOr<v1::DropJobResponse> answer) { dropped->Add(at, std::move(answer)); });
  }
  const auto answers = dropped->Await(absl::InfiniteFuture());
  for (uint32_t i = first; i < count; ++i) {
    const absl::Status& status = answers[i - first]->status();
    if (status.ok() || absl::IsNotFound(status)) continue;
    // If training waits for another change, that one tells the server again. There may be none.
    const std::string why = absl::IsCancelled(status) ? "It was not awaited, and the job's next change tells it again"
                                                      : std::string(status.message());
    Report(absl::StrCat("server '", servers[i].server_id(), "' is no member any more and keeps what it had of the ",
                        "job. `ballastctl drop --job ", options_.job, " --servers ", servers[i].address(),
                        "` frees it. (", why, ")"));
  }
}

}  // namespace ballast::client
