#include "ballast/services/step/step_state.h"

#include <algorithm>

#include "absl/strings/escaping.h"

namespace ballast::services {

const std::string& StepMachine::Impl::PromisedGroup() const {
  const bool open = plan != nullptr && model::Compare(plan->open().epoch(), promised) == 0;
  return promised_group.empty() && open ? plan->open().group() : promised_group;
}

absl::Status StepMachine::Impl::Stale(absl::string_view message) const {
  absl::Status status = Precondition(model::kStaleEpoch, message);
  model::SetDetail(model::kPromised, Show(promised), &status);
  // The group's name is not text.
  model::SetDetail(model::kGroup, absl::BytesToHexString(PromisedGroup()), &status);
  return status;
}

absl::Status StepMachine::Impl::CheckPromised(const v1::Epoch& epoch) const {
  const auto order = model::Compare(epoch, promised);
  // The known epoch belongs to the lost state: nobody may go on in this epoch.
  if (order == 0 && state == State::kLost && plan != nullptr && model::Compare(plan->open().epoch(), epoch) == 0) {
    return StateLost();
  }
  if (order < 0) {
    return Stale(absl::StrCat("epoch ", Show(epoch),
                              " is over: another session (of a restarted trainer, or of a second optimizer) "
                              "opened the job since, with epoch ",
                              Show(promised), "; end this one, and open the job again with resume=auto"));
  }
  return order > 0 ? NotOpen(epoch) : absl::OkStatus();
}

absl::Status StepMachine::Impl::CheckEpoch(const v1::Epoch& epoch) const {
  BALLAST_RETURN_IF_ERROR(CheckPromised(epoch));
  const bool open = plan != nullptr && model::Compare(plan->open().epoch(), promised) == 0;
  return open ? absl::OkStatus() : NotOpen(epoch);
}

absl::Status StepMachine::Impl::NotOpen(const v1::Epoch& epoch) const {
  return Precondition(model::kNotOpen, absl::StrCat("epoch ", Show(epoch), " is not open on server '", id,
                                                    "', which promised epoch ", Show(promised), "; send Open again"));
}

// Groups begin at their first Open's base, so who seals a step up to the base had another epoch before.
bool StepMachine::Impl::WasDecidedBefore(const v1::SealRequest& request) const {
  return plan != nullptr && plan->open().has_table() && CheckEpoch(request.epoch()).ok() &&
         request.step() <= plan->open().base() && request.step() == decision->step() &&
         request.attempt() == decision->attempt() && request.plan_hash() == decision->plan_hash();
}

absl::Status StepMachine::Impl::CheckStep(int64_t step) const {
  if (step <= committed) {
    return Precondition(model::kOldStep, absl::StrCat("step ", step, " is decided already; server '", id,
                                                      "' is at step ", committed, ", the next is ", committed + 1));
  }
  if (step > committed + 1) {
    return Precondition(model::kBehind,
                        absl::StrCat("server '", id, "' is at step ", committed, " and cannot take step ", step,
                                     " yet; send it the commit of step ", committed + 1));
  }
  return absl::OkStatus();
}

absl::Status StepMachine::Impl::CheckRank(uint32_t rank) const {
  if (rank < plan->world_size()) return absl::OkStatus();
  return BadRequest(absl::StrCat("rank ", rank, " is outside this epoch's world size ", plan->world_size()));
}

absl::Status StepMachine::Impl::CheckAttempt(uint32_t rank, uint64_t attempt) const {
  if (attempt < slices.attempt(rank)) {
    return model::Error(absl::StatusCode::kAborted, model::kStaleAttempt,
                        absl::StrCat("attempt ", attempt, " of step ", committed + 1, " was dropped: rank ", rank,
                                     " is at attempt ", slices.attempt(rank)));
  }
  const std::optional<uint64_t> sealed = seals.sealed_attempt(rank);
  if (sealed.has_value() && *sealed != attempt) {
    return Precondition(model::kAlreadySealed,
                        absl::StrCat("rank ", rank, " sealed attempt ", *sealed, " of step ", committed + 1,
                                     " and may not start attempt ", attempt, ": after its seal a rank cannot drop"));
  }
  return absl::OkStatus();
}

void StepMachine::Impl::RaiseAttempt(uint32_t rank, uint64_t attempt) {
  if (attempt > slices.attempt(rank)) slices.RaiseAttempt(rank, attempt);
}

void StepMachine::Impl::TryPrepare() {
  if (prepared.has_value() || !seals.complete()) return;
  const v1::SealRequest& sealed = seals.sealed();
  const v1::StepHeader& header = sealed.header();
  if (!slices.Covered(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), sealed.attempt())) return;
  if (!slices.Covered(v1::SLICE_KIND_VALUE, header.value_presence(), sealed.attempt())) return;
  // The restore's pin may have gone since the seal.
  if (!CheckRestore(header, sealed.blobs()).ok()) return;
  // Waits for the due pin: so when a later step is decided all servers have the pin, and older pins may go.
  if (due_pin.has_value() && !pins.contains(*due_pin)) return;

