#include "ballast/services/tools/verify/log_history.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/payload_reader.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::services {
namespace {

constexpr char kGiveUp[] =
    "this server cannot rebuild the job's state, and restores no pinned version while it refuses the job. Bring the "
    "file back from a copy of exactly this state, or drop the job with `ballastctl drop`";

// The newest in a log, and how far it goes.
class Summary : public LogVisitor {
 public:
  explicit Summary(ReadLog* log) : log_(*log) {}
  absl::Status VisitOther(const StepRecord& record) override {
    log_.steps.Add(record);
    return absl::OkStatus();
  }
  absl::Status VisitPromise(const v1::Epoch& promised, const StepRecord& record) override {
    log_.promised = promised;
    return VisitOther(record);
  }
  absl::Status VisitOpen(const v1::OpenRequest& open, const StepRecord& record) override {
    log_.open = open;
    return VisitOther(record);
  }
  absl::Status VisitSnapshot(const v1::LogSnapshot& snapshot, bool, const StepRecord& record) override {
    if (snapshot.has_promised()) log_.promised = snapshot.promised();
    if (snapshot.has_open()) log_.open = snapshot.open();
    return VisitOther(record);
  }
  absl::Status VisitSlice(const LoggedSlice& slice, const StepRecord& record) override {
    log_.pushed.insert({slice.header.unit(), slice.header.begin(), slice.header.end()});
    return VisitOther(record);
  }

 private:
  ReadLog& log_;
};

// Follows a log as Recovery does.
class Replayer : public StepJournal, public StepHost, public LogVisitor {
 public:
  Replayer(const ReadLog& log, const std::string& server_id, const DurableStates& durable, const std::string& path,
           std::vector<Finding>* findings)
      : log_(log),
        durable_(durable),
        path_(path),
        findings_(findings),
        server_id_(server_id),
        machine_(server_id, /*disk=*/0, this, this),
        records_(log.file.get(), &log.scanned),
        walk_(&records_, log.scanned.live.size()) {}

  // Chunks' states are not judged.
  void LeaveChunks() { judges_chunks_ = false; }
  LogReplay Run();

  uint64_t Append(const StepRecord&) override { return ++lsn_; }
  void Sync(uint64_t) override {}
  v1::ChunkNorm Norm(uint64_t, absl::string_view) override { return {}; }
  void Opened(std::shared_ptr<const model::EpochPlan>, const OpenChange&) override {}
  bool ChangesChunks() const override { return true; }
  bool KeepsSlices() const override { return true; }
  void PinDue(int64_t) override {}
  void PinChanged(const v1::PinnedVersion&) override {}
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override;

 private:
  absl::Status VisitOther(const StepRecord& record) override { return machine_.Replay(record); }
  absl::Status VisitOpen(const v1::OpenRequest& open, const StepRecord& record) override;
  absl::Status VisitSnapshot(const v1::LogSnapshot& snapshot, bool begins, const StepRecord& record) override;
  bool Holds(const v1::PushRequest& header) override { return machine_.Holds(header); }
  absl::Status VisitSlice(const LoggedSlice& slice, const StepRecord& record) override;
  absl::Status VisitDecision(const v1::Decision& decision, const StepRecord& record) override;
  void TakePlan();
  // Does the server lack the chunk, whatever the disk has of it?
  bool Lacks(uint64_t chunk) const;
  // Where another server holds a chunk of which nothing here counts, the server copies it.
  Harm HarmOfLacking(uint64_t chunk) const;
  void CheckBeginning(const v1::LogSnapshot& snapshot);
  void CheckEnd();
  // Marks slices of `attempt` as needed, for chunks that do not have the step yet.
  void Need(uint64_t attempt, int64_t step);
  void CheckCovered(const v1::PreparedRecord& prepared);
  void CheckRestorable(const v1::PreparedRecord& prepared);
  void Find(Harm harm, std::string what, std::string expected, std::string found, uint64_t offset = 0) {
    findings_->push_back({harm, log_.job, std::move(what), path_, offset, std::move(expected), std::move(found),
                          harm == Harm::kNone ? "nothing" : kGiveUp});
  }

