// Rules 11, 25 and 26: what a server makes of an Open.
#include <algorithm>
#include <map>
#include <utility>

#include "ballast/proto/model/protocol.h"
#include "ballast/services/step/open_checks.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/step/step_state.h"

namespace ballast::services {

bool StepMachine::Impl::Fits(const v1::OpenRequest& request) const {
  if (state != State::kKnown) return false;
  if (request.base() == committed) return committed < 0 || SameKey(*decision, request.base_decision());
  return request.base() == committed + 1 && prepared.has_value() && SameKey(*prepared, request.base_decision());
}

absl::Status StepMachine::Impl::CheckOwnDisk(const v1::OpenRequest& request) const {
  for (const v1::Member& server : request.table().members()) {
    if (server.server_id() != id || server.disk() == disk) continue;
    return Precondition(model::kOtherServer,
                        absl::StrCat("server '", id, "' has data directory number ", model::ShowDisk(disk),
                                     ", and job '", request.spec().name(), "' wants the one with number ",
                                     model::ShowDisk(server.disk()), ": this server's directory was replaced"));
  }
  return absl::OkStatus();
}

// Who begins anew keeps what it has of the job until it is copied. Of an earlier job of the name nothing may stay.
absl::Status StepMachine::Impl::CheckSameLife(const v1::OpenRequest& request) const {
  if (plan == nullptr || plan->open().table().life() == request.table().life()) return absl::OkStatus();
  return Precondition(model::kOtherServer,
                      absl::StrCat("server '", id, "' has an earlier job named '", request.spec().name(),
                                   "', which was dropped elsewhere and made again: drop it here too (`ballastctl drop "
                                   "--job ",
                                   request.spec().name(), "` at this server's address)"));
}

// May this server begin at the base? A holder must have what it holds.
bool StepMachine::Impl::Begins(const v1::OpenRequest& open) const {
  const bool decides = open.has_base_decision() && open.base_decision().step() == open.base();
  if (open.has_restores() || open.has_base_decision() != decides || decides != (open.base() >= 0)) return false;
  const auto& members = open.table().members();
  const auto self = std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.server_id() == id; });
  const auto index = static_cast<uint32_t>(self - members.begin());
  return self != members.end() &&
         std::none_of(open.table().shards().begin(), open.table().shards().end(), [&](const v1::Shard& shard) {
           return std::binary_search(shard.holders().begin(), shard.holders().end(), index);
         });
}

// Two servers that count alike say so; one that begins takes the group's word for it.
absl::Status StepMachine::Impl::CheckStepCounts(const model::EpochPlan& next, bool forgets) const {
  const auto& told = next.open().tensor_steps();
  const size_t tensors = next.layout().tensors().size();
  if ((!told.empty() || forgets) && static_cast<size_t>(told.size()) != tensors) {
    return BadRequest(absl::StrCat("expected the step counts of ", tensors, " tensors in the Open, got ", told.size(),
                                   ": server '", id, "' ", forgets ? "begins with them" : "compares them"));
  }
  if (told.empty() || forgets) return absl::OkStatus();
  std::vector<uint64_t> own = tensor_steps;
  own.resize(tensors, 0);
  if (next.open().base() == committed + 1) {
    model::CountSteps(*prepared, next.open().base_decision().verdict().skip(), &own);
  }
  if (std::equal(own.begin(), own.end(), told.begin(), told.end())) return absl::OkStatus();
  return Diverged(absl::StrCat("server '", id, "' counts other updates of the tensors at step ", next.open().base(),
                               " than the group says"));
}

absl::Status StepMachine::Impl::CheckChanges(const Change& change, const std::string& job) const {
  const bool asks = change.told.forgets || !change.unfilled.empty() || change.given_up > 0;
  if (!asks || host->ChangesChunks()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("this Open of job '", job, "' would have server '", id, "' copy ",
                                   change.unfilled.size(), " chunk(s) and give up ", change.given_up,
                                   ", which this version cannot: keep the table that the job has"));
}

namespace {

// Which tensors are registered at the base: nobody has state of them.
std::vector<bool> NewestOf(const v1::OpenRequest& open) {
  std::vector<bool> newest;
  for (const v1::Registration& registration : open.spec().registrations()) {
    newest.insert(newest.end(), static_cast<size_t>(registration.tensors_size()),
                  registration.version() >= open.base());
  }
  return newest;
}

}  // namespace

