#include "ballast/tests/sim/sim_server.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::sim {
namespace {

// Ranks retransmit, so a server may forget who waits; this bounds its memory.
constexpr size_t kWaitingMax = 32;
constexpr uint64_t kUnknownState = 0xdeadbeef;

template <typename T>
void Answer(const Request& request, absl::StatusOr<T> result, std::vector<Response>* answers) {
  Response response{request, result.status(), {}};
  if (result.ok()) response.body = std::make_shared<const T>(*std::move(result));
  answers->push_back(std::move(response));
}

template <typename T>
bool AnswerIfReady(const Request& request, services::Outcome<T> outcome, std::vector<Response>* answers) {
  if (outcome.ok() && !outcome->has_value()) return false;
  Answer<T>(request, outcome.ok() ? absl::StatusOr<T>(**std::move(outcome)) : outcome.status(), answers);
  return true;
}

}  // namespace

SimServer::SimServer(int index, ClientBug bug, Random* random, Oracle* oracle)
    : index_(index), bug_(bug), random_(random), oracle_(oracle) {
  Restart();
}

uint64_t SimServer::Append(const services::StepRecord& record) {
  log_.push_back(record);
  return log_.size();
}

v1::ChunkNorm SimServer::Norm(uint64_t chunk, absl::string_view gradient_presence) {
  return NormOf(*plan_, chunk, gradient_presence,
                [this](const model::Slice& slice) { return Find(v1::SLICE_KIND_GRADIENT, slice).value_or(0); });
}

void SimServer::Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  if (decision.step() != applied_ + 1) {
    return oracle_->Broken(absl::StrCat("server ", index_, " applied step ", decision.step(), " after ", applied_));
  }
  applied_ = decision.step();
  // After a restart: the flushed chunks already contain this step, so do not apply it again.
  if (applied_ <= flushed_) return places_.clear();
  if (prepared.header().kind() == v1::STEP_KIND_RESTORE) {
    ApplyRestore(prepared);
  } else if (!decision.verdict().skip() && Changes(*plan_, index_, prepared.header())) {
    state_ = Evolve(state_, applied_);
  }
  states_[applied_] = state_;
  std::vector<Consumed> consumed;
  for (const model::Slice& slice : plan_->slices()) {
    if (plan_->holders_of(slice.chunk)[0] != static_cast<uint32_t>(index_)) continue;
    if (plan_->Touches(slice, prepared.header().gradient_presence())) {
      consumed.push_back({v1::SLICE_KIND_GRADIENT, slice, Find(v1::SLICE_KIND_GRADIENT, slice)});
    }
    if (plan_->Touches(slice, prepared.header().value_presence())) {
      consumed.push_back({v1::SLICE_KIND_VALUE, slice, Find(v1::SLICE_KIND_VALUE, slice)});
    }
  }
  oracle_->Applied(index_, decision, consumed);
  oracle_->CheckState(index_, applied_, state_);
  // A place that is not filled again holds nothing of the next step.
  places_.clear();
}

void SimServer::PinDue(int64_t version) {
  pinning_.push_back({.version = machine_->DescribeVersion(), .state = state_});
  pinning_.back().version.set_automatic(true);
  pinning_.back().version.set_automatic_since(version);
}

void SimServer::ApplyRestore(const v1::PreparedRecord& prepared) {
  const int64_t version = prepared.header().restored_version();
  const auto pin = pins_.find(version);
  if (pin == pins_.end()) {
    return oracle_->Broken(absl::StrCat("server ", index_, " is to restore version ", version, ", which it has not"));
  }
  state_ = pin->second.state;
  if (PinInterval() > 0) return;
  // The chunks are flushed with it; a crash may come before, those of the step before may be flushed already.
  if (random_->Percent(50)) {
    restore_ = applied_;
    if (random_->Percent(50)) Flush(applied_ - 1);
    return;
  }
  states_[applied_] = state_;
  Flush(applied_);
}

void SimServer::Flush(int64_t step) {
  const auto state = states_.find(step);
  if (step <= flushed_ || state == states_.end() || PinInterval() > 0) return;
  flushed_ = step;
  flushed_state_ = state->second;
}