  v1::PreparedRecord& record = prepared.emplace();
  record.set_step(committed + 1);
  record.set_server_id(id);
  *record.mutable_epoch() = plan->open().epoch();
  record.set_attempt(sealed.attempt());
  record.set_plan_hash(sealed.plan_hash());
  *record.mutable_header() = header;
  *record.mutable_blobs() = sealed.blobs();
  const std::vector<uint64_t> lacking = Lacking(header, sealed.attempt());
  for (const uint64_t chunk : slices.Chunks(header.gradient_presence())) {
    if (std::binary_search(lacking.begin(), lacking.end(), chunk)) continue;
    *record.add_norms() = host->Norm(chunk, header.gradient_presence());
  }
  PassOver(lacking, record.step());
  if (const auto pin = pins.find(header.restored_version());
      header.kind() == v1::STEP_KIND_RESTORE && pin != pins.end()) {
    *record.mutable_restored_tensor_steps() = pin->second.tensor_steps();
  }
  prepared_lsn = journal->Append(PreparedStepRecord{record});
  // The log is durable as a prefix, so this covers the slices and the decision before it too.
  journal->Sync(prepared_lsn);
}

void StepMachine::Impl::Decide(const v1::Decision& request, bool log) {
  const v1::PreparedRecord record = *std::exchange(prepared, std::nullopt);
  decision = request;
  for (model::SealAnswer& answer : answers) answer.reset();
  // The sealed blobs count, not the blobs of the commit.
  *decision->mutable_blobs() = record.blobs();
  decision_lsn = log ? journal->Append(DecisionRecord{*decision}) : 0;
  committed = decision->step();
  const bool skip = decision->verdict().skip();
  if (skip) ++skipped;
  CountSteps(record, skip);
  // Before Apply, which takes a while: a crash meanwhile must not go back to a version that the restore gives up.
  if (record.header().kind() == v1::STEP_KIND_RESTORE && pin_interval() > 0) {
    MakeAutomatic(record.header().restored_version(), committed);
  }
  host->Apply(record, *decision);
  // After Apply: until a restore is applied, no pin goes that could be restored instead.
  if (pin_interval() > 0) ReleasePins(record.header());
  slices.NextStep();
  seals.NextStep();
}

void StepMachine::Impl::CountSteps(const v1::PreparedRecord& record, bool skip) {
  model::CountSteps(record, skip, &tensor_steps);
}

// All servers prepared this step, so all have the pin that was due before this step. After a restore only the restored
// version's pin stays: newer pins belong to the history given up, and nobody will need older pins.
void StepMachine::Impl::ReleasePins(const v1::StepHeader& header) {
  if (header.kind() == v1::STEP_KIND_RESTORE) {
    state = State::kKnown;
    due_pin.reset();  // the due pin belongs to the history given up; all servers have the restored version
    restored_as = committed;
    KeepOneAutomatic(header.restored_version(), committed);
  } else {
    const auto newest =
        std::find_if(pins.rbegin(), pins.rend(), [](const auto& pin) { return pin.second.automatic(); });
    if (newest != pins.rend()) KeepOneAutomatic(newest->first, newest->second.automatic_since());
  }
  if (committed % static_cast<int64_t>(pin_interval()) != 0) return;
  due_pin = committed;
  host->PinDue(committed);
}

