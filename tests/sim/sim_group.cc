#include "ballast/tests/sim/sim_group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::sim {

void Tally::Add(const Tally& other) {
  groups += other.groups;
  resized += other.resized;
  crashes += other.crashes;
  decisions_lost += other.decisions_lost;
  ranks_lost += other.ranks_lost;
  finished_for_others += other.finished_for_others;
  abandoned += other.abandoned;
  steps += other.steps;
  skipped += other.skipped;
  drops += other.drops;
  mismatches += other.mismatches;
  stale += other.stale;
  norms += other.norms;
  pins += other.pins;
  restores += other.restores;
  gone += other.gone;
  states_lost += other.states_lost;
  went_back += other.went_back;
  numbers_left += other.numbers_left;
  dead += other.dead;
}

SimGroup::SimGroup(GroupIntent intent, Surroundings around)
    : intent_(std::move(intent)), around_(around), plan_(PlanOf(intent_.world_size)), ranks_(intent_.world_size) {}

std::string SimGroup::Name(uint32_t r) const { return absl::StrCat("rank ", r, " of group ", intent_.group); }

bool SimGroup::all_alive() const {
  return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.dead; });
}

void SimGroup::Kill(uint32_t rank) { ranks_[rank].dead = true; }

void SimGroup::RestartRank(uint32_t r, int64_t step) {
  if (open_ == nullptr) return;
  Rank fresh;
  fresh.started = true;
  fresh.life = 1;
  ranks_[r] = std::move(fresh);
  StartStep(&ranks_[r], step);
}

Request SimGroup::Make(uint32_t r, int server, RequestBody body) const {
  const Rank& rank = ranks_[r];
  return Request{intent_.group, r, rank.life, server, rank.step, rank.attempt, 0, std::move(body)};
}

void SimGroup::StartStep(Rank* rank, int64_t step) {
  const uint32_t r = static_cast<uint32_t>(rank - ranks_.data());
  rank->step = step;
  rank->sealing = false;
  for (int server = 0; server < kServers; ++server) {
    rank->seals[server] = Sent::kNo;
    rank->prepared[server].reset();
  }
  auto seal = std::make_shared<v1::SealRequest>();
  seal->set_job(kJob);
  *seal->mutable_epoch() = intent_.epoch;
  seal->set_step(step);
  seal->set_attempt(intent_.FinalAttempt(step));
  seal->set_rank(r);
  *seal->mutable_header() = intent_.Header(step, r);
  if (r == 0) {
    for (std::string& blob : intent_.Blobs(step)) seal->add_blobs(std::move(blob));
  }
  seal->set_plan_hash(intent_.Hash(step, r));
  rank->seal = std::move(seal);
  StartAttempt(r, 0);
}

void SimGroup::StartAttempt(uint32_t r, uint64_t attempt) {
  Rank& rank = ranks_[r];
  rank.attempt = attempt;
  rank.pushes.clear();
  for (const uint32_t index : plan_.slices_of_rank(r)) {
    const model::Slice& slice = plan_.slices()[index];
    if (plan_.Touches(slice, rank.seal->header().gradient_presence())) {
      rank.pushes.push_back({v1::SLICE_KIND_GRADIENT, index});
    }
    if (plan_.Touches(slice, rank.seal->header().value_presence())) {
      rank.pushes.push_back({v1::SLICE_KIND_VALUE, index});
    }
  }
}

