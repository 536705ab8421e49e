#include "ballast/tests/sim_members/server.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/seeded/step_bugs.h"

namespace ballast::sim_members {

using services::StepMachine;

Server::Server(int index, uint64_t disk, Bug bug, Random* random, Oracle* oracle)
    : index_(index), bug_(bug), random_(random), oracle_(oracle), disk_(disk) {
  Restart();
}

uint64_t Server::Append(const services::StepRecord& record) {
  log_.push_back(record);
  return log_.size();
}

bool Server::Lies(uint64_t chunk) const {
  if (plan_ == nullptr) return false;
  const auto member = plan_->FindMember(ServerName(index_));
  return member.ok() && plan_->Has(*member, chunk);
}

std::optional<uint32_t> Server::SliceIndex(const v1::PushRequest& header) const {
  return plan_->FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
}

absl::Status Server::Push(const v1::PushRequest& header) {
  const auto admission = machine_->Admit(header, [](uint32_t) { return true; });
  if (!admission.ok()) return admission.status();
  if (*admission == StepMachine::Admission::kHeld) return absl::OkStatus();
  places_[{header.kind(), *SliceIndex(header)}] = {header.attempt(), header.crc32c()};
  return machine_->EndPush(header, absl::OkStatus());
}

v1::ChunkNorm Server::Norm(uint64_t chunk, absl::string_view gradient_presence) {
  return NormOf(*plan_, chunk, std::string(gradient_presence), [&](uint32_t slice) {
    const auto place = places_.find({v1::SLICE_KIND_GRADIENT, slice});
    return place == places_.end() ? 0 : place->second.digest;
  });
}

std::map<std::pair<int, uint32_t>, uint32_t> Server::SlicesOf(uint64_t attempt) const {
  std::map<std::pair<int, uint32_t>, uint32_t> slices;
  for (const auto& [place, slice] : places_) {
    if (slice.attempt == attempt) slices[place] = slice.digest;
  }
  return slices;
}

std::optional<uint64_t> Server::Digests(uint64_t chunk, const Update& update) const {
  uint64_t digests = 0;
  for (const uint32_t index : update.plan->slices_of_chunk(chunk)) {
    for (const v1::SliceKind kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) {
      const std::string& presence =
          kind == v1::SLICE_KIND_GRADIENT ? update.header.gradient_presence() : update.header.value_presence();
      if (!update.plan->Touches(update.plan->slices()[index], presence)) continue;
      const auto slice = update.slices.find({kind, index});
      if (slice == update.slices.end()) return std::nullopt;
      digests += Mix(slice->second);
    }
  }
  return digests;
}

void Server::Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  oracle_->Taken(decision, Name());
  queue_.push_back({decision.step(), prepared.header(), decision.verdict(), plan_, SlicesOf(prepared.attempt())});
  places_.clear();
  if (replaying_) ApplyNext();
}

void Server::ApplyNext() {
  if (queue_.empty()) return;
  const Update update = std::move(queue_.front());
  queue_.pop_front();
  applied_ = update.step;
  for (uint64_t chunk = 0; chunk < JobLayout().chunks().size(); ++chunk) {
    // A replay gives chunks up at its end; until then their steps are for others.
    if (chunks_.contains(chunk) && Lies(chunk)) ApplyTo(chunk, update);
  }
}

void Server::ApplyTo(uint64_t chunk, const Update& update) {
  ChunkState& state = chunks_.at(chunk);
  if (state.version >= update.step) {
    ++passed_over_;
    if (bug_ != Bug::kTwice || replaying_) return;
    state.content = Evolve(state.content, update.step, Digests(chunk, update).value_or(1), update.verdict);
    return oracle_->CheckChunk(chunk, state.version, state.content, Name());
  }
  const std::optional<uint64_t> digests = Digests(chunk, update);
  if (state.version == update.step - 1 && digests.has_value()) {
    state.version = update.step;
    state.content = Evolve(state.content, update.step, *digests, update.verdict);
    return oracle_->CheckChunk(chunk, state.version, state.content, Name());
  }
  // It cannot follow: an import that came too late, or what a replay finds on the disk of before.
  if (replaying_ || imported_.contains(chunk) || machine_->unfilled().count(chunk) > 0) {
    chunks_.erase(chunk);
    if (imported_.erase(chunk) > 0) ForgetImport(chunk);
    return;
  }
  oracle_->Broken(absl::StrCat(Name(), ": chunk ", chunk, " at version ", state.version, " misses ",
                               digests.has_value() ? "a step before step " : "slices of step ", update.step));
}