services::Outcome<v1::PinResponse> SimServer::Pin(const v1::PinRequest& request) {
  BALLAST_RETURN_IF_ERROR(machine_->CheckEpoch(request.epoch()));
  if (machine_->FindPin(request.version()) != nullptr) {
    const auto pin = pins_.find(request.version());
    if (pin == pins_.end()) return std::nullopt;
    pin->second.version.set_requested(true);
    v1::PinnedVersion told = *machine_->FindPin(request.version());
    told.set_requested(true);
    machine_->Pinned(std::move(told));
    return v1::PinResponse();
  }
  if (!pinning_.empty()) return std::nullopt;
  BALLAST_RETURN_IF_ERROR(machine_->StateStatus());
  const int64_t committed = machine_->committed();
  if (request.version() != committed) {
    const char* const reason = request.version() > committed ? model::kBehind : model::kVersionGone;
    return model::Error(absl::StatusCode::kFailedPrecondition, reason, "not the last decided step");
  }
  pinning_.push_back({.version = machine_->DescribeVersion(), .state = state_});
  pinning_.back().version.set_requested(true);
  if (bug_ == ClientBug::kPinBeforeDurable) machine_->Pinned(pinning_.back().version);
  return std::nullopt;
}

absl::StatusOr<v1::UnpinResponse> SimServer::Unpin(const v1::UnpinRequest& request) {
  BALLAST_RETURN_IF_ERROR(machine_->CheckPromised(request.epoch()));
  if (!pins_.contains(request.version())) return v1::UnpinResponse();
  BALLAST_RETURN_IF_ERROR(machine_->Unpin(request.version()));
  // Flush the decided steps to the chunks before the version goes.
  if (bug_ != ClientBug::kUnpinBeforeFlush) Flush(applied_);
  pins_.at(request.version()).version.set_requested(false);
  if (machine_->FindPin(request.version()) == nullptr) pins_.erase(request.version());
  return v1::UnpinResponse();
}

void SimServer::PutPin(const DurablePin& pin) {
  const int64_t version = pin.version.version();
  if (!pin.changes) {
    pins_[version] = pin;
  } else if (!pin.version.automatic() && !pin.version.requested()) {
    pins_.erase(version);
  } else if (const auto kept = pins_.find(version); kept != pins_.end()) {
    kept->second.version.set_automatic(pin.version.automatic());
    kept->second.version.set_automatic_since(pin.version.automatic_since());
  }
}

void SimServer::FinishPin(std::vector<Response>* answers) {
  const DurablePin pin = pinning_.front();
  pinning_.pop_front();
  PutPin(pin);
  if (!pin.changes) machine_->Pinned(pin.version);
  Retry(answers);
}

void SimServer::Retry(std::vector<Response>* answers) {
  for (Request& request : std::exchange(waiting_, {})) {
    if (!Evaluate(request, answers)) waiting_.push_back(std::move(request));
  }
}

void SimServer::Clear(const v1::PushRequest& header) {
  std::erase_if(places_, [&](const Place& place) {
    return place.kind == header.kind() && place.unit == header.unit() &&
           model::Intersect(place.range, {header.begin(), header.end()}).size() > 0;
  });
}

void SimServer::Fill(const v1::PushRequest& header) {
  Clear(header);
  places_.push_back({header.kind(), header.unit(), {header.begin(), header.end()}, header.crc32c()});
}

std::optional<uint32_t> SimServer::Find(v1::SliceKind kind, const model::Slice& slice) const {
  for (const Place& place : places_) {
    if (place.kind == kind && place.unit == slice.unit && place.range == slice.range) return place.digest;
  }
  return std::nullopt;
}

void SimServer::Push(const Request& request, std::vector<Response>* answers) {
  const v1::PushRequest& header = *std::get<std::shared_ptr<const v1::PushRequest>>(request.body);
  const auto admission = machine_->Admit(header, [](uint32_t) { return true; });
  if (!admission.ok()) return Answer<v1::PushResponse>(request, admission.status(), answers);
  if (*admission == services::StepMachine::Admission::kHeld) {
    return Answer<v1::PushResponse>(request, v1::PushResponse(), answers);
  }
  Clear(header);
  // Most bytes come before anything else happens.
  if (random_->Percent(60)) return EndPush(request, answers);
  receiving_.push_back(request);
}

void SimServer::EndPush(const Request& request, std::vector<Response>* answers) {
  const v1::PushRequest& header = *std::get<std::shared_ptr<const v1::PushRequest>>(request.body);
  absl::Status received;
  if (random_->Percent(2)) received = model::Error(absl::StatusCode::kDataLoss, model::kChecksum, "bytes were damaged");
  // The bytes lie in their place before anybody asks whether they are still wanted.
  if (received.ok()) Fill(header);
  const absl::Status status = machine_->EndPush(header, received);
  Answer<v1::PushResponse>(request, status.ok() ? absl::StatusOr<v1::PushResponse>(v1::PushResponse()) : status,
                           answers);
}

