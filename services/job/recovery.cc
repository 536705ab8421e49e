#include "ballast/services/job/recovery.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/services/job/step_work.h"
#include "ballast/services/job/updates.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/earlier_extents.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/services/journal/log_walk.h"
#include "ballast/services/space/chunk_changes.h"
#include "ballast/services/space/openings.h"
#include "ballast/services/space/space.h"
#include "ballast/storage/io/disk_counters.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/storage/log/logged_records.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kProgressEvery = absl::Seconds(2);

absl::Status LogMissing(const std::string& name, size_t chunks, const absl::Status& cause) {
  return model::Error(absl::StatusCode::kDataLoss, model::kStateLost,
                      absl::StrCat("job '", name, "' has ", chunks, " durable chunks and no gradient log: ",
                                   cause.message(), "; was the data directory copied in part, or a drop interrupted?"));
}

}  // namespace

// Replays a log's records onto the job.
class Recovery::Replayer : public LogVisitor {
 public:
  Replayer(Recovery* recovery, const LogWalk* walk, Replay* replay)
      : recovery_(recovery), core_(recovery->core_), walk_(walk), replay_(replay) {}

  // After the last record: the slices pushed for the step in flight. Without their bytes the machine would count slices
  // that are missing.
  absl::Status LoadUndecided();

 private:
  // Slices and the prepared record of the next step leave the chunks alone; other records find the last step applied.
  absl::Status VisitOther(const StepRecord& record) override {
    JobMutexLock lock(&core_->mu);
    BALLAST_RETURN_IF_ERROR(core_->Refusal());
    return core_->machine->Replay(record);
  }
  absl::Status VisitPromise(const v1::Epoch&, const StepRecord& record) override { return Settled(record); }
  absl::Status VisitOpen(const v1::OpenRequest& open, const StepRecord& record) override;
  bool Holds(const v1::PushRequest& header) override {
    JobMutexLock lock(&core_->mu);
    return core_->machine->Holds(header);
  }
  absl::Status VisitSnapshot(const v1::LogSnapshot& snapshot, bool begins, const StepRecord& record) override;
  absl::Status VisitDecision(const v1::Decision& decision, const StepRecord& record) override;
  absl::Status Settled(const StepRecord& record) {
    BALLAST_RETURN_IF_ERROR(replay_->FinishUpdates());
    return VisitOther(record);
  }

  Recovery* const recovery_;
  JobCore* const core_;
  const LogWalk* const walk_;
  Replay* const replay_;
};

absl::Status Recovery::Replayer::VisitOpen(const v1::OpenRequest& open, const StepRecord& record) {
  BALLAST_RETURN_IF_ERROR(replay_->FinishUpdates());
  BALLAST_ASSIGN_OR_RETURN(HeldChunks chunks, recovery_->TakeChunks(open));
  JobMutexLock lock(&core_->mu);
  return recovery_->openings_->Replay(std::move(chunks), [&] {
    core_->mu.AssertHeld();
    return core_->machine->Replay(record);
  });
}

absl::Status Recovery::Replayer::VisitSnapshot(const v1::LogSnapshot& snapshot, bool begins, const StepRecord& record) {
  if (!begins) return Settled(record);
  BALLAST_RETURN_IF_ERROR(VisitOpen(snapshot.open(), record));
  JobMutexLock lock(&core_->mu);
  recovery_->changes_->Opened();
  BALLAST_RETURN_IF_ERROR(recovery_->CheckChanged(snapshot));
  // The chunks have the steps that were cut from the log.
  for (const auto& chunk : core_->state.chunks()) chunk->Reach(snapshot.committed());
  return absl::OkStatus();
}

