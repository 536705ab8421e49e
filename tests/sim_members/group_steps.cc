// Steps of an open epoch (rules 26, 27, 30 and 31).
#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/tests/sim_members/group.h"

namespace ballast::sim_members {

// step_timeout ends a session, and its launcher starts a new group: where two members stop in one step and only one of
// them has calls left to answer, say, or members know a later promise and have forgotten whose it is.
constexpr int kStalledMax = 200;

void Group::Tick(bool timeout) {
  if (timeout && in_session_ && ++stalled_ > kStalledMax) return Kill();
  // Steps of the open epoch go on while the group's own next one is on its way.
  if (open_ != nullptr && !around_.net->busy() && (phase_ == Phase::kTrain || around_.random->Percent(50)))
    Train(timeout);
  switch (phase_) {
    case Phase::kRead:
    case Phase::kClaim:
      if (!std::exchange(waits_, true) || timeout) ReadKey();
      return;
    case Phase::kFence:
      Fence(timeout);
      if (timeout && phase_ == Phase::kFence) TryResolve();
      return;
    case Phase::kWrite:
      if (timeout) ReadKey();
      return;
    case Phase::kTrain:
      if (ShouldLook()) BeginLook();
      return;
    case Phase::kLook:
      Look(timeout);
      return;
    case Phase::kDead:
      return;
  }
}

std::vector<int> Group::MemberServers() const {
  std::vector<int> servers;
  for (const v1::Member& member : plan_->members()) servers.push_back(ServerOf(member.server_id()));
  return servers;
}

// Whether a call of the server is not answered yet.
bool Group::Waits(int server) const {
  return opens_[server] == Sent::kYes || commits_[server] == Sent::kYes || seals_[0][server] == Sent::kYes ||
         seals_[1][server] == Sent::kYes ||
         std::any_of(pushes_.begin(), pushes_.end(), [&](const Push& push) { return push.sent[server] == Sent::kYes; });
}

void Group::StartStep(int64_t step) {
  step_ = step;
  stalled_ = 0;
  attempts_.assign(intent_.world_size, 0);
  sealing_.assign(intent_.world_size, false);
  pushes_.clear();
  for (int server = 0; server < kServers; ++server) {
    prepared_[server].reset();
    for (auto& of_rank : seals_) of_rank[server] = Sent::kNo;
  }
  for (uint32_t rank = 0; rank < intent_.world_size; ++rank) StartAttempt(rank);
}

void Group::StartAttempt(uint32_t rank) {
  std::erase_if(pushes_, [&](const Push& push) { return push.rank == rank; });
  const v1::StepHeader header = intent_.Header(step_);
  for (const uint32_t index : plan_->slices_of_rank(rank)) {
    const model::Slice& slice = plan_->slices()[index];
    if (plan_->Touches(slice, header.gradient_presence())) pushes_.push_back({rank, v1::SLICE_KIND_GRADIENT, index});
    if (plan_->Touches(slice, header.value_presence())) pushes_.push_back({rank, v1::SLICE_KIND_VALUE, index});
  }
}

void Group::Train(bool timeout) {
  const auto again = [&](Sent& sent) {
    if (timeout && sent == Sent::kYes) sent = Sent::kNo;
  };
  for (const int server : MemberServers()) {
    if (timeout && Waits(server)) ++silence_[server];
    again(opens_[server]);
    again(commits_[server]);
    for (auto& of_rank : seals_) again(of_rank[server]);
    if (opens_[server] == Sent::kNo) SendOpen(server);
    if (commit_ != nullptr && commits_[server] == Sent::kNo) SendCommit(server);
  }
  for (uint32_t rank = 0; rank < intent_.world_size; ++rank) {
    if (attempts_[rank] < intent_.FinalAttempt(step_) && around_.random->Percent(15)) {
      ++attempts_[rank];
      ++around_.tally->drops;
      StartAttempt(rank);
    }
  }
  for (Push& push : pushes_) {
    const uint64_t chunk = plan_->slices()[push.slice].chunk;
    for (const auto places : {plan_->holders_of(chunk), plan_->fillers_of(chunk)}) {
      for (const uint32_t member : places) {
        const int server = ServerOf(plan_->members()[static_cast<int>(member)].server_id());
        again(push.sent[server]);
        if (push.sent[server] == Sent::kNo && !around_.random->Percent(25)) SendPush(&push, server);
      }
    }
  }
  for (uint32_t rank = 0; rank < intent_.world_size; ++rank) {
    if (attempts_[rank] < intent_.FinalAttempt(step_)) continue;
    if (!sealing_[rank] && !around_.random->Percent(40)) continue;
    sealing_[rank] = true;
    for (const int server : MemberServers()) {
      if (seals_[rank][server] == Sent::kNo) SendSeal(rank, server);
    }
  }
}

void Group::SendOpen(int server) {
  opens_[server] = Sent::kYes;
  Call<v1::OpenResponse>(
      server,
      [this, open = open_, plan = plan_](Server& target) -> services::Outcome<v1::OpenResponse> {
        if (around_.bug == Bug::kNoFence) {
          auto fenced = target.machine().Fence(FenceOf(open->epoch()));
          if (!fenced.ok()) return fenced.status();
          if (!fenced->has_value()) return std::nullopt;
        }
        return target.machine().Open(*open, plan);
      },
      [this, server, open = open_](absl::StatusOr<v1::OpenResponse> response) {
        if (open != open_) return;
        if (!response.ok()) return OnError(server, response.status(), &opens_[server]);
        opens_[server] = Sent::kDone;
      });
}

void Group::SendCommit(int server) {
  commits_[server] = Sent::kYes;
  Call<v1::CommitResponse>(
      server,
      [commit = commit_](Server& target) -> services::Outcome<v1::CommitResponse> {
        auto done = target.machine().Commit(*commit);
        if (!done.ok()) return done.status();
        return *done;
      },
      [this, server, commit = commit_](absl::StatusOr<v1::CommitResponse> response) {
        if (commit != commit_) return;
        if (!response.ok()) return OnError(server, response.status(), &commits_[server]);
        commits_[server] = Sent::kDone;
      });
}

void Group::SendPush(Push* push, int server) {
  push->sent[server] = Sent::kYes;
  const model::Slice& slice = plan_->slices()[push->slice];
  v1::PushRequest header;
  *header.mutable_epoch() = open_->epoch();
  header.set_step(step_);
  header.set_attempt(attempts_[push->rank]);
  header.set_rank(push->rank);
  header.set_kind(push->kind);
  header.set_unit(slice.unit);
  header.set_begin(slice.range.begin);
  header.set_end(slice.range.end);
  header.set_crc32c(intent_.Digest(step_, header.attempt(), push->kind, slice));
  Call<v1::PushResponse>(
      server,
      [header](Server& target) -> services::Outcome<v1::PushResponse> {
        BALLAST_RETURN_IF_ERROR(target.Push(header));
        return v1::PushResponse();
      },
      [this, server, header, kind = push->kind, index = push->slice,
       open = open_](absl::StatusOr<v1::PushResponse> response) {
        if (open != open_ || header.step() != step_ || header.attempt() != attempts_[header.rank()]) return;
        const auto push = std::find_if(pushes_.begin(), pushes_.end(),
                                       [&](const Push& p) { return p.kind == kind && p.slice == index; });
        if (!response.ok()) return OnError(server, response.status(), &push->sent[server]);
        push->sent[server] = Sent::kDone;
      });
}

void Group::SendSeal(uint32_t rank, int server) {
  seals_[rank][server] = Sent::kYes;
  v1::SealRequest seal;
  *seal.mutable_epoch() = open_->epoch();
  seal.set_step(step_);
  seal.set_attempt(intent_.FinalAttempt(step_));
  seal.set_rank(rank);
  *seal.mutable_header() = intent_.Header(step_);
  if (rank == 0) {
    for (std::string& blob : intent_.Blobs(step_)) seal.add_blobs(std::move(blob));
  }
  seal.set_plan_hash(model::PlanHash(*plan_, step_, seal.attempt(), seal.header(), intent_.Blobs(step_)));
  Call<v1::SealResponse>(
      server,
      [seal](Server& target) -> services::Outcome<v1::SealResponse> {
        auto sealed = target.machine().Seal(seal);
        if (!sealed.ok()) return sealed.status();
        if (*sealed != nullptr) return v1::SealResponse(***sealed);
        if (target.machine().prepared()) return std::nullopt;
        return target.machine().Pending(seal.rank());
      },
      [this, rank, server, seal, open = open_](absl::StatusOr<v1::SealResponse> response) {
        if (seal.step() != step_) return;
        const bool decided = response.ok() && response->has_decided();  // whatever the epoch
        if (open != open_ && !decided) return;
        if (!response.ok()) return OnError(server, response.status(), &seals_[rank][server]);
        OnSeal(rank, server, *response);
      });
}

void Group::OnSeal(uint32_t rank, int server, const v1::SealResponse& response) {
  if (response.has_decided()) return Decide(response.decided());
  if (response.has_pending()) {
    seals_[rank][server] = Sent::kNo;
    for (const v1::RankRange& range : response.pending().missing()) {
      for (Push& push : pushes_) {
        const model::Slice& slice = plan_->slices()[push.slice];
        const bool named = push.rank == range.rank() && slice.unit == range.unit() &&
                           slice.range == model::Range{range.begin(), range.end()};
        if (named && push.sent[server] == Sent::kDone) push.sent[server] = Sent::kNo;
      }
    }
    return;
  }
  seals_[rank][server] = Sent::kDone;
  prepared_[server] = response.prepared();
  unfilled_[server] = response.unfilled_chunks();
  std::vector<v1::PreparedRecord> records;
  for (const int member : MemberServers()) {
    if (prepared_[member].has_value()) records.push_back(*prepared_[member]);
  }
  const size_t members = MemberServers().size();
  const bool survivors = around_.bug == Bug::kSurvivors && members > 1 && around_.random->Percent(30);
  if (records.size() + survivors < members) return;
  const auto decision = model::Decide(records);
  if (decision.ok()) return Decide(*decision);
  if (around_.leave_on_error) return Kill();
  around_.oracle->Broken(absl::StrCat(Name(), " cannot decide: ", decision.status().ToString()));
}

void Group::Decide(const v1::Decision& decision) {
  around_.oracle->Decided(decision, Name());
  if (!around_.oracle->violation().empty()) return;
  last_ = decision;
  auto commit = std::make_shared<v1::CommitRequest>();
  *commit->mutable_decision() = decision;
  commit->mutable_decision()->clear_blobs();
  commit_ = std::move(commit);
  const bool eager = around_.random->Percent(70);
  for (Sent& sent : commits_) sent = eager ? Sent::kNo : Sent::kDone;
  StartStep(step_ + 1);
}

bool Group::IsOtherServer(const absl::Status& status) {
  const std::string reason = model::ReasonOf(status);
  return reason == model::kOtherServer ||
         (reason == model::kBadRequest && absl::StrContains(status.message(), "never promised"));
}

absl::Status Group::OtherServer() {
  return model::Error(absl::StatusCode::kUnavailable, model::kOtherServer, "this call is meant for another server");
}

uint64_t Group::DiskOf(int server) const {
  if (open_ == nullptr) return 0;
  for (const v1::Member& member : open_->table().members()) {
    if (member.server_id() == ServerName(server)) return member.disk();
  }
  return 0;
}

void Group::OnError(int server, const absl::Status& status, Sent* sent) {
  const std::string reason = model::ReasonOf(status);
  if (reason == model::kStaleEpoch) {
    const model::Details details = model::DetailsOf(status);
    const auto group = details.find(model::kGroup);
    // The group's own next epoch, or one of a group that the server has forgotten: others will tell.
    const bool known = group != details.end() && !group->second.empty();
    if (!known || group->second == absl::BytesToHexString(GroupBytes())) {
      *sent = Sent::kNo;
      return;
    }
    ++around_.tally->stale;
    return Kill();
  }
  if (reason == model::kNotOpen) {
    opens_[server] = Sent::kNo;
    *sent = Sent::kNo;
    return;
  }
  if (reason == model::kBehind) {
    commits_[server] = Sent::kNo;
    *sent = Sent::kNo;
    return;
  }
  if (reason == model::kBusy) {
    *sent = Sent::kNo;
    return;
  }
  if (IsOtherServer(status)) return;
  if (reason == model::kOldStep) {
    *sent = Sent::kDone;
    return;
  }
  // It found its copy of a chunk damaged after this group had heard that the copy was made: the next group hears
  // better.
  const bool damaged = around_.tally->damages > 0 && reason == model::kDiverged &&
                       status.message().find("and lacks it") != absl::string_view::npos;
  if (damaged || around_.leave_on_error) return Kill();
  around_.oracle->Broken(absl::StrCat(Name(), " got an error that no fault explains, from server ", ServerName(server),
                                      ": ", status.ToString()));
}

}  // namespace ballast::sim_members