  const ReadLog& log_;
  const DurableStates& durable_;
  const std::string path_;
  std::vector<Finding>* const findings_;
  const std::string server_id_;
  uint64_t lsn_ = 0;
  StepMachine machine_;
  storage::LoggedRecords records_;
  LogWalk walk_;
  bool judges_chunks_ = true;
  std::map<uint64_t, int64_t> versions_;  // of this server's chunks
  LogReplay out_;
};

LogReplay Replayer::Run() {
  const absl::Status status = walk_.Run(this);
  if (status.ok()) {
    CheckEnd();
  } else {
    Find(Harm::kJobRefused, absl::StrCat("record ", walk_.lsn(), " cannot be replayed"),
         "a record that follows from those before it", std::string(status.message()));
  }
  return std::move(out_);
}

absl::Status Replayer::VisitOpen(const v1::OpenRequest&, const StepRecord& record) {
  BALLAST_RETURN_IF_ERROR(machine_.Replay(record));
  TakePlan();
  return absl::OkStatus();
}

absl::Status Replayer::VisitSnapshot(const v1::LogSnapshot& snapshot, bool begins, const StepRecord& record) {
  BALLAST_RETURN_IF_ERROR(machine_.Replay(record));
  if (!begins) return absl::OkStatus();
  TakePlan();
  CheckBeginning(snapshot);
  return absl::OkStatus();
}

absl::Status Replayer::VisitDecision(const v1::Decision& decision, const StepRecord& record) {
  Need(decision.attempt(), decision.step());
  return machine_.Replay(record);
}

void Replayer::TakePlan() {
  const model::EpochPlan& plan = *machine_.plan();
  const absl::StatusOr<uint32_t> member = plan.FindMember(server_id_);
  if (!member.ok()) return;  // the machine has refused it
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (!plan.Has(*member, chunk.index) || versions_.contains(chunk.index)) continue;
    const auto durable = durable_.versions.find(chunk.index);
    versions_[chunk.index] = durable == durable_.versions.end() ? -1 : durable->second;
  }
  std::erase_if(versions_, [&](const auto& entry) { return !plan.Has(*member, entry.first); });
}

Harm Replayer::HarmOfLacking(uint64_t chunk) const {
  return machine_.HasOtherHolder(chunk) ? Harm::kRepaired : Harm::kJobRefused;
}

bool Replayer::Lacks(uint64_t chunk) const {
  const auto lacks = machine_.unfilled().find(chunk);
  if (lacks == machine_.unfilled().end()) return false;
  const auto durable = durable_.versions.find(chunk);
  return durable == durable_.versions.end() || durable->second < lacks->second;
}

absl::Status Replayer::VisitSlice(const LoggedSlice& logged, const StepRecord& record) {
  BALLAST_RETURN_IF_ERROR(machine_.Replay(record));
  const v1::PushRequest& header = logged.header;
  const model::EpochPlan& plan = *machine_.plan();
  const auto slice = plan.FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
  if (!slice.has_value() || !versions_.contains(plan.slices()[*slice].chunk)) {
    return absl::DataLossError(absl::StrCat("a slice of step ", header.step(), " of elements ", header.begin(), " to ",
                                            header.end(), " of unit ", header.unit(), ", which are not this server's"));
  }
  out_.payloads.push_back({logged.payload, header.step(), plan.slices()[*slice].chunk, false});
  return absl::OkStatus();
}

void Replayer::Need(uint64_t attempt, int64_t step) {
  for (const LoggedSlice* slice : walk_.Slices(attempt, step)) {
    LogReplay::Payload& payload = out_.payloads[slice->index];
    const auto held = versions_.find(payload.chunk);
    if (held != versions_.end() && held->second < step && !Lacks(payload.chunk)) payload.needed = true;
  }
}

void Replayer::CheckCovered(const v1::PreparedRecord& prepared) {
  if (!judges_chunks_) return;
  if (prepared.header().kind() == v1::STEP_KIND_RESTORE) return CheckRestorable(prepared);
  const model::EpochPlan& plan = *machine_.plan();
  std::set<std::tuple<int, uint32_t, uint64_t>> held;
  for (const LoggedSlice* slice : walk_.Slices(prepared.attempt(), prepared.step())) {
    held.emplace(slice->header.kind(), slice->header.unit(), slice->header.begin());
  }
  for (const auto& [chunk, version] : versions_) {
    if (version >= prepared.step() || Lacks(chunk)) continue;
    for (const uint32_t index : plan.slices_of_chunk(chunk)) {
      const model::Slice& slice = plan.slices()[index];
      for (const auto kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) {
        const bool gradient = kind == v1::SLICE_KIND_GRADIENT;
        const std::string& presence =
            gradient ? prepared.header().gradient_presence() : prepared.header().value_presence();
        if (!plan.Touches(slice, presence) || held.contains({kind, slice.unit, slice.range.begin})) continue;
        Find(
            HarmOfLacking(chunk),
            absl::StrCat("a slice of step ", prepared.step(), " that chunk ", chunk, " at version ", version, " needs"),
            absl::StrCat(gradient ? "gradient" : "values", " of elements ", slice.range.begin, " to ", slice.range.end,
                         " of unit ", slice.unit),
            "none in the log");
        return;  // one finding stands for all
      }
    }
  }
}