absl::Status Recovery::Replayer::VisitDecision(const v1::Decision& decision, const StepRecord& record) {
  const int64_t step = decision.step();
  BALLAST_RETURN_IF_ERROR(core_->Interrupted());
  BALLAST_RETURN_IF_ERROR(
      recovery_->slices_.Load(walk_->Slices(decision.attempt(), step), LoggedSlices::Use::kDecided, replay_));
  BALLAST_RETURN_IF_ERROR(replay_->FinishUpdates());
  std::shared_ptr<StepWork> work;
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    BALLAST_RETURN_IF_ERROR(core_->machine->Replay(record));
    work = std::exchange(recovery_->work_, nullptr);
    BALLAST_RETURN_IF_ERROR(work->incomplete);
    work->replayed = [replay = replay_](uint64_t bytes) { replay->Count(bytes); };
    store = core_->state.store();
    Replies nobody_waits;
    recovery_->updates_->PassOverOthers(work.get(), &nobody_waits);
    for (const auto& chunk : work->untouched) chunk->Reach(step);
  }
  BALLAST_RETURN_IF_ERROR(recovery_->updates_->PrepareReadBack(work.get()));
  recovery_->flushes_->SetApplied(step);
  ++replay_->steps;
  if (absl::Now() - replay_->said > kProgressEvery) {
    replay_->said = absl::Now();
    spdlog::info("job '{}': recovering, at step {}, {} MiB of slices replayed", core_->name, step,
                 replay_->replayed_bytes >> 20);
  }
  const auto update = [updates = recovery_->updates_, store, work, log = replay_->file] {
    return updates->Run(store.get(), work.get(), log);
  };
  if (core_->around.compute->threads() == 1) return update();
  {
    JobMutexLock lock(&core_->mu);
    replay_->updating = true;
  }
  absl::StatusOr<std::thread> thread = model::MakeThread([core = core_, update, replay = replay_] {
    replay->updated = update();
    JobMutexLock lock(&core->mu);
    replay->updating = false;
  });
  if (thread.ok()) {
    replay_->updates = *std::move(thread);
    return absl::OkStatus();
  }
  {
    JobMutexLock lock(&core_->mu);
    replay_->updating = false;
  }
  return update();  // slower
}

absl::Status Recovery::Replayer::LoadUndecided() {
  int64_t committed = -1;
  std::optional<v1::PreparedRecord> prepared;
  std::set<uint64_t> attempts = walk_->Attempts();
  {
    JobMutexLock lock(&core_->mu);
    committed = core_->machine->committed();
    v1::GetJobResponse job = core_->machine->DescribeProgress();
    if (job.has_prepared()) prepared = std::move(*job.mutable_prepared());
  }
  for (const uint64_t attempt : attempts) {
    // A rank that has not heard that all servers prepared the step keeps its gradients, and is told what is missing.
    const bool needed = prepared.has_value() && prepared->attempt() == attempt;
    const auto use = needed ? LoggedSlices::Use::kPrepared : LoggedSlices::Use::kPushed;
    BALLAST_RETURN_IF_ERROR(recovery_->slices_.Load(walk_->Slices(attempt, committed + 1), use, replay_));
  }
  if (!attempts.empty()) {
    // Otherwise a lower attempt would count as the step's first, and the next higher attempt would have the log release
    // this attempt's slices.
    JobMutexLock lock(&core_->mu);
    recovery_->journal_->NoteRecovered(committed + 1, *attempts.rbegin());
  }
  BALLAST_RETURN_IF_ERROR(replay_->FinishUpdates());
  if (!prepared.has_value()) return absl::OkStatus();
  JobMutexLock lock(&core_->mu);
  recovery_->updates_->GiveUpUnheld(*prepared);
  for (const auto& chunk : core_->state.chunks()) {
    if (chunk->filled()) BALLAST_RETURN_IF_ERROR(recovery_->updates_->CheckHeld(*chunk, *prepared));
  }
  return absl::OkStatus();
}