void SimGroup::Tick(uint32_t r, bool timeout, std::vector<Request>* requests) {
  Rank& rank = ranks_[r];
  const auto again = [timeout](Sent& sent) {
    if (timeout && sent == Sent::kYes) sent = Sent::kNo;
  };
  for (int server = 0; server < kServers; ++server) {
    if (r == 0) again(fences_[server]);
    again(rank.opens[server]);
    again(rank.seals[server]);
    again(rank.commits[server]);
  }
  for (Push& push : rank.pushes) again(push.sent);

  if (open_ == nullptr) {
    if (r == 0) TickFence(requests);
    return;
  }
  if (!rank.started) {
    rank.started = true;
    if (open_->has_base_decision()) {
      rank.last = open_->base_decision();
      auto commit = std::make_shared<v1::CommitRequest>();
      commit->set_job(kJob);
      *commit->mutable_decision() = *rank.last;
      rank.commit = std::move(commit);
    }
    for (int server = 0; server < kServers; ++server) {
      rank.commits[server] = Sent::kDone;
      // Rank 0 opens; the others send Open only where they hear NOT_OPEN.
      rank.opens[server] = r == 0 ? Sent::kNo : Sent::kDone;
    }
    StartStep(&rank, open_->base() + 1);
  }
  for (int server = 0; server < kServers; ++server) {
    if (std::exchange(rank.opens[server], rank.opens[server] == Sent::kNo ? Sent::kYes : rank.opens[server]) ==
        Sent::kNo) {
      requests->push_back(Make(r, server, open_));
    }
    if (rank.commit != nullptr && rank.commits[server] == Sent::kNo) {
      rank.commits[server] = Sent::kYes;
      requests->push_back(Make(r, server, rank.commit));
    }
  }
  if (r == 0) TickPins(requests);
  TickPushes(r, requests);
  TickSeals(r, requests);
}

void SimGroup::TickFence(std::vector<Request>* requests) {
  auto fence = std::make_shared<v1::FenceRequest>();
  fence->set_job(kJob);
  *fence->mutable_epoch() = intent_.epoch;
  fence->set_protocol_version(model::kProtocolVersion);
  if (plan_.open().has_table()) fence->set_group(absl::StrCat("family ", intent_.family));
  for (int server = 0; server < kServers; ++server) {
    if (fences_[server] != Sent::kNo) continue;
    fences_[server] = Sent::kYes;
    requests->push_back(Make(0, server, std::shared_ptr<const v1::FenceRequest>(fence)));
  }
}

void SimGroup::TickPushes(uint32_t r, std::vector<Request>* requests) {
  Rank& rank = ranks_[r];
  const auto done = [](const Push& push) { return push.sent == Sent::kDone; };
  const uint64_t last_attempt = intent_.FinalAttempt(rank.step);
  if (rank.attempt < last_attempt &&
      (around_.random->Percent(20) || std::all_of(rank.pushes.begin(), rank.pushes.end(), done))) {
    if (around_.random->Percent(30)) AskNorms(r, requests);
    ++around_.tally->drops;
    StartAttempt(r, rank.attempt + 1);
  }
  for (uint32_t i = 0; i < rank.pushes.size(); ++i) {
    Push& push = rank.pushes[i];
    // Backward produces gradients one by one.
    if (push.sent != Sent::kNo || around_.random->Percent(25)) continue;
    push.sent = Sent::kYes;
    const model::Slice& slice = plan_.slices()[push.slice];
    auto header = std::make_shared<v1::PushRequest>();
    header->set_job(kJob);
    *header->mutable_epoch() = intent_.epoch;
    header->set_step(rank.step);
    header->set_attempt(rank.attempt);
    header->set_rank(r);
    header->set_kind(push.kind);
    header->set_unit(slice.unit);
    header->set_begin(slice.range.begin);
    header->set_end(slice.range.end);
    header->set_crc32c(intent_.Digest(rank.step, rank.attempt, push.kind, slice, rank.life));
    Request request = Make(r, static_cast<int>(plan_.holders_of(slice.chunk)[0]),
                           std::shared_ptr<const v1::PushRequest>(std::move(header)));
    request.item = i;
    requests->push_back(std::move(request));
  }
}

void SimGroup::AskNorms(uint32_t r, std::vector<Request>* requests) {
  auto norm = std::make_shared<v1::NormRequest>();
  norm->set_job(kJob);
  *norm->mutable_epoch() = intent_.epoch;
  norm->set_step(ranks_[r].step);
  norm->set_attempt(ranks_[r].attempt);
  norm->set_gradient_presence(ranks_[r].seal->header().gradient_presence());
  requests->push_back(Make(r, static_cast<int>(around_.random->Below(kServers)),
                           std::shared_ptr<const v1::NormRequest>(std::move(norm))));
}