void Replayer::CheckRestorable(const v1::PreparedRecord& prepared) {
  const int64_t pin = prepared.header().restored_version();
  for (const auto& [chunk, version] : versions_) {
    if (version >= prepared.step() || durable_.pinned.contains(pin)) continue;
    Find(Harm::kJobRefused,
         absl::StrCat("the pin that step ", prepared.step(), " restores chunk ", chunk, " at version ", version, " to"),
         absl::StrCat("version ", pin, ", pinned"), "none in the catalog");
    return;  // one finding stands for all
  }
}

void Replayer::Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  if (!decision.verdict().skip()) CheckCovered(prepared);
  for (auto& [chunk, version] : versions_) version = std::max(version, decision.step());
}

// A cut log has no steps up to `first`: the chunks' states must contain their changes.
void Replayer::CheckBeginning(const v1::LogSnapshot& snapshot) {
  out_.first = snapshot.committed();
  const auto changed = DecodeChanged(snapshot, versions_.size());
  if (!changed.ok()) {
    Find(Harm::kJobRefused, "the log's beginning is not that of the chunks of this server",
         absl::StrCat(versions_.size(), " chunks"), std::string(changed.status().message()));
    return;
  }
  auto last_change = changed->begin();
  for (auto& [index, version] : versions_) {
    const int64_t durable = std::exchange(version, std::max(version, out_.first)), needed = *last_change++;
    if (durable >= needed || !judges_chunks_ || machine_.unfilled().contains(index)) continue;
    Find(HarmOfLacking(index),
         durable < 0 ? absl::StrCat("chunk ", index, " has no durable version and the log does not reach back to 0")
                     : absl::StrCat("the log does not reach back to version ", durable, " of chunk ", index),
         absl::StrCat("version ", needed, " or newer, or a log from step ", durable + 1, " on"),
         absl::StrCat("a log from step ", out_.first + 1, " on"));
  }
}

void Replayer::CheckEnd() {
  const v1::GetJobResponse end = machine_.Describe();
  out_.committed = end.committed();
  out_.prepared = end.has_prepared();
  // Slices of other attempts are pushed again if they cannot be read.
  if (end.has_prepared()) Need(end.prepared().attempt(), out_.committed + 1);
  if (end.has_prepared()) CheckCovered(end.prepared());
  const bool has_table = machine_.plan() != nullptr && machine_.plan()->open().has_table();
  for (const auto& [chunk, version] : durable_.versions) {
    if (!versions_.contains(chunk)) {
      if (has_table) continue;  // it was given up, and goes at the next start
      Find(Harm::kJobRefused,
           absl::StrCat("according to the log, the catalog's chunk ", chunk, " does not belong to this server"),
           "a chunk that an Open in the log gives to this server", absl::StrCat("version ", version));
    } else if (version > out_.committed + (out_.prepared ? 1 : 0)) {
      Find(Harm::kJobRefused, absl::StrCat("chunk ", chunk, " is newer than its job's log"),
           absl::StrCat("at most version ", out_.committed), absl::StrCat("version ", version));
    }
  }
}

}  // namespace

absl::StatusOr<ReadLog> ReadJobLog(std::shared_ptr<const storage::BlockFile> file, const std::string& job) {
  ReadLog log;
  log.job = job;
  log.file = std::move(file);
  BALLAST_ASSIGN_OR_RETURN(log.scanned, storage::ScanLog(*log.file));
  if (log.scanned.name != job) {
    return model::Error(
        absl::StatusCode::kDataLoss, model::kIo,
        absl::StrCat(log.file->path(), " is the log of job '", log.scanned.name, "', not of '", job, "'"));
  }
  Summary summary(&log);
  storage::LoggedRecords records(log.file.get(), &log.scanned);
  BALLAST_RETURN_IF_ERROR(LogWalk(&records, log.scanned.live.size()).Run(&summary));
  return log;
}