void StepMachine::Impl::SetTold(const v1::OpenRequest& open, bool forgets, Change* change) const {
  change->told.forgets = forgets;
  change->table = plan == nullptr || forgets || !SamePlaces(plan->open(), open);
  change->told.keeps_slices = host->KeepsSlices() && plan != nullptr && !forgets && Continues(plan->open(), open);
}

bool StepMachine::Impl::MayHaveLost(uint64_t chunk, absl::Span<const uint32_t> holders) const {
  return IsHolder(chunk) && holders.size() > 1;
}

absl::StatusOr<StepMachine::Impl::Change> StepMachine::Impl::ChangeTo(const model::EpochPlan& next, uint32_t index,
                                                                      bool forgets, bool replays) const {
  Change change;
  const v1::OpenRequest& open = next.open();
  if (!open.has_table()) return change;
  SetTold(open, forgets, &change);
  const auto had = [&](uint64_t chunk) {
    return plan != nullptr && chunk < plan->layout().chunks().size() && plan->Has(member, chunk);
  };
  const std::vector<bool> newest = NewestOf(open);
  for (const model::Chunk& chunk : next.layout().chunks()) {
    if (!next.Has(index, chunk.index)) {
      if (had(chunk.index)) ++change.given_up;
      continue;
    }
    const auto lacks = unfilled.find(chunk.index);
    const bool known = had(chunk.index) && !forgets;
    if (had(chunk.index) && forgets) ++change.given_up;
    const absl::Span<const uint32_t> holders = next.holders_of(chunk.index);
    const bool holds = std::find(holders.begin(), holders.end(), index) != holders.end();
    const bool filled = known ? lacks == unfilled.end() : newest[chunk.segments.front().tensor];
    if (filled || (known && holds && replays)) continue;
    if (holds && !(known && MayHaveLost(chunk.index, holders))) {
      return Diverged(absl::StrCat("server '", id, "' is to hold chunk ", chunk.index, " of job '", open.spec().name(),
                                   "' and lacks it: only who has a chunk may hold it"));
    }
    const int64_t least = open.continues() ? open.base() + 1 : open.base();
    change.unfilled[chunk.index] = known ? lacks->second : least;
  }
  return change;
}

void StepMachine::Impl::Forget(const v1::OpenRequest& open) {
  prepared.reset();
  decision.reset();
  if (open.has_base_decision()) decision = open.base_decision();
  for (model::SealAnswer& answer : answers) answer.reset();
  committed = open.base();
  decision_lsn = 0;
  tensor_steps.assign(open.tensor_steps().begin(), open.tensor_steps().end());
  skipped = 0;
  state = State::kKnown;
  due_pin.reset();
  restored_as = -1;
}

void StepMachine::Impl::Adopt(std::shared_ptr<const model::EpochPlan> next, uint32_t index, Change change) {
  slices.Open(next.get(), index, change.told.keeps_slices);
  seals.Open(next.get());
  plan = std::move(next);
  member = index;
  prepared.reset();
  tensor_steps.resize(plan->layout().tensors().size(), 0);
  SetUnfilled(std::move(change.unfilled));
  host->Opened(plan, change.told);
  tells_table = tells_table || change.table;
}

void StepMachine::Impl::TellDurable() {
  if (!std::exchange(tells_table, false)) return;
  for (const v1::PinnedVersion& pin : std::exchange(pins_to_drop, {})) host->PinChanged(pin);
  host->TableDurable();
}

void StepMachine::Impl::SetUnfilled(std::map<uint64_t, int64_t> next) {
  unfilled = std::move(next);
  ++unfilled_changes;
  std::vector<uint64_t> chunks;
  for (const auto& [chunk, least] : unfilled) chunks.push_back(chunk);
  slices.PassOver(chunks);
  for (model::SealAnswer& answer : answers) answer.reset();
}

std::vector<uint64_t> StepMachine::Impl::Lacking(const v1::StepHeader& header, uint64_t attempt) {
  std::vector<uint64_t> chunks = slices.Lacking(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), attempt);
  const std::vector<uint64_t> values = slices.Lacking(v1::SLICE_KIND_VALUE, header.value_presence(), attempt);
  chunks.insert(chunks.end(), values.begin(), values.end());
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return chunks;
}

void StepMachine::Impl::PassOver(absl::Span<const uint64_t> chunks, int64_t step) {
  for (const uint64_t chunk : chunks) {
    int64_t& least = unfilled.at(chunk);
    least = std::max(least, step);
  }
}