absl::Status Recovery::Recover(const JobEntry& entry) {
  const absl::Time began = absl::Now();
  storage::ScannedLog scanned;
  RecoveryProgress* const progress = core_->around.progress;
  auto log = storage::GradientLog::Recover(core_->around.tiers->disk(), journal_->log_path(), &scanned,
                                           progress == nullptr ? nullptr : &progress->done_bytes);
  if (absl::IsNotFound(log.status()) && entry.chunks.empty() && entry.pins.empty() && !entry.life.has_value()) {
    // The log was still being made: no step was ever prepared.
    JobMutexLock lock(&core_->mu);
    return entry.promised.has_value() ? core_->machine->Replay(PromiseRecord{*entry.promised}) : absl::OkStatus();
  }
  if (absl::IsNotFound(log.status())) return LogMissing(core_->name, entry.chunks.size(), log.status());
  BALLAST_RETURN_IF_ERROR(log.status());
  if (scanned.name != core_->name) {
    return model::Error(
        absl::StatusCode::kDataLoss, model::kIo,
        absl::StrCat(journal_->log_path(), " is the log of job '", scanned.name, "', not of '", core_->name, "'"));
  }
  BALLAST_RETURN_IF_ERROR(CheckLife(core_->name, entry, scanned.life, journal_->log_path()));
  BALLAST_RETURN_IF_ERROR(journal_->TakeRecovered(scanned.life, (*log)->file_bytes(), scanned.last_lsn));
  earlier_->AddChunks(entry.chunks);
  earlier_->AddPins(entry.pins);
  {
    JobMutexLock lock(&core_->mu);
    for (const v1::PinnedVersion& pin : entry.pins) core_->machine->Pinned(pin);
    core_->state.SetRecovering(true);
  }
  Replay replay;
  replay.file = &(*log)->file();
  const uint64_t payload_bytes = scanned.payload_bytes;
  replay.progress = progress;
  // In one addition: nobody sees a total below what is done.
  if (progress != nullptr) progress->total_bytes += scanned.read_bytes + payload_bytes - scanned.file_bytes;
  storage::LoggedRecords records(replay.file, &scanned);
  LogWalk walk(&records, scanned.live.size());
  Replayer replayer(this, &walk, &replay);
  BALLAST_RETURN_IF_ERROR(walk.Run(&replayer));
  for (size_t i = 0; i < scanned.live.size(); ++i) (*log)->Keep(scanned.live[i].incarnation, walk.keep_for()[i]);
  BALLAST_RETURN_IF_ERROR(replayer.LoadUndecided());
  BALLAST_RETURN_IF_ERROR(CheckLogReaches(entry));
  BALLAST_RETURN_IF_ERROR(DropPins(entry));
  BALLAST_RETURN_IF_ERROR(changes_->EndReplay());
  BALLAST_RETURN_IF_ERROR(CheckAllTaken());
  int64_t committed = -1;
  {
    JobMutexLock lock(&core_->mu);
    committed = core_->machine->committed();
    // The log may have the newer promise: each is written on its own.
    if (entry.promised.has_value() && model::Compare(*entry.promised, core_->machine->promised()) > 0) {
      BALLAST_RETURN_IF_ERROR(core_->machine->Replay(PromiseRecord{*entry.promised}));
    }
  }
  storage::ProcessDiskCounters().repaired_log_blocks += scanned.repaired_blocks;
  flushes_->SetApplied(committed);
  // Slices of dropped attempts and of skipped steps need no replay.
  replay.Pass(payload_bytes - std::min(payload_bytes, replay.replayed_bytes + replay.passed_bytes));
  {
    JobMutexLock lock(&core_->mu);
    core_->state.SetRecovering(false);
    if (core_->state.store() != nullptr) core_->state.SetKept(core_->state.store()->KeptBytes());
  }
  space_->NoteLeastDram(0);
  BALLAST_RETURN_IF_ERROR(journal_->Start(*std::move(log), /*logged=*/true));
  spdlog::info("job '{}': recovered step {} in {:.2f} s: {} chunks, {} steps and {} MiB of slices replayed{}",
               core_->name, committed, absl::ToDoubleSeconds(absl::Now() - began), entry.chunks.size(), replay.steps,
               replay.replayed_bytes >> 20,
               scanned.repaired_blocks > 0
                   ? absl::StrCat(", ", scanned.repaired_blocks, " damaged blocks of the log read from their copies")
                   : "");
  JobMutexLock lock(&core_->mu);
  return core_->failure();
}

absl::Status Recovery::DropPins(const JobEntry& entry) {
  for (const v1::PinnedVersion& pin : entry.pins) {
    std::shared_ptr<storage::ChunkStore> store;
    {
      JobMutexLock lock(&core_->mu);
      if (core_->machine->FindPin(pin.version()) != nullptr) continue;
      store = core_->state.store();
    }
    BALLAST_RETURN_IF_ERROR(core_->around.catalog->Replace(PinPrefixes(core_->name, pin.version()), {}));
    if (store != nullptr) store->UnpinDurably(pin.version());
    for (const storage::DurableChunk& chunk : earlier_->TakePin(pin.version())) {
      // Freed at once.
      if (core_->around.tiers->nvme() != nullptr) (void)core_->around.tiers->nvme()->TakeKept(chunk.offset, chunk.file);
    }
  }
  return absl::OkStatus();
}

absl::Status Recovery::CheckAllTaken() const {
  if (earlier_->chunks() == 0 && earlier_->pinned_chunks() == 0) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kDataLoss, model::kDiverged,
      absl::StrCat("the catalog knows ", earlier_->chunks(), " chunks of job '", core_->name, "' and ",
                   earlier_->pinned_chunks(), " that are pinned, which its log does not register, the first is ",
                   earlier_->first(), "; run `ballastctl verify`"));
}

absl::Status Recovery::CheckLogReaches(const JobEntry& entry) const {
  JobMutexLock lock(&core_->mu);
  int64_t applied = entry.committed;
  for (const auto& chunk : core_->state.chunks()) applied = std::max(applied, chunk->version().value_or(-1));
  const int64_t committed = core_->machine->committed();
  // The decision behind a durable prepared record need not be durable.
  if (applied <= committed + (core_->machine->prepared_durably() ? 1 : 0)) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kDataLoss, model::kDiverged,
      absl::StrCat("the log of job '", core_->name, "' ends at step ", committed, ", and the server had applied step ",
                   applied,
                   ": the log is an older copy, or its end is damaged. Bring the newer one back, or drop the job; "
                   "`ballastctl verify` tells more"));
}