void Server::Opened(std::shared_ptr<const model::EpochPlan> plan, const services::OpenChange& change) {
  plan_ = std::move(plan);
  if (!change.keeps_slices) places_.clear();
  if (change.forgets) {
    queue_.clear();
    applied_ = plan_->open().base();
    if (!replaying_) chunks_.clear();
    imported_.clear();
  }
  for (const auto& [chunk, state] : disk_chunks_) {
    if (change.forgets || !Lies(chunk)) leaving_.insert(chunk);
  }
  std::erase_if(leaving_, [&](uint64_t chunk) { return Lies(chunk) && machine_->unfilled().count(chunk) == 0; });
  for (uint64_t chunk = 0; chunk < JobLayout().chunks().size(); ++chunk) {
    if (plan_->open().base() < 0 && Lies(chunk) && !chunks_.contains(chunk)) chunks_[chunk] = ChunkState();
    if (!Lies(chunk)) imported_.erase(chunk);
  }
}

void Server::TableDurable() {
  for (const uint64_t chunk : std::exchange(leaving_, {})) {
    disk_chunks_.erase(chunk);
    chunks_.erase(chunk);
  }
  std::erase_if(chunks_, [&](const auto& chunk) { return !Lies(chunk.first); });
}

void Server::FinishSync() {
  if (sync_wanted_ <= synced_) return;
  synced_ += 1 + random_->Below(sync_wanted_ - synced_);
  if (random_->Percent(70)) synced_ = sync_wanted_;
  machine_->Synced(synced_);
}

void Server::Flush() {
  if (chunks_.empty()) return;
  auto state = chunks_.begin();
  std::advance(state, random_->Below(chunks_.size()));
  if (!imported_.contains(state->first) && machine_->unfilled().count(state->first) == 0 && Lies(state->first)) {
    disk_chunks_[state->first] = state->second;
  }
}

void Server::MaybeSnapshot() {
  if (machine_->plan() != nullptr) log_.push_back(services::SnapshotRecord{machine_->Snapshot()});
}

std::optional<uint64_t> Server::Wants() const {
  if (!machine_->may_import()) return std::nullopt;
  for (const auto& [chunk, least] : machine_->unfilled()) {
    if (!imported_.contains(chunk)) return chunk;
  }
  return std::nullopt;
}

std::optional<ChunkState> Server::Export(uint64_t chunk) const {
  const auto state = chunks_.find(chunk);
  const bool unfilled = machine_->unfilled().count(chunk) > 0;
  if (bug_ == Bug::kFillerSource && unfilled) return ChunkState{machine_->committed(), 0};
  if (state == chunks_.end() || unfilled || !Lies(chunk)) return std::nullopt;
  ChunkState exported = state->second;
  if (bug_ == Bug::kLabel) exported.version = machine_->committed();
  return exported;
}

void Server::Install(uint64_t chunk, const ChunkState& state) {
  const auto lacks = machine_->unfilled().find(chunk);
  if (lacks == machine_->unfilled().end() || imported_.contains(chunk) || !machine_->may_import()) return;
  if (state.version < lacks->second && services::seeded_bug != services::SeededBug::kLeastVersionIgnored) {
    ++late_imports_;
    return;
  }
  if (state.version < applied_ && bug_ != Bug::kStaleInstall) {
    ++late_imports_;
    return;
  }
  chunks_[chunk] = state;
  imported_[chunk] = false;
}