void SimGroup::TickSeals(uint32_t r, std::vector<Request>* requests) {
  Rank& rank = ranks_[r];
  if (rank.attempt < intent_.FinalAttempt(rank.step)) return;
  if (!rank.sealing && r == 0 && pin_ >= 0) return;
  if (!rank.sealing) {
    // A seal may overtake the pushes of its rank.
    const bool all_pushed =
        std::all_of(rank.pushes.begin(), rank.pushes.end(), [](const Push& push) { return push.sent == Sent::kDone; });
    if (!all_pushed && !around_.random->Percent(15)) return;
    if (around_.random->Percent(15)) AskNorms(r, requests);
    rank.sealing = true;
  }
  for (int server = 0; server < kServers; ++server) {
    if (rank.seals[server] != Sent::kNo) continue;
    rank.seals[server] = Sent::kYes;
    requests->push_back(Make(r, server, rank.seal));
  }
}

void SimGroup::OnFence(int server, const v1::FenceResponse& response) {
  fences_[server] = Sent::kDone;
  if (open_ != nullptr) return;
  answers_[server] = response.job();
  Resolve();
}

void SimGroup::Resolve() {
  std::vector<v1::GetJobResponse> answers;
  for (const auto& answer : answers_) {
    if (answer.has_value()) answers.push_back(*answer);
  }
  if (answers.size() < kServers - (around_.bug == ClientBug::kResolveWithoutAll ? 1 : 0)) return;
  size_t prepared = 0;
  for (v1::GetJobResponse& answer : answers) {
    if (answer.has_prepared()) ++prepared;
    if (around_.bug == ClientBug::kResolveNeverFinishes) answer.clear_prepared();
    if (around_.bug == ClientBug::kResolveIgnoresEpoch && answer.has_prepared() && answers[0].has_prepared()) {
      *answer.mutable_prepared()->mutable_epoch() = answers[0].prepared().epoch();
    }
  }
  auto resolution = model::Resolve(answers);
  if (!resolution.ok()) return NotResolved(resolution.status());
  if (resolution->restores.has_value() && around_.bug == ClientBug::kNumbersUsedAgain) {
    resolution->base = *resolution->restores;
  }
  const bool finished = std::all_of(answers.begin(), answers.end(), [&](const v1::GetJobResponse& answer) {
    return answer.committed() < resolution->base;
  });
  if (finished && resolution->base >= 0) ++around_.tally->finished_for_others;
  if (!finished && prepared > 0) ++around_.tally->abandoned;
  around_.oracle->StartedFrom(resolution->base, intent_.epoch, Name(0));
  if (resolution->decision.has_value()) around_.oracle->Decided(*resolution->decision, Name(0));

  if (resolution->restores.has_value()) {
    ++around_.tally->went_back;
    around_.tally->numbers_left += resolution->base > around_.oracle->last_decided();
    around_.oracle->StartsAnew(*resolution->restores, intent_.epoch, Name(0));
    if (!around_.oracle->violation().empty()) return;
    if (around_.bug != ClientBug::kRestoreForgotten) WillRestore(resolution->base, *resolution->restores);
  } else if (intent_.family == intent_.group) {
    MaybeRestore(resolution->base, answers);
  }
  auto open = std::make_shared<v1::OpenRequest>(OpenTemplate(intent_.world_size));
  *open->mutable_epoch() = intent_.epoch;
  if (open->has_table()) open->set_group(absl::StrCat("family ", intent_.family));
  open->set_base(resolution->base);
  if (resolution->decision.has_value()) *open->mutable_base_decision() = *resolution->decision;
  if (resolution->restores.has_value()) open->set_restores(*resolution->restores);
  open_ = std::move(open);
}

