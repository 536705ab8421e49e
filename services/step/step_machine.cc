#include "ballast/services/step/step_machine.h"

#include <algorithm>
#include <utility>

#include "ballast/proto/model/step_header.h"
#include "ballast/services/step/step_state.h"

namespace ballast::services {

StepMachine::StepMachine(std::string server_id, uint64_t disk, StepJournal* journal, StepHost* host)
    : impl_(std::make_unique<Impl>(std::move(server_id), disk, journal, host)) {}
StepMachine::~StepMachine() = default;

v1::GetJobResponse StepMachine::Describe() const {
  v1::GetJobResponse job = DescribeProgress();
  if (impl_->plan != nullptr) *job.mutable_open() = impl_->plan->open();
  return job;
}

v1::GetJobResponse StepMachine::DescribeProgress() const {
  const Impl& m = *impl_;
  v1::GetJobResponse job;
  job.set_server_id(m.id);
  job.set_exists(m.promised.counter() > 0);
  job.set_committed(m.committed);
  if (m.decision.has_value()) *job.mutable_decision() = *m.decision;
  // A prepared record that is not durable may be lost in a crash: nobody may decide by it.
  if (prepared_durably()) *job.mutable_prepared() = *m.prepared;
  *job.mutable_promised() = m.promised;
  job.mutable_tensor_steps()->Add(m.tensor_steps.begin(), m.tensor_steps.end());
  for (const auto& [version, pin] : m.pins) {
    job.add_durable_versions(version);
    *job.add_decided_by() = pin.decision().epoch();
    if (!pin.automatic()) continue;
    job.add_automatic_versions(version);
    job.add_automatic_since(pin.automatic_since());
  }
  job.set_state_lost(m.state != Impl::State::kKnown);
  job.set_disk(m.disk);
  if (m.plan != nullptr) *job.mutable_opened() = m.plan->open().epoch();
  if (m.plan != nullptr && m.plan->open().has_table()) job.set_filled_shards(m.FilledShards());
  job.set_promised_group(m.PromisedGroup());
  return job;
}

Outcome<v1::FenceResponse> StepMachine::Fence(const v1::FenceRequest& request) {
  Impl& m = *impl_;
  if (request.epoch().counter() == 0) return BadRequest("an epoch's counter starts at 1, got 0");
  if (request.epoch().counter() > m.promised.counter() &&
      request.epoch().counter() - m.promised.counter() > model::kEpochsSkippedMax) {
    return BadRequest(absl::StrCat("an epoch's counter is at most ", model::kEpochsSkippedMax, " above the promised ",
                                   m.promised.counter(), ", got ", request.epoch().counter(),
                                   "; one above what GetJob tells is enough"));
  }
  const auto order = model::Compare(request.epoch(), m.promised);
  if (order < 0) {
    return m.Stale(absl::StrCat("epoch ", Show(request.epoch()), " comes too late: server '", m.id, "' promised epoch ",
                                Show(m.promised), " to a newer group; restart with resume=auto and a higher counter"));
  }
  if (request.expect_empty() && m.committed >= 0) {
    return model::Error(absl::StatusCode::kAlreadyExists, model::kJobExists,
                        absl::StrCat("the job exists on server '", m.id, "', at step ", m.committed,
                                     "; resume=never starts only new jobs, resume=auto continues this one or starts a "
                                     "new one, resume=must only continues"));
  }
  if (order > 0) {
    m.promised = request.epoch();
    m.promised_group = request.group();
    m.promise_lsn = m.journal->Append(PromiseRecord{request.epoch()});
    m.journal->Sync(m.promise_lsn);
  } else if (m.promised_group.empty()) {
    m.promised_group = request.group();  // a restart forgot it
  }
  // A prepare in flight lies before the promise in the log, so it is durable when the promise is: Describe reports it.
  if (!m.Durable(m.promise_lsn)) return std::nullopt;
  v1::FenceResponse response;
  *response.mutable_job() = DescribeProgress();
  return response;
}

absl::StatusOr<v1::NormResponse> StepMachine::Norm(const v1::NormRequest& request) {
  Impl& m = *impl_;
  BALLAST_RETURN_IF_ERROR(m.CheckEpoch(request.epoch()));
  BALLAST_RETURN_IF_ERROR(m.CheckStep(request.step()));
  BALLAST_RETURN_IF_ERROR(model::CheckPresence(*m.plan, request.gradient_presence(), "gradient_presence"));
  if (!m.slices.Covered(v1::SLICE_KIND_GRADIENT, request.gradient_presence(), request.attempt())) {
    return Precondition(
        model::kIncomplete,
        absl::StrCat("server '", m.id, "' does not hold all gradient slices of attempt ", request.attempt(),
                     " of step ", request.step(), " yet; ask for the norm after every rank has pushed"));
  }
  v1::NormResponse response;
  for (const uint64_t chunk : m.slices.Chunks(request.gradient_presence())) {
    if (m.unfilled.contains(chunk)) continue;
    *response.add_norms() = m.host->Norm(chunk, request.gradient_presence());
  }
  return response;
}

absl::StatusOr<model::SealAnswer> StepMachine::Seal(const v1::SealRequest& request) {
  Impl& m = *impl_;
  // Where members change, the group's own next epoch may have come first (rule 30): on the server, which answers the
  // older epoch's seal, or on the rank, which asks in the new epoch for a step that was decided before it.
  const bool decided = m.decision.has_value() && (SameKey(*m.decision, request) || m.WasDecidedBefore(request));
  if (decided && m.plan != nullptr && m.plan->open().has_table()) return m.Decided(request.rank() == 0);
  BALLAST_RETURN_IF_ERROR(m.CheckEpoch(request.epoch()));
  if (decided) return m.Decided(request.rank() == 0);
  BALLAST_RETURN_IF_ERROR(m.CheckStep(request.step()));
  BALLAST_RETURN_IF_ERROR(m.CheckRank(request.rank()));
  // Seals are volatile: after a restart a prepared record speaks for all of them.
  if (!m.prepared.has_value() || !SameKey(*m.prepared, request)) {
    BALLAST_RETURN_IF_ERROR(m.seals.agreement());
    BALLAST_RETURN_IF_ERROR(m.CheckAttempt(request.rank(), request.attempt()));
    if (m.prepared.has_value()) {
      return Precondition(
          model::kPlanMismatch,
          absl::StrCat("rank ", request.rank(), " seals attempt ", request.attempt(), " of step ", request.step(),
                       " with another plan than server '", m.id, "' has prepared (attempt ", m.prepared->attempt(),
                       "); exit and restart the group with resume=auto"));
    }
    const bool filed = m.seals.Filed(request);
    const v1::SealRequest& full = filed ? m.seals.sealed() : request;
    BALLAST_RETURN_IF_ERROR(m.CheckRestore(full.header(), full.blobs()));
    if (!filed) BALLAST_RETURN_IF_ERROR(m.seals.Seal(request));
    m.RaiseAttempt(request.rank(), request.attempt());
    m.TryPrepare();
  }
  if (!prepared_durably()) return nullptr;
  return m.Prepared(request.rank() == 0);
}

bool StepMachine::Filed(const v1::SealRequest& request) const {
  const Impl& m = *impl_;
  return m.plan != nullptr && request.rank() < m.plan->world_size() && request.step() == m.committed + 1 &&
         m.CheckEpoch(request.epoch()).ok() && m.seals.Filed(request);
}

bool StepMachine::seals_agree() const { return impl_->seals.agreement().ok(); }
uint32_t StepMachine::unsealed_count() const { return impl_->seals.unsealed_count(); }
std::vector<uint32_t> StepMachine::UnsealedRanks(size_t max) const { return impl_->seals.UnsealedRanks(max); }
bool StepMachine::prepared() const { return impl_->prepared.has_value(); }
bool StepMachine::prepared_durably() const { return prepared() && impl_->Durable(impl_->prepared_lsn); }

v1::SealResponse StepMachine::Pending(uint32_t asker) const { return impl_->Pending(asker); }

absl::StatusOr<v1::CommitResponse> StepMachine::Commit(const v1::CommitRequest& request) {
  Impl& m = *impl_;
  const v1::Decision& theirs = request.decision();
  v1::CommitResponse response;
  if (m.state == Impl::State::kLost) return m.StateLost();
  if (theirs.step() <= m.committed) {
    if (m.decision.has_value() && theirs.step() == m.committed && !SameKey(*m.decision, theirs)) {
      return Diverged(absl::StrCat("server '", m.id, "' decided ", ShowKey(*m.decision), ", the commit speaks of ",
                                   ShowKey(theirs), "; a step has one decision"));
    }
    response.set_committed(m.committed);
    return response;
  }
  if (theirs.step() > m.committed + 1) return m.CheckStep(theirs.step());
  if (!m.prepared.has_value() || !SameKey(*m.prepared, theirs)) {
    BALLAST_RETURN_IF_ERROR(m.CheckEpoch(theirs.epoch()));
    return Diverged(absl::StrCat("commit of ", ShowKey(theirs), ", but server '", m.id, "' has ",
                                 m.prepared.has_value() ? ShowKey(*m.prepared) : "nothing",
                                 " prepared; a decision needs the prepared records of all servers"));
  }
  m.Decide(theirs, /*log=*/true);
  response.set_committed(m.committed);
  return response;
}

absl::Status StepMachine::CheckPromised(const v1::Epoch& epoch) const { return impl_->CheckPromised(epoch); }
absl::Status StepMachine::CheckEpoch(const v1::Epoch& epoch) const { return impl_->CheckEpoch(epoch); }

v1::PinnedVersion StepMachine::DescribeVersion() const {
  const Impl& m = *impl_;
  v1::PinnedVersion pin;
  pin.set_version(m.committed);
  *pin.mutable_since() = m.plan->open().epoch();
  *pin.mutable_decision() = *m.decision;
  pin.mutable_tensor_steps()->Add(m.tensor_steps.begin(), m.tensor_steps.end());
  // Tensors registered at this very version get their values in the next transaction.
  for (const v1::Registration& registration : m.plan->open().spec().registrations()) {
    if (registration.version() < m.committed) pin.set_registration_count(pin.registration_count() + 1);
  }
  return pin;
}

void StepMachine::Pinned(v1::PinnedVersion pin) {
  Impl& m = *impl_;
  pin.clear_chunks();
  const int64_t version = pin.version();
  if (pin.automatic() && pin.automatic_since() < m.restored_as) {
    // The pin began before a restore was decided, and the restore gave this version up.
    pin.set_automatic(false);
    const v1::PinnedVersion changed = pin;
    if (pin.requested()) m.pins.insert_or_assign(version, std::move(pin));
    m.host->PinChanged(changed);
    return;
  }
  m.pins.insert_or_assign(version, std::move(pin));
}

absl::Status StepMachine::Unpin(int64_t version, bool unreadable) {
  Impl& m = *impl_;
  const bool restoring = m.prepared.has_value() && m.prepared->header().kind() == v1::STEP_KIND_RESTORE &&
                         m.prepared->header().restored_version() == version;
  if (restoring) {
    return Precondition(model::kBusy,
                        absl::StrCat("server '", m.id, "' has prepared a restore of version ", version, " as step ",
                                     m.prepared->step(), "; unpin it once that is decided or the job is fenced"));
  }
  const auto pin = m.pins.find(version);
  if (pin == m.pins.end()) return absl::OkStatus();
  if (m.state != Impl::State::kKnown && !unreadable) return m.StateLost();
  const bool automatic = pin->second.automatic();
  if (automatic && unreadable && m.state == Impl::State::kKnown && version == m.committed) {
    return Precondition(model::kBusy, absl::StrCat("version ", version, " is what server '", m.id,
                                                   "' is at, and its own pin; give it up after the next step"));
  }
  pin->second.set_requested(false);
  if (automatic && !unreadable) return absl::OkStatus();
  m.pins.erase(pin);
  if (automatic && m.state == Impl::State::kKnown) m.ReplacePin();
  return absl::OkStatus();
}

const v1::PinnedVersion* StepMachine::FindPin(int64_t version) const {
  const auto pin = impl_->pins.find(version);
  return pin == impl_->pins.end() ? nullptr : &pin->second;
}

absl::Status StepMachine::LoseState(const v1::OpenRequest& open) {
  Impl& m = *impl_;
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan known, model::EpochPlan::Make(open));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, known.FindMember(m.id));
  // Without a newer pin the epoch can have prepared all versions up to the next due version, which is included.
  int64_t from = open.base();
  if (!m.pins.empty()) from = std::max(from, m.pins.rbegin()->first);
  const auto interval = static_cast<int64_t>(open.spec().pin_interval());
  m.committed = from < 0 ? 0 : (from / interval + 1) * interval;
  m.state = Impl::State::kLost;
  m.Adopt(std::make_shared<const model::EpochPlan>(std::move(known)), index, {});
  return absl::OkStatus();
}

bool StepMachine::state_lost() const { return impl_->state != Impl::State::kKnown; }
absl::Status StepMachine::StateStatus() const { return state_lost() ? impl_->StateLost() : absl::OkStatus(); }

void StepMachine::Synced(uint64_t lsn) {
  impl_->synced = std::max(impl_->synced, lsn);
  if (impl_->Durable(impl_->table_lsn)) impl_->TellDurable();
}

int64_t StepMachine::committed() const { return impl_->committed; }
const v1::Epoch& StepMachine::promised() const { return impl_->promised; }
const std::map<int64_t, v1::PinnedVersion>& StepMachine::pins() const { return impl_->pins; }
uint64_t StepMachine::skipped_steps() const { return impl_->skipped; }
absl::Span<const uint64_t> StepMachine::tensor_steps() const { return impl_->tensor_steps; }
const model::EpochPlan* StepMachine::plan() const { return impl_->plan.get(); }

}  // namespace ballast::services