Outcome<v1::OpenResponse> StepMachine::Impl::OpenAgain(const v1::OpenRequest& request) const {
  if (state == State::kLost) return StateLost();
  if (plan->open().base() != request.base()) {
    return BadRequest(absl::StrCat("epoch ", Show(request.epoch()), " is open from step ", plan->open().base(),
                                   ", not from ", request.base(), "; an epoch has one base"));
  }
  if (SamePlan(plan->open(), request)) {
    if (!Durable(table_lsn)) return std::nullopt;
    return v1::OpenResponse();
  }
  return BadRequest(absl::StrCat("epoch ", Show(request.epoch()),
                                 " is open with another tiling, spec or members; an epoch is opened once: fence a "
                                 "new one to change them"));
}

Outcome<v1::OpenResponse> StepMachine::Open(const v1::OpenRequest& request,
                                            std::shared_ptr<const model::EpochPlan> plan) {
  Impl& m = *impl_;
  const auto order = model::Compare(request.epoch(), m.promised);
  if (order < 0) {
    return m.Stale(absl::StrCat("epoch ", Show(request.epoch()), " was fenced by epoch ", Show(m.promised),
                                "; restart the group with resume=auto"));
  }
  if (order > 0) {
    return BadRequest(absl::StrCat("epoch ", Show(request.epoch()), " was never promised by server '", m.id,
                                   "' (its promise is ", Show(m.promised), "); send Fence first"));
  }
  if (!m.Durable(m.promise_lsn)) return std::nullopt;
  if (m.plan != nullptr && model::Compare(m.plan->open().epoch(), request.epoch()) == 0) return m.OpenAgain(request);
  BALLAST_RETURN_IF_ERROR(m.CheckOwnDisk(request));
  // Who forgets the job compares nothing with what it had.
  const bool forgets = Forgets(request);
  if (forgets) BALLAST_RETURN_IF_ERROR(m.CheckSameLife(request));
  if (!forgets) {
    if (m.plan != nullptr) BALLAST_RETURN_IF_ERROR(CheckContinues(m.plan->open(), request));
    BALLAST_RETURN_IF_ERROR(
        CheckRegistered(request, m.plan == nullptr ? 0 : m.plan->open().spec().registrations_size()));
  }
  if (plan == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(model::EpochPlan made, model::EpochPlan::Make(request, m.plan.get()));
    plan = std::make_shared<const model::EpochPlan>(std::move(made));
  }
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, plan->FindMember(m.id));
  if (!forgets) BALLAST_RETURN_IF_ERROR(request.has_restores() ? m.CheckStartsAnew(request) : m.CheckBase(request));
  BALLAST_RETURN_IF_ERROR(m.CheckStepCounts(*plan, forgets));
  BALLAST_ASSIGN_OR_RETURN(Impl::Change change, m.ChangeTo(*plan, index, forgets, /*replays=*/false));
  BALLAST_RETURN_IF_ERROR(m.CheckChanges(change, request.spec().name()));
  if (forgets) {
    m.Forget(request);
    m.pins_to_drop.clear();
    for (auto& [version, pin] : m.pins) {
      pin.set_automatic(false);
      pin.set_requested(false);
      m.pins_to_drop.push_back(pin);
    }
    m.pins.clear();
  } else if (request.has_restores()) {
    m.committed = request.base();
    m.decision.reset();
    m.due_pin.reset();
    m.state = Impl::State::kToRestore;
  } else if (request.base() == m.committed + 1) {
    m.Decide(request.base_decision(), /*log=*/true);
  }
  const bool another_table = change.table;
  const uint64_t lsn = m.journal->Append(OpenRecord{plan->shared_open()});
  m.Adopt(std::move(plan), index, std::move(change));
  if (!another_table) return v1::OpenResponse();
  m.table_lsn = lsn;
  m.journal->Sync(lsn);
  return std::nullopt;
}

bool StepMachine::Forgets(const v1::OpenRequest& request) const {
  return request.has_table() && !impl_->Fits(request) && impl_->Begins(request);
}

const std::map<uint64_t, int64_t>& StepMachine::unfilled() const { return impl_->unfilled; }
uint64_t StepMachine::unfilled_changes() const { return impl_->unfilled_changes; }