std::set<uint64_t> ChunksInLog(const ReadLog& log) {
  std::set<uint64_t> chunks;
  if (!log.open.has_value()) return chunks;
  const auto plan = model::EpochPlan::Make(*log.open);
  if (!plan.ok()) return chunks;
  for (const auto& [unit, begin, end] : log.pushed) {
    // Pieces, not slices: an older epoch may have been cut otherwise.
    const auto pieces = plan->layout().Cut(unit, {begin, end});
    if (!pieces.ok()) continue;
    for (const model::Layout::Piece& piece : *pieces) chunks.insert(piece.chunk);
  }
  return chunks;
}

absl::StatusOr<std::string> FindOwner(const v1::OpenRequest& open, const std::set<uint64_t>& chunks) {
  BALLAST_ASSIGN_OR_RETURN(const model::EpochPlan plan, model::EpochPlan::Make(open));
  std::vector<std::string> fitting;
  for (int member = 0; member < plan.members().size(); ++member) {
    const bool all = std::all_of(chunks.begin(), chunks.end(), [&](uint64_t chunk) {
      return chunk < plan.layout().chunks().size() && plan.Has(static_cast<uint32_t>(member), chunk);
    });
    if (all) fitting.push_back(plan.members()[member].server_id());
  }
  if (fitting.size() == 1) return fitting[0];
  return absl::NotFoundError(absl::StrCat(fitting.size(), " of the ", plan.members().size(), " members of job '",
                                          open.spec().name(), "' may be this server, by the chunks that are here"));
}

LogReplay Replay(const ReadLog& log, const std::string& server_id, const DurableStates& durable,
                 const std::string& path, std::vector<Finding>* findings) {
  return Replayer(log, server_id, durable, path, findings).Run();
}

LogReplay ReplayAlone(const ReadLog& log, const std::string& server_id, std::vector<Finding>* findings) {
  const DurableStates none;
  Replayer replayer(log, server_id, none, "", findings);
  replayer.LeaveChunks();
  return replayer.Run();
}

void CheckPayloads(const storage::BlockFile& file, const std::string& job, const LogReplay& replay, Progress* progress,
                   ScrubReport* report) {
  uint64_t total = 0, done = 0, largest = storage::kIoAlignment;
  for (const LogReplay::Payload& payload : replay.payloads) {
    if (!payload.needed) continue;
    total += payload.place.bytes;
    largest = std::max(largest, storage::AlignUp(payload.place.bytes));
  }
  auto buffer = storage::Arena::Map(largest);
  for (const LogReplay::Payload& payload : replay.payloads) {
    if (!payload.needed) {
      ++report->counts.payloads_not_needed;
      continue;
    }
    std::optional<uint64_t> rebuilt;
    const absl::Status read =
        buffer.ok()
            ? storage::ReadPayload(file, payload.place, buffer->bytes().subspan(0, payload.place.bytes), &rebuilt)
            : buffer.status();
    ++report->counts.payloads_needed;
    report->counts.payload_bytes += payload.place.bytes;
    progress->At(absl::StrCat("payloads of ", file.path()), done += payload.place.bytes, total);
    if (rebuilt.has_value()) {
      report->findings.push_back(
          {.harm = Harm::kRepaired,
           .job = job,
           .what = absl::StrCat("a block of the slice of step ", payload.step, " for chunk ", payload.chunk),
           .file = file.path(),
           .offset = *rebuilt,
           .expected = "what was written",
           .found = "other bytes, or none",
           .advice = "nothing for now, the block is rebuilt from the slice's parity; check the disk"});
    }
    if (read.ok()) continue;
    report->findings.push_back(
        {.harm = Harm::kJobRefused,
         .job = job,
         .what = absl::StrCat("the slice of step ", payload.step, " for chunk ", payload.chunk, ", which is needed"),
         .file = file.path(),
         .offset = payload.place.offset,
         .expected = absl::StrCat(payload.place.bytes, " bytes of the CRC32C in the record"),
         .found = std::string(read.message()),
         .advice = kGiveUp});
  }
}

}  // namespace ballast::services