void Server::WriteImport() {
  if (imported_.empty()) return;
  auto import = imported_.begin();
  std::advance(import, random_->Below(imported_.size()));
  const uint64_t chunk = import->first;
  const int64_t version = chunks_.at(chunk).version;
  absl::Status status;
  if (bug_ == Bug::kReportEarly || import->second) {
    status = machine_->MarkFilled(chunk, import->second ? disk_chunks_.at(chunk).version : version);
    if (status.ok()) {
      ++imports_;
      imported_.erase(chunk);
    }
  } else {
    status = machine_->CheckImport(chunk, version);
    if (status.ok()) disk_chunks_[chunk] = chunks_.at(chunk);
    if (status.ok()) damaged_.erase(chunk);
    if (status.ok()) import->second = true;
  }
  if (model::ReasonOf(status) != model::kVersionGone) return;
  imported_.erase(chunk);
  chunks_.erase(chunk);
  ForgetImport(chunk);
}

void Server::ForgetImport(uint64_t chunk) {
  if (disk_chunks_.erase(chunk) > 0 && machine_->IsHolder(chunk)) damaged_.insert(chunk);  // as before the import
}

void Server::CutLog() {
  // Steps that some chunk on the disk does not have yet are needed, and undecided ones. A step may have no slices.
  int64_t flushed = std::numeric_limits<int64_t>::max();
  for (const auto& [chunk, state] : disk_chunks_) flushed = std::min(flushed, state.version);
  for (uint64_t chunk = 0; chunk < JobLayout().chunks().size(); ++chunk) {
    if (Lies(chunk) && !disk_chunks_.contains(chunk) && !damaged_.contains(chunk)) flushed = -1;
  }
  size_t start = 0;
  for (size_t i = 0; i < log_.size(); ++i) {
    const auto* slice = std::get_if<services::SliceRecord>(&log_[i]);
    if (slice != nullptr && slice->header.step() > flushed) break;
    const auto* decided = std::get_if<services::DecisionRecord>(&log_[i]);
    if (decided != nullptr && decided->decision.step() > flushed) break;
    if (std::holds_alternative<services::SnapshotRecord>(log_[i]) && random_->Percent(70)) start = i;
  }
  log_.erase(log_.begin(), log_.begin() + static_cast<ptrdiff_t>(start));
}

void Server::Crash(bool loses_all) {
  log_.resize(synced_ + (loses_all ? 0 : random_->Below(log_.size() - synced_ + 1)));
  CutLog();
  machine_.reset();
  plan_ = nullptr;
  places_.clear();
  queue_.clear();
  imported_.clear();
  leaving_.clear();
  chunks_.clear();
}

void Server::Restart() {
  ++life_;
  services::StepJournal* const journal = this;
  services::StepHost* const host = this;
  machine_ = std::make_unique<StepMachine>(ServerName(index_), disk_, journal, host);
  synced_ = sync_wanted_ = log_.size();
  machine_->Synced(synced_);
  applied_ = -1;
  chunks_ = disk_chunks_;
  replaying_ = true;
  bool begun = false;
  for (const services::StepRecord& record : std::vector<services::StepRecord>(log_)) {
    if (const absl::Status status = machine_->Replay(record); !status.ok()) {
      return oracle_->Broken(absl::StrCat(Name(), " cannot recover: ", status.ToString()));
    }
    // The log no longer has the steps that make up what the disk lacks.
    if (std::holds_alternative<services::SnapshotRecord>(record) && machine_->committed() >= 0) {
      std::erase_if(chunks_, [&](const auto& chunk) { return !begun && !disk_chunks_.contains(chunk.first); });
    }
    begun = true;
    if (const auto* slice = std::get_if<services::SliceRecord>(&record)) {
      if (const auto index = SliceIndex(slice->header))
        places_[{slice->header.kind(), *index}] = {slice->header.attempt(), slice->header.crc32c()};
    }
  }
  replaying_ = false;
  leaving_.clear();
  applied_ = machine_->committed();
  Reconcile();
}