absl::Status Recovery::End() {
  {
    JobMutexLock lock(&core_->mu);
    if (!journal_->durable()) return absl::OkStatus();  // a spill is empty, and as large as its job needs
  }
  BALLAST_RETURN_IF_ERROR(journal_->ExtendForRestart());
  return flushes_->EndRecovery();
}

absl::StatusOr<HeldChunks> Recovery::TakeChunks(const v1::OpenRequest& open) {
  BALLAST_ASSIGN_OR_RETURN(const model::EpochPlan plan, model::EpochPlan::Make(open));
  BALLAST_ASSIGN_OR_RETURN(HeldChunks chunks, space_->Take(plan));
  std::shared_ptr<storage::ChunkStore> store;
  std::vector<int64_t> versions;
  {
    JobMutexLock lock(&core_->mu);
    store = core_->state.store();
    for (const auto& [version, pin] : core_->machine->pins()) versions.push_back(version);
  }
  if (store == nullptr) return chunks;  // none of the chunks is this server's
  BALLAST_RETURN_IF_ERROR(earlier_->TakeBackPins(versions, chunks, store.get()));
  return chunks;
}

absl::Status Recovery::CheckChanged(const v1::LogSnapshot& snapshot) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<int64_t> changed, DecodeChanged(snapshot, core_->state.chunks().size()));
  for (size_t i = 0; i < core_->state.chunks().size(); ++i) {
    HeldChunk& chunk = *core_->state.chunks()[i];
    chunk.SetChanged(std::max(chunk.changed(), changed[i]));
    const int64_t durable = core_->state.store()->durable_version(chunk.store_index);
    if (durable >= changed[i]) continue;
    // A later Open of the log may have taken the chunk away, or it was never filled: EndReplay judges.
    if (snapshot.open().has_table()) {
      chunk.Void(snapshot.committed());
      continue;
    }
    return model::Error(
        absl::StatusCode::kDataLoss, model::kStateLost,
        absl::StrCat("the catalog ", durable < 0 ? "names no state" : absl::StrCat("names version ", durable),
                     " of chunk ", chunk.id, " of job '", core_->name, "', which step ", changed[i],
                     " changed, and the log ", journal_->log_path(), " begins behind step ", snapshot.committed(),
                     ": the catalog's entry is lost or an older copy. Run `ballastctl verify --rebuild`"));
  }
  return absl::OkStatus();
}

absl::Status Recovery::ComeBack(const JobEntry& entry) {
  earlier_->AddPins(entry.pins);
  for (const v1::PinnedVersion& pin : entry.pins) {
    const uint64_t life = LifeOf(pin);
    if (life == 0) continue;
    const std::string whose = absl::StrCat("the catalog's pin of version ", pin.version());
    BALLAST_RETURN_IF_ERROR(CheckLife(core_->name, entry, life, whose));
    journal_->TakeLife(life);
    break;
  }
  const std::vector<uint64_t> ids = earlier_->PinnedIds();
  const std::set<uint64_t> pinned(ids.begin(), ids.end());
  {
    JobMutexLock lock(&core_->mu);
    for (const v1::PinnedVersion& pin : entry.pins) core_->machine->Pinned(pin);
    if (entry.promised.has_value()) {
      BALLAST_RETURN_IF_ERROR(core_->machine->Replay(PromiseRecord{*entry.promised}));
    }
  }
  BALLAST_ASSIGN_OR_RETURN(HeldChunks chunks, TakeChunks(*entry.open));
  if (earlier_->pinned_chunks() > 0) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("the catalog pins chunk ", earlier_->first(), " of job '", core_->name,
                                     "', which does not belong to this server; run `ballastctl verify`"));
  }
  JobMutexLock lock(&core_->mu);
  BALLAST_RETURN_IF_ERROR(openings_->Replay(std::move(chunks), [&] {
    core_->mu.AssertHeld();
    return core_->machine->LoseState(*entry.open);
  }));
  // A restore brings back the chunks that had a state.
  for (const auto& chunk : core_->state.chunks()) {
    if (pinned.contains(chunk->id)) chunk->SetChanged(entry.pins.back().version());
  }
  spdlog::warn(
      "job '{}': what came after its newest pin ({}) is lost with the server's last process (durability every-{}); "
      "the next group restores what all servers have",
      core_->name, entry.pins.empty() ? "none" : absl::StrCat("version ", entry.pins.back().version()),
      entry.open->spec().pin_interval());
  return absl::OkStatus();
}

}  // namespace ballast::services
