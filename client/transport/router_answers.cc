// What the router makes of an answer: again, a repair, the next epoch, or the end of the call.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/transport/backoff.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

bool IsRetryable(const absl::Status& status) { return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status); }

}  // namespace

absl::Status Router::CheckHolders(const Operation& op, const absl::Status& status) const {
  if (follows_ != Follows::kAnyGroup || op.direction != kPulls || !op.source.has_value()) return absl::OkStatus();
  if (routes_->open().table().replicas() < 2) return absl::OkStatus();  // the group waits for its servers, too
  const absl::Span<const uint32_t> holders = routes_->plan->holders_of(op.source->chunk);
  // What is known of the others may be old: each is asked.
  if (static_cast<size_t>(op.tries) < holders.size()) return absl::OkStatus();
  std::vector<std::string> silent;
  for (const uint32_t holder : holders) {
    const Transport* const server = routes_->servers[holder];
    if (!IsSilent(server)) return absl::OkStatus();
    silent.push_back(absl::StrCat("'", routes_->plan->members()[static_cast<int>(holder)].server_id(), "'"));
  }
  return model::Error(
      absl::StatusCode::kAborted, model::kServerDown,
      absl::StrCat("no answer for ", absl::FormatDuration(silence_max_), " from ", absl::StrJoin(silent, " and "),
                   ", which alone had the chunk. The last answer: ", status.message()));
}

absl::Status Router::CheckSilence(const Operation& op, const absl::Status& status) const {
  if (!IsSilent(op.server)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckHolders(op, status));
  if (!silence_.IsReplaceable(op.server) || (routes_->may_change() && !pinned_)) {
    return absl::OkStatus();
  }
  return model::Error(
      absl::StatusCode::kAborted, model::kServerDown,
      absl::StrCat("no answer for ", absl::FormatDuration(silence_max_),
                   " (failover_after), and other servers have all its chunks: start the group again ",
                   "with resume=auto, and it goes on without this server. The last answer: ", status.message()));
}

// A server that hangs is asked again as soon as the group could go on without it.
absl::Time Router::TryDeadline(const Operation& op) const {
  absl::Duration timeout = options_.try_timeout;
  {
    absl::MutexLock lock(&mutex_);
    // Seals are answered within half a second, whatever is missing.
    const absl::Duration least = op.prompt ? absl::Seconds(1) : absl::Seconds(2);
    if (silence_.IsReplaceable(op.server)) timeout = std::min(timeout, std::max(silence_max_, least));
  }
  return std::min(op.deadline, absl::Now() + timeout);
}

Router::Next Router::Classify(const Operation& op, const absl::Status& status) const {
  if (status.ok() || !stopped_.ok()) return Next::kDone;
  if (Left(op.server)) return routes_ == nullptr ? Next::kDone : Next::kReroute;
  if (absl::Now() >= op.deadline) return Next::kDone;
  if (IsRetryable(status)) return AskAgain(op, status);
  if (HasStopped(op.server, status)) return Next::kRetry;
  const std::string reason = absl::IsFailedPrecondition(status) ? model::ReasonOf(status) : "";
  if (reason == model::kNotOpen && open_ != nullptr) return Next::kSendOpen;
  if (reason == model::kBehind && commit_ != nullptr) return Next::kSendCommit;
  if (MayGoToNextHolder(op, reason)) return Next::kNextHolder;
  return MayBeOutdated(op, status) ? Next::kAwaitRoutes : Next::kDone;
}

Router::Next Router::AskAgain(const Operation& op, const absl::Status& status) const {
  // A server that answers BUSY at once has too much to do, and Commits with their blobs would add to that. Had the
  // server lost the Commit, a later try waits there until its deadline.
  const bool overloaded = absl::IsUnavailable(status) && model::ReasonOf(status) == model::kBusy;
  // Of a server that hangs, a Commit tells whether it lives.
  const bool hangs = absl::IsDeadlineExceeded(status) && silence_.IsReplaceable(op.server);
  const bool asks = (op.awaits_commit || hangs) && !overloaded;
  return asks && commit_ != nullptr ? Next::kSendCommit : Next::kRetry;
}

bool Router::HasStopped(const Transport* server, const absl::Status& status) const {
  return silence_.IsReplaceable(server) && routes_->may_change() && model::DetailsOf(status).contains(model::kStopped);
}

void Router::ReportStopped(const absl::Status& status) {
  if (model::DetailsOf(status).contains(model::kStopped)) Report(std::string(status.message()));
}

// A holder that found its state damaged copies the chunk, and has it again soon. A version that others keep is gone
// where the chunk was copied since.
bool Router::MayGoToNextHolder(const Operation& op, absl::string_view reason) const {
  if (op.direction != kPulls || !op.source.has_value() || routes_ == nullptr) return false;
  const size_t holders = routes_->plan->holders_of(op.source->chunk).size();
  if (reason == model::kNotFilled) return true;
  return reason == model::kVersionGone && op.other_holders + 1 < holders;
}

Transport* Router::NextHolder(const Operation& op) const {
  const absl::Span<const uint32_t> holders = routes_->plan->holders_of(op.source->chunk);
  const auto now = std::find_if(holders.begin(), holders.end(), [&](uint32_t holder) {
    mutex_.AssertHeld();
    return routes_->servers[holder] == op.server;
  });
  const bool last = now == holders.end() || now + 1 == holders.end();
  return routes_->servers[last ? holders.front() : *(now + 1)];
}