void StepMachine::Impl::ReplacePin() {
  const bool others = std::any_of(pins.begin(), pins.end(), [](const auto& pin) { return pin.second.automatic(); });
  if (others || due_pin == committed) return;
  due_pin = committed;
  if (pins.contains(committed)) return MakeAutomatic(committed, committed);  // somebody asked for it
  host->PinDue(committed);
}

void StepMachine::Impl::MakeAutomatic(int64_t version, int64_t since) {
  const auto it = pins.find(version);
  if (it == pins.end() || (it->second.automatic() && it->second.automatic_since() == since)) return;
  it->second.set_automatic(true);
  it->second.set_automatic_since(since);
  const v1::PinnedVersion changed = it->second;
  host->PinChanged(changed);
}

void StepMachine::Impl::KeepOneAutomatic(int64_t kept, int64_t since) {
  MakeAutomatic(kept, since);  // first: after a crash halfway there must still be an automatic pin
  for (auto next = pins.begin(); next != pins.end();) {
    const auto it = next++;
    v1::PinnedVersion& pin = it->second;
    if (it->first == kept || !pin.automatic()) continue;
    pin.set_automatic(false);
    const v1::PinnedVersion changed = pin;
    if (!pin.requested()) pins.erase(it);
    host->PinChanged(changed);
  }
}

absl::Status StepMachine::Impl::StateLost() const {
  const std::string held =
      pins.empty() ? "and has no pin of it" : absl::StrCat("and has it up to version ", pins.rbegin()->first);
  return Precondition(model::kStateLost,
                      absl::StrCat("server '", id, "' was restarted or follows one that was, ", held,
                                   "; exit and restart the group with resume=auto, which restores the newest version "
                                   "that all servers have"));
}

absl::Status StepMachine::Impl::CheckStartsAnew(const v1::OpenRequest& request) const {
  if (request.spec().durability() != v1::DURABILITY_EVERY_K || request.has_base_decision()) {
    return BadRequest("only a job with durability every-K begins with a restore, and without the base's decision");
  }
  // The base is the least, over all servers, of the last step that a server can have prepared, so at most this
  // server's.
  const int64_t base_max = committed + (prepared.has_value() ? 1 : 0);
  if (request.restores() < 0 || request.base() < request.restores() || request.base() > base_max) {
    return BadRequest(absl::StrCat("Open from base ", request.base(), " that restores version ", request.restores(),
                                   ": expected a base from that version to ", base_max,
                                   ", which is the last step that server '", id, "' can have prepared"));
  }
  if (state != State::kLost && request.base() < committed) {
    return Diverged(absl::StrCat("server '", id, "' is at step ", committed, " and cannot restore version ",
                                 request.restores(), " as step ", request.base() + 1));
  }
  if (pins.contains(request.restores())) return absl::OkStatus();
  return Precondition(model::kVersionGone, absl::StrCat("server '", id, "' has no durable pin of version ",
                                                        request.restores(), "; GetJob tells which it has"));
}

absl::Status StepMachine::Impl::CheckBase(const v1::OpenRequest& request) const {
  if (state != State::kKnown) return StateLost();
  const v1::Decision& theirs = request.base_decision();
  if (request.has_base_decision() != (request.base() >= 0) ||
      (request.has_base_decision() && theirs.step() != request.base())) {
    return BadRequest(
        absl::StrCat("Open from base ", request.base(), " needs the decision of that step, got ",
                     request.has_base_decision() ? absl::StrCat("that of step ", theirs.step()) : "none"));
  }
  if (request.base() == committed) {
    if (committed < 0 || SameKey(*decision, theirs)) return absl::OkStatus();
    return Diverged(absl::StrCat("server '", id, "' decided ", ShowKey(*decision), ", the group starts from ",
                                 ShowKey(theirs), "; two histories cannot be joined"));
  }
  if (request.base() == committed + 1 && prepared.has_value() && SameKey(*prepared, theirs)) {
    return absl::OkStatus();
  }
  return Diverged(
      absl::StrCat("server '", id, "' is at step ", committed, " with ",
                   prepared.has_value() ? ShowKey(*prepared) : "nothing", " prepared and cannot start from ",
                   request.base() >= 0 ? ShowKey(theirs) : "an empty job", "; was its data directory replaced?"));
}