void SimGroup::NotResolved(const absl::Status& status) {
  // A job has no version to go back to before its first pin, or after giving up its only pin.
  if (model::ReasonOf(status) == model::kStateLost && PinInterval() > 0 && !around_.oracle->has_floor()) {
    ++around_.tally->dead;
    return;
  }
  around_.oracle->Broken(absl::StrCat(Name(0), " cannot resolve: ", status.ToString()));
}

void SimGroup::Decide(uint32_t r, const v1::Decision& decision) {
  Rank& rank = ranks_[r];
  v1::Decision acknowledged = decision;
  // Servers give the blobs back to rank 0 alone; the others know them from before the seal.
  if (r != 0) {
    const std::vector<std::string> blobs = intent_.Blobs(decision.step());
    acknowledged.mutable_blobs()->Assign(blobs.begin(), blobs.end());
  }
  around_.oracle->Acknowledged(acknowledged, Name(r));
  rank.last = decision;
  auto commit = std::make_shared<v1::CommitRequest>();
  commit->set_job(kJob);
  *commit->mutable_decision() = decision;
  // Servers have the blobs from the seal; a commit need not carry them.
  commit->mutable_decision()->clear_blobs();
  rank.commit = std::move(commit);
  const bool eager = around_.random->Percent(70);
  for (Sent& sent : rank.commits) sent = eager ? Sent::kNo : Sent::kDone;
  if (decision.step() == intent_.restore_at) ++around_.tally->restores;
  StartStep(&rank, rank.step + 1);
  if (r == 0 && around_.random->Percent(40)) {
    pin_ = decision.step();
    pin_patience_ = 60;
    std::fill(pinned_on_, pinned_on_ + kServers, false);
  }
}

void SimGroup::OnSeal(uint32_t r, int server, const v1::SealResponse& response) {
  Rank& rank = ranks_[r];
  if (response.has_decided()) return Decide(r, response.decided());
  if (response.has_pending()) {
    // Polled again; what a restarted server lost is pushed again.
    rank.seals[server] = Sent::kNo;
    const bool freed =
        around_.bug == ClientBug::kFreesGradientsEarly &&
        std::any_of(rank.prepared, rank.prepared + kServers, [](const auto& p) { return p.has_value(); });
    for (const v1::RankRange& range : response.pending().missing()) {
      if (range.rank() != r || freed) continue;
      for (Push& push : rank.pushes) {
        const model::Slice& slice = plan_.slices()[push.slice];
        const bool named = slice.unit == range.unit() && slice.range == model::Range{range.begin(), range.end()};
        if (named && push.sent == Sent::kDone) push.sent = Sent::kNo;
      }
    }
    return;
  }
  rank.seals[server] = Sent::kDone;
  rank.prepared[server] = response.prepared();
  std::vector<v1::PreparedRecord> records;
  for (const auto& prepared : rank.prepared) {
    if (prepared.has_value()) records.push_back(*prepared);
  }
  if (records.size() < kServers - (around_.bug == ClientBug::kDecidesWithoutAll ? 1 : 0)) return;
  const auto decision = model::Decide(records);
  if (decision.ok()) return Decide(r, *decision);
  around_.oracle->Broken(absl::StrCat(Name(r), " cannot decide: ", decision.status().ToString()));
}

void SimGroup::OnNorm(const Request& request, const v1::NormResponse& response) {
  ++around_.tally->norms;
  const auto& asked = *std::get<std::shared_ptr<const v1::NormRequest>>(request.body);
  for (const v1::ChunkNorm& norm : response.norms()) {
    const v1::ChunkNorm expected =
        NormOf(plan_, norm.chunk(), asked.gradient_presence(), [&](const model::Slice& slice) {
          return intent_.Digest(request.step, request.attempt, v1::SLICE_KIND_GRADIENT, slice, ranks_[slice.rank].life);
        });
    if (norm.SerializeAsString() != expected.SerializeAsString()) {
      around_.oracle->Broken(absl::StrCat(Name(request.rank),
                                          " got a norm of other slices than were pushed in attempt ", request.attempt,
                                          " of step ", request.step));
    }
  }
}