void Server::Reconcile() {
  for (auto& chunks : {&chunks_, &disk_chunks_}) {
    std::erase_if(*chunks, [&](const auto& chunk) { return !Lies(chunk.first); });
  }
  const std::map<uint64_t, int64_t> unfilled = machine_->unfilled();
  for (const auto& [chunk, least] : unfilled) {
    const auto state = chunks_.find(chunk);
    const auto disk = disk_chunks_.find(chunk);
    if (state == chunks_.end() || disk == disk_chunks_.end()) {
      chunks_.erase(chunk);
      disk_chunks_.erase(chunk);
      continue;
    }
    const absl::Status filled = machine_->MarkFilled(chunk, disk->second.version);
    if (filled.ok()) continue;
    chunks_.erase(chunk);
    disk_chunks_.erase(chunk);
  }
  for (uint64_t chunk = 0; chunk < JobLayout().chunks().size(); ++chunk) {
    if (!Lies(chunk) || machine_->unfilled().count(chunk) > 0) continue;
    const auto state = chunks_.find(chunk);
    const bool given_up = state == chunks_.end() || PreparedWithout(chunk);
    if (given_up && damaged_.contains(chunk) && machine_->HasOtherHolder(chunk)) {
      chunks_.erase(chunk);
      disk_chunks_.erase(chunk);
      machine_->MarkUnfilled(chunk, machine_->committed());
      continue;
    }
    if (state == chunks_.end() || state->second.version < machine_->committed()) {
      return oracle_->Broken(absl::StrCat(Name(), " comes back without chunk ", chunk, " at version ",
                                          machine_->committed(), ", which its log says it has"));
    }
    damaged_.erase(chunk);  // the log has made it up
    oracle_->CheckChunk(chunk, state->second.version, state->second.content, Name());
  }
}

bool Server::PreparedWithout(uint64_t chunk) const {
  const v1::GetJobResponse job = machine_->DescribeProgress();
  if (!job.has_prepared() || chunks_.at(chunk).version >= job.prepared().step()) return false;
  Update update;
  update.header = job.prepared().header();
  update.plan = plan_;
  update.slices = SlicesOf(job.prepared().attempt());
  return !Digests(chunk, update).has_value();
}

bool Server::MayDamage(uint64_t chunk) const {
  return up() && Lies(chunk) && machine_->may_import() && chunks_.contains(chunk) && !imported_.contains(chunk) &&
         machine_->committed() >= 0 && machine_->unfilled().count(chunk) == 0 && machine_->HasOtherHolder(chunk);
}

// A crash may come before the machine hears of it.
void Server::Damage(uint64_t chunk) {
  const int64_t version = chunks_.at(chunk).version;
  chunks_.erase(chunk);
  disk_chunks_.erase(chunk);
  damaged_.insert(chunk);
  if (random_->Percent(20)) return Crash();
  machine_->MarkUnfilled(chunk, version);
}

void Server::LoseDisk(bool back, uint64_t disk) {
  log_.clear();
  damaged_.clear();
  disk_chunks_.clear();
  synced_ = 0;
  if (up()) Crash();
  gone_ = !back;
  disk_ = disk;
  if (back) Restart();
}

void Server::FreeAll() {
  disk_chunks_.clear();
  chunks_.clear();
  imported_.clear();
}

bool Server::HasCopy(uint64_t chunk, int64_t last, const v1::Decision* decision) const {
  if (!Lies(chunk) || machine_->unfilled().count(chunk) > 0 || !chunks_.contains(chunk)) return false;
  const int64_t committed = machine_->committed();
  if (committed == last) return true;
  const v1::GetJobResponse job = machine_->DescribeProgress();
  return committed == last - 1 && job.has_prepared() && decision != nullptr &&
         model::Compare(job.prepared().epoch(), decision->epoch()) == 0 &&
         job.prepared().attempt() == decision->attempt();
}

}  // namespace ballast::sim_members