absl::Status StepMachine::Impl::CheckRestore(const v1::StepHeader& header,
                                             const google::protobuf::RepeatedPtrField<std::string>& blobs) const {
  const int64_t version = header.restored_version();
  const bool restore = header.kind() == v1::STEP_KIND_RESTORE;
  if (state == State::kToRestore && (!restore || version != plan->open().restores())) {
    return Precondition(model::kStateLost, absl::StrCat("the state of server '", id,
                                                        "' is lost: the first transaction of this epoch "
                                                        "must restore version ",
                                                        plan->open().restores()));
  }
  if (!restore) return absl::OkStatus();
  if (!unfilled.empty()) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("server '", id, "' still copies ", unfilled.size(),
                                     " chunk(s), the first is chunk ", unfilled.begin()->first,
                                     ", and cannot restore version ", version, " before it has them; send this again"));
  }
  if (committed != plan->open().base()) {
    return BadRequest(absl::StrCat("a restore is the first transaction of an epoch: this one began at version ",
                                   plan->open().base(), " and is at ", committed, "; fence a new one"));
  }
  const auto pin = pins.find(version);
  if (pin == pins.end()) {
    return Precondition(model::kVersionGone, absl::StrCat("server '", id, "' has no durable pin of version ", version,
                                                          "; GetJob tells which it has"));
  }
  const auto& sealed = pin->second.decision().blobs();
  // Rank 0's seal alone has blobs.
  if (!blobs.empty() && !std::equal(blobs.begin(), blobs.end(), sealed.begin(), sealed.end())) {
    return BadRequest(absl::StrCat("a restore of version ", version, " must seal that version's ", sealed.size(),
                                   " blob(s); the pin has them"));
  }
  const int registrations = plan->open().spec().registrations_size();
  if (static_cast<int>(pin->second.registration_count()) == registrations) return absl::OkStatus();
  return Precondition(model::kBadSpec,
                      absl::StrCat("version ", version, " was pinned with ", pin->second.registration_count(),
                                   " registration(s) of tensors, the job has ", registrations,
                                   " now: tensors that were registered since have no state at that version"));
}

model::SealAnswer StepMachine::Impl::Prepared(bool with_blobs) {
  model::SealAnswer& answer = answers[with_blobs];
  if (answer == nullptr || !SameKey((*answer)->prepared(), *prepared)) {
    v1::SealResponse response;
    *response.mutable_prepared() = *prepared;
    if (!with_blobs) response.mutable_prepared()->clear_blobs();
    if (with_blobs) host->AddDigests(prepared->step(), &response);
    response.set_unfilled_chunks(unfilled.size());
    answer = std::make_shared<model::SealAnswer::element_type>(std::move(response));
  }
  return answer;
}

model::SealAnswer StepMachine::Impl::Decided(bool with_blobs) {
  model::SealAnswer& answer = answers[with_blobs];
  if (answer == nullptr || !SameKey((*answer)->decided(), *decision)) {
    v1::SealResponse response;
    *response.mutable_decided() = *decision;
    if (!with_blobs) response.mutable_decided()->clear_blobs();
    response.set_unfilled_chunks(unfilled.size());
    answer = std::make_shared<model::SealAnswer::element_type>(std::move(response));
  }
  return answer;
}

// Unsealed ranks named in an answer: a person reads no more, and there may be 4096 in the answers to as many ranks.
constexpr size_t kUnsealedNamedMax = 16;

v1::SealResponse StepMachine::Impl::Pending(uint32_t asker) {
  v1::SealResponse response;
  v1::SealResponse::Pending* pending = response.mutable_pending();
  if (plan == nullptr) return response;
  pending->set_unsealed_count(seals.unsealed_count());
  for (const uint32_t rank : seals.UnsealedRanks(kUnsealedNamedMax)) pending->add_unsealed_ranks(rank);
  if (seals.any()) {
    const v1::SealRequest& sealed = seals.sealed();
    slices.AddMissing(v1::SLICE_KIND_GRADIENT, sealed.header().gradient_presence(), sealed.attempt(), asker, pending);
    slices.AddMissing(v1::SLICE_KIND_VALUE, sealed.header().value_presence(), sealed.attempt(), asker, pending);
  }
  return response;
}

}  // namespace ballast::services