bool StepMachine::Impl::IsHolder(uint64_t chunk) const {
  if (plan == nullptr || !plan->open().has_table() || chunk >= plan->layout().chunks().size()) return false;
  const absl::Span<const uint32_t> holders = plan->holders_of(chunk);
  return std::find(holders.begin(), holders.end(), member) != holders.end();
}

bool StepMachine::IsHolder(uint64_t chunk) const { return impl_->IsHolder(chunk); }

bool StepMachine::HasOtherHolder(uint64_t chunk) const {
  const Impl& m = *impl_;
  if (m.plan == nullptr || !m.plan->open().has_table() || chunk >= m.plan->layout().chunks().size()) return false;
  const absl::Span<const uint32_t> holders = m.plan->holders_of(chunk);
  return std::any_of(holders.begin(), holders.end(), [&](uint32_t holder) { return holder != m.member; });
}

void StepMachine::MarkUnfilled(uint64_t chunk, int64_t version) {
  Impl& m = *impl_;
  std::map<uint64_t, int64_t> next = m.unfilled;
  int64_t& least = next.try_emplace(chunk, version).first->second;
  least = std::max(least, version);
  m.SetUnfilled(std::move(next));
  if (!m.prepared.has_value()) return;
  // In a recovery: the step was prepared when the chunk was unfilled before.
  const std::vector<uint64_t> lacking = m.Lacking(m.prepared->header(), m.prepared->attempt());
  if (std::binary_search(lacking.begin(), lacking.end(), chunk)) m.PassOver({&chunk, 1}, m.prepared->step());
}

bool StepMachine::may_import() const { return impl_->plan != nullptr && impl_->Durable(impl_->table_lsn); }

std::string StepMachine::Impl::FilledShards() const {
  const v1::Table& table = plan->open().table();
  std::vector<bool> lacks(static_cast<size_t>(table.shards_size()), false);
  for (const auto& [chunk, least] : unfilled) lacks[chunk % lacks.size()] = true;
  std::vector<uint32_t> filled;
  for (uint32_t s = 0; s < lacks.size(); ++s) {
    if (!lacks[s] && plan->Has(member, s)) filled.push_back(s);
  }
  return model::MakeBitmap(static_cast<uint32_t>(lacks.size()), filled);
}

absl::Status StepMachine::Impl::CheckLeast(uint64_t chunk, int64_t version) const {
  if (plan == nullptr || chunk >= plan->layout().chunks().size() || !plan->Has(member, chunk)) {
    return BadRequest(absl::StrCat("chunk ", chunk, " does not lie on server '", id, "'"));
  }
  const auto lacks = unfilled.find(chunk);
  if (lacks == unfilled.end() || version >= lacks->second) return absl::OkStatus();
  return Precondition(model::kVersionGone,
                      absl::StrCat("chunk ", chunk, " was imported as of version ", version, ", and server '", id,
                                   "' needs version ", lacks->second, " or later: import it again"));
}

absl::Status StepMachine::CheckImport(uint64_t chunk, int64_t version) {
  Impl& m = *impl_;
  BALLAST_RETURN_IF_ERROR(m.CheckLeast(chunk, version));
  if (!m.unfilled.contains(chunk)) return absl::OkStatus();
  if (version > m.committed) {
    return Precondition(model::kBehind,
                        absl::StrCat("chunk ", chunk, " was imported as of version ", version, ", and server '", m.id,
                                     "' is at step ", m.committed, ": it counts once that step is committed here"));
  }
  // Who reports a chunk as filled must know the decision of its version for good: the step's record here may lack the
  // chunk's norm, and the holder may be gone when a group asks for it.
  const uint64_t needed = version == m.committed ? std::max(m.decision_lsn, m.table_lsn) : m.table_lsn;
  if (m.Durable(needed)) return absl::OkStatus();
  m.journal->Sync(needed);
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      absl::StrCat("the log of server '", m.id, "' is not durable up to version ", version, " yet"));
}

absl::Status StepMachine::MarkFilled(uint64_t chunk, int64_t version) {
  Impl& m = *impl_;
  BALLAST_RETURN_IF_ERROR(m.CheckLeast(chunk, version));
  if (m.unfilled.erase(chunk) == 0) return absl::OkStatus();
  m.slices.PassOverNoMore(chunk);  // a table adds thousands of chunks, and each is filled by itself
  for (model::SealAnswer& answer : m.answers) answer.reset();
  return absl::OkStatus();
}

}  // namespace ballast::services