SimGroup::Sent* SimGroup::SentOf(Rank* rank, const Request& request) {
  switch (request.body.index()) {
    case 0:
      return &fences_[request.server];
    case 1:
      return &rank->opens[request.server];
    case 2:
      return &rank->pushes[request.item].sent;
    case 4:
      return &rank->seals[request.server];
    case 5:
      return &rank->commits[request.server];
    default:
      return nullptr;
  }
}

void SimGroup::OnError(uint32_t r, const Response& response) {
  Rank& rank = ranks_[r];
  const std::string reason = model::ReasonOf(response.status);
  const int server = response.request.server;
  Sent* const sent = SentOf(&rank, response.request);
  if (reason == model::kPlanMismatch && intent_.Mismatched(rank.step)) {
    rank.dead = true;
    ++around_.tally->mismatches;
    return;
  }
  if (reason == model::kIncomplete) return;
  // The server never opened the job and has forgotten it; perhaps an older group has fenced again since.
  const bool unpromised =
      reason == model::kBadRequest && absl::StrContains(response.status.message(), "never promised");
  if (reason == model::kUnknownJob || unpromised) {
    rank.dead = true;
    ++around_.tally->stale;
    return;
  }
  if (reason == model::kStateLost && PinInterval() > 0 && around_.bug != ClientBug::kRestoreForgotten) {
    rank.dead = true;
    ++around_.tally->stale;
    return;
  }
  if (reason == model::kVersionGone && rank.step == intent_.restore_at) {
    rank.dead = true;
    ++around_.tally->gone;
    return;
  }
  if (reason == model::kNotOpen && open_ != nullptr) {
    rank.opens[server] = Sent::kNo;
    if (sent != nullptr) *sent = Sent::kNo;
    return;
  }
  if (reason == model::kBehind) {
    if (around_.bug != ClientBug::kForgetsCommit) rank.commits[server] = Sent::kNo;
    if (sent != nullptr) *sent = Sent::kNo;
    return;
  }
  if (reason == model::kBusy || reason == model::kChecksum) {
    *sent = Sent::kNo;
    return;
  }
  // Another rank has decided the step and its commit was faster.
  if (reason == model::kOldStep) {
    if (response.request.body.index() == 2) *sent = Sent::kDone;
    return;
  }
  // The norm was asked for an attempt that is not the newest any more.
  if (sent == nullptr) return;
  if (around_.bug == ClientBug::kRestartsInEpoch) {
    *sent = Sent::kDone;
    return;
  }
  if (around_.leave_on_error && response.status.code() != absl::StatusCode::kDataLoss) {
    rank.dead = true;
    return;
  }
  around_.oracle->Broken(absl::StrCat(Name(r), " got an error that no fault explains, from server ", server, ": ",
                                      response.status.ToString()));
}

void SimGroup::Receive(const Response& response) {
  const Request& request = response.request;
  Rank& rank = ranks_[request.rank];
  if (rank.dead || request.life != rank.life) return;
  const size_t kind = request.body.index();
  if (kind == 6) return OnPin(response);
  if (kind == 7) return;
  const bool of_try = rank.step == request.step && rank.attempt == request.attempt;
  // An answer to something older says nothing about now, but that a newer group is there.
  if (model::ReasonOf(response.status) == model::kStaleEpoch) {
    rank.dead = true;
    ++around_.tally->stale;
    return;
  }
  if ((kind == 2 || kind == 3 || kind == 4) && !of_try) return;
  if (kind == 5 && rank.step != request.step) return;
  if (!response.status.ok()) return OnError(request.rank, response);
  switch (kind) {
    case 0:
      return OnFence(request.server, *std::get<0>(response.body));
    case 3:
      return OnNorm(request, *std::get<3>(response.body));
    case 4:
      return OnSeal(request.rank, request.server, *std::get<4>(response.body));
    default:
      *SentOf(&rank, request) = Sent::kDone;
  }
}

}  // namespace ballast::sim