bool SimServer::Evaluate(const Request& request, std::vector<Response>* answers) {
  if (const auto* fence = std::get_if<std::shared_ptr<const v1::FenceRequest>>(&request.body)) {
    return AnswerIfReady(request, machine_->Fence(**fence), answers);
  }
  if (const auto* open = std::get_if<std::shared_ptr<const v1::OpenRequest>>(&request.body)) {
    return AnswerIfReady(request, machine_->Open(**open), answers);
  }
  if (const auto* seal = std::get_if<std::shared_ptr<const v1::SealRequest>>(&request.body)) {
    const auto sealed = machine_->Seal(**seal);
    services::Outcome<v1::SealResponse> answer = std::nullopt;
    if (!sealed.ok()) {
      answer = sealed.status();
    } else if (*sealed != nullptr) {
      answer = ***sealed;
    } else if (!machine_->prepared()) {
      answer = machine_->Pending((*seal)->rank());
    }
    return AnswerIfReady(request, std::move(answer), answers);
  }
  if (const auto* pin = std::get_if<std::shared_ptr<const v1::PinRequest>>(&request.body)) {
    return AnswerIfReady(request, Pin(**pin), answers);
  }
  if (const auto* unpin = std::get_if<std::shared_ptr<const v1::UnpinRequest>>(&request.body)) {
    Answer(request, Unpin(**unpin), answers);
    return true;
  }
  if (const auto* norm = std::get_if<std::shared_ptr<const v1::NormRequest>>(&request.body)) {
    Answer(request, machine_->Norm(**norm), answers);
  } else if (const auto* commit = std::get_if<std::shared_ptr<const v1::CommitRequest>>(&request.body)) {
    Answer(request, machine_->Commit(**commit), answers);
  } else {
    Push(request, answers);
  }
  return true;
}

void SimServer::CheckStepCounts() {
  if (machine_->state_lost()) return;
  const v1::GetJobResponse job = machine_->Describe();
  oracle_->CheckTensorSteps(index_, job.committed(), {job.tensor_steps().data(), size_t(job.tensor_steps_size())});
}

void SimServer::Handle(const Request& request, std::vector<Response>* answers) {
  const int64_t before = committed();
  if (!Evaluate(request, answers) && waiting_.size() < kWaitingMax) waiting_.push_back(request);
  if (committed() != before) CheckStepCounts();
  MaybeSnapshot();
}

void SimServer::MaybeSnapshot() {
  if (PinInterval() > 0) return;
  if (!random_->Percent(restore_ > flushed_ ? 20 : 2)) return;
  log_.push_back(services::SnapshotRecord{machine_->Snapshot()});
  // Chunks are flushed in the background, some steps behind.
  if (random_->Percent(50)) Flush(applied_ - static_cast<int64_t>(random_->Below(3)));
}

// The step whose replay needs the record, -1 if none does.
int64_t SimServer::NeededFor(const services::StepRecord& record) const {
  if (const auto* slice = std::get_if<services::SliceRecord>(&record)) return slice->header.step();
  // A restore has no slices.
  const auto* prepared = std::get_if<services::PreparedStepRecord>(&record);
  const bool restore = prepared != nullptr && prepared->prepared.header().kind() == v1::STEP_KIND_RESTORE;
  return restore ? prepared->prepared.step() : -1;
}

void SimServer::CutAtSnapshot() {
  // Records are void from the step on at which a later epoch began.
  std::vector<int64_t> base(log_.size() + 1, std::numeric_limits<int64_t>::max());  // the lowest from here on
  for (size_t i = log_.size(); i-- > 0;) {
    const auto* open = std::get_if<services::OpenRecord>(&log_[i]);
    base[i] = open == nullptr ? base[i + 1] : std::min(base[i + 1], open->open->base());
  }
  size_t start = 0;
  for (size_t i = 0; i < log_.size(); ++i) {
    const int64_t step = NeededFor(log_[i]);
    if (step > flushed_ && step <= base[i + 1]) break;
    if (std::holds_alternative<services::SnapshotRecord>(log_[i]) && random_->Percent(70)) start = i;
  }
  log_.erase(log_.begin(), log_.begin() + static_cast<ptrdiff_t>(start));
}