Router::Next Router::TryAnotherHolder(Operation* op, Next next) {
  const bool again = next == Next::kRetry || next == Next::kSendCommit;
  if (!again || op->direction != kPulls || !op->source.has_value() || !FailedLast(op->server)) return next;
  Transport* const other = HolderFor(*op->source);
  if (follows_ == Follows::kAnyGroup && FailedLast(other)) {
    op->server = NextHolder(*op);  // in turn, since only calls find out for a reader that one is back
    return next;
  }
  return other == op->server ? next : Next::kReroute;
}

absl::Duration Router::Backoff(const Operation& op) {
  // A single try that ran out of its time has waited long enough.
  if (absl::IsDeadlineExceeded(op.last)) return absl::ZeroDuration();
  return LongestPause(op.tries) * absl::Uniform(random_, 0.5, 1.0);
}

// Runs on a transport's thread, maybe deep inside it: nothing is sent from here.
void Router::OnAnswer(const OperationPtr& op, absl::Status status) {
  Next next = Next::kDone;
  {
    absl::MutexLock lock(&mutex_);
    if (absl::IsCancelled(status) && !stopped_.ok()) status = stopped_;
    next = Classify(*op, status);
    silence_.Note(op->server, op->prompt ? Silence::Call::kPrompt : Silence::Call::kPatient, status, op->tried);
    absl::Status silence = CheckSilence(*op, status);
    if (silence.ok() && IsRetryable(status)) silence = superseded_;
    if (!silence.ok() && next != Next::kDone) {
      status = std::move(silence);
      next = Next::kDone;
    }
    next = TryAnotherHolder(op.get(), next);
    if (next == Next::kAwaitRoutes) {
      op->last = status;
      AwaitRoutes(op);
    } else if (next != Next::kDone) {
      op->last = status;
      const absl::Duration delay = Backoff(*op);
      auto task = [this, op, next] { Repair(op, next); };
      // The first repair goes out at once, later ones after a pause.
      const bool at_once = next == Next::kReroute || (!IsRetryable(op->last) && op->tries == 1);
      timers_.emplace(absl::Now() + (at_once ? absl::ZeroDuration() : delay), std::move(task));
    }
  }
  if (next != Next::kDone) return ReportStopped(status);
  Finish(op, std::move(status));
}

void Router::Repaired(const OperationPtr& op, const absl::Status& repaired) {
  absl::Status ends;
  {
    absl::MutexLock lock(&mutex_);
    ends = stopped_;
    // If the Commit was sent unasked, before a retry, the call's own error says more than the Commit's.
    const bool down = silence_.IsReplaceable(op->server) && model::IsWithoutJob(repaired);
    const bool failed =
        !repaired.ok() && !down && !IsRetryable(repaired) && !IsRetryable(op->last) && !Left(op->server);
    if (ends.ok() && failed && MayBeOutdated(*op, repaired)) {
      op->last = repaired;
      return AwaitRoutes(op);
    }
    if (ends.ok() && failed) ends = repaired;
    if (ends.ok()) timers_.emplace(absl::Now(), [this, op] { Repair(op, Next::kRetry); });
  }
  if (!ends.ok()) Finish(op, ends);
}

void Router::Repair(const OperationPtr& op, Next how) {
  std::shared_ptr<const v1::OpenRequest> open;
  std::shared_ptr<const v1::CommitRequest> commit;
  absl::Status stopped;
  {
    absl::MutexLock lock(&mutex_);
    stopped = stopped_;
    if (stopped.ok() && Left(op->server)) {
      how = Next::kReroute;
      if (routes_ == nullptr) stopped = absl::CancelledError("the session uses this server no longer");
    }
    if (how == Next::kNextHolder) {
      op->server = NextHolder(*op);
      ++op->other_holders;
    }
    if (how == Next::kSendOpen) open = open_;
    if (how == Next::kSendCommit) commit = commit_;
  }
  if (!stopped.ok()) return Finish(op, stopped);
  if (how == Next::kReroute) return Reroute(op);
  const auto then = [this, op](const absl::Status& repaired) { Repaired(op, repaired); };
  const absl::Time try_deadline = TryDeadline(*op);
  Transport* const server = op->server;
  if (open != nullptr) {
    server->Open(*open, try_deadline, [then](absl::StatusOr<v1::OpenResponse> r) { then(r.status()); });
  } else if (commit != nullptr) {
    server->Commit(*commit, try_deadline,
                   [this, server, then, sent = model::SteadyTime::Now()](absl::StatusOr<v1::CommitResponse> r) {
                     {
                       absl::MutexLock lock(&mutex_);
                       silence_.Note(server, Silence::Call::kPrompt, r.status(), sent);
                     }
                     then(r.status());
                   });
  } else {
    Send(op);
  }
}

absl::Status Router::Explain(const Operation& op, const absl::Status& status) const {
  const std::string context = absl::StrCat("server ", op.server->name(), ": ", op.what);
  if (!IsRetryable(status)) return model::Annotate(status, context);
  // The last try may have been cut short by the deadline: then what earlier ones met says more.
  const absl::Status& telling = absl::IsDeadlineExceeded(status) && !op.last.ok() ? op.last : status;
  std::string reason = model::ReasonOf(telling);
  if (reason.empty()) reason = model::kServerDown;
  const absl::Duration waited = absl::Trunc(model::SteadyTime::Now() - op.started, absl::Milliseconds(1));
  return model::Error(
      telling.code(), reason,
      absl::StrCat(context, reason == model::kServerDown ? ": no answer within " : ": no success within ",
                   absl::FormatDuration(waited), " and ", op.tries, op.tries == 1 ? " try" : " tries",
                   reason == model::kServerDown ? "; is the server running?" : ".",
                   " The last answer: ", telling.message()));
}

}  // namespace ballast::client