void SimServer::FinishPush(std::vector<Response>* answers) {
  const size_t which = random_->Below(receiving_.size());
  const Request request = receiving_[which];
  receiving_.erase(receiving_.begin() + static_cast<ptrdiff_t>(which));
  EndPush(request, answers);
}

void SimServer::FinishSync(std::vector<Response>* answers) {
  synced_ += 1 + random_->Below(sync_wanted_ - synced_);
  if (random_->Percent(70)) synced_ = sync_wanted_;
  machine_->Synced(synced_);
  Retry(answers);
}

void SimServer::Crash() {
  const size_t kept = synced_ + random_->Below(log_.size() - synced_ + 1);
  std::vector<services::StepRecord> survivors;
  for (size_t i = 0; i < kept; ++i) {
    if (!CutBeforeDurable(log_[i], kept)) survivors.push_back(std::move(log_[i]));
  }
  for (size_t i = kept; i < log_.size(); ++i)
    decisions_lost_ += std::holds_alternative<services::DecisionRecord>(log_[i]);
  log_ = std::move(survivors);
  if (PinInterval() > 0) {
    KeepInCatalog(log_.size());
  } else {
    CutAtSnapshot();
  }
  // The oldest pending entry may have reached the disk, although the server never reported it.
  if (!pinning_.empty() && random_->Percent(30)) PutPin(pinning_.front());
  pinning_.clear();
  machine_.reset();
  receiving_.clear();
  waiting_.clear();
  places_.clear();
  plan_ = nullptr;
}

void SimServer::KeepInCatalog(size_t kept) {
  for (size_t i = 0; i < kept; ++i) {
    if (const auto* promise = std::get_if<services::PromiseRecord>(&log_[i])) promised_ = promise->epoch;
    if (const auto* open = std::get_if<services::OpenRecord>(&log_[i])) open_ = *open->open;
    had_state_ = had_state_ || std::holds_alternative<services::PreparedStepRecord>(log_[i]);
  }
  log_.clear();
}

void SimServer::Opened(std::shared_ptr<const model::EpochPlan> plan, const services::OpenChange&) {
  plan_ = std::move(plan);
  if (!plan_->open().has_restores()) return;
  applied_ = plan_->open().base();
  state_ = kUnknownState;
}

bool SimServer::CutBeforeDurable(const services::StepRecord& record, size_t kept) const {
  if (bug_ != ClientBug::kLogCutAtOwnCommit) return false;
  int64_t step = -1;
  if (const auto* slice = std::get_if<services::SliceRecord>(&record)) step = slice->header.step();
  if (const auto* prepared = std::get_if<services::PreparedStepRecord>(&record)) step = prepared->prepared.step();
  return std::any_of(log_.begin() + static_cast<ptrdiff_t>(kept), log_.end(), [step](const services::StepRecord& lost) {
    const auto* decision = std::get_if<services::DecisionRecord>(&lost);
    return decision != nullptr && decision->decision.step() == step;
  });
}

void SimServer::Restart() {
  applied_ = -1;
  services::StepJournal* const journal = this;
  services::StepHost* const host = this;
  machine_ = std::make_unique<services::StepMachine>(ServerName(index_), /*disk=*/0, journal, host);
  synced_ = sync_wanted_ = log_.size();
  machine_->Synced(synced_);
  restore_ = -1;
  state_ = flushed_state_;
  states_ = {{flushed_, flushed_state_}};
  for (const auto& [version, pin] : pins_) machine_->Pinned(pin.version);
  if (promised_.counter() > 0) (void)machine_->Replay(services::PromiseRecord{promised_});
  if (had_state_) {
    state_ = kUnknownState;
    ++states_lost_;
    if (const absl::Status lost = machine_->LoseState(*open_); !lost.ok()) oracle_->Broken(lost.ToString());
  }
  for (const services::StepRecord& record : log_) {
    if (const auto* slice = std::get_if<services::SliceRecord>(&record)) Fill(slice->header);
    if (const absl::Status status = machine_->Replay(record); !status.ok()) {
      return oracle_->Broken(absl::StrCat("server ", index_, " cannot recover: ", status.ToString()));
    }
    if (std::holds_alternative<services::SnapshotRecord>(record) && applied_ < machine_->committed()) {
      applied_ = machine_->committed();
      if (applied_ > flushed_) states_[applied_] = state_;
      if (applied_ > flushed_) oracle_->CheckState(index_, applied_, state_);
    }
  }
  CheckStepCounts();
}

}  // namespace ballast::sim
