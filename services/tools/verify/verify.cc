#include "ballast/services/tools/verify/verify.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {
namespace {

constexpr char kLogAdvice[] =
    "check the disk. You may copy all of the data directory, as far as the disk can be read, to another disk, and "
    "start the server there. A server that refuses the job restores none of its versions; otherwise drop it with "
    "`ballastctl drop`";

class Scrub {
 public:
  Scrub(DataDirectory* directory, const SayProgress& say) : directory_(directory), progress_(say) {
    report_.directory = directory->path();
  }
  absl::StatusOr<ScrubReport> Run();

 private:
  void CheckJob(const std::string& name, const CatalogJob& job);
  void CheckLog(const std::string& name, const CatalogJob& job);
  void CompareWithLog(const std::string& name, const JobEntry& entry, const ReadLog& log, int64_t committed,
                      bool prepared);
  void CheckChunks(const std::string& name, const JobEntry& entry);
  // Whether the job has a table by which another server holds the chunk.
  bool IsElsewhere(const model::EpochPlan& plan, uint64_t chunk) const;
  void CheckOrphan(const std::string& name);
  void CheckLives(const std::string& name, const JobEntry& entry, uint64_t expected, absl::string_view whose);
  void CheckExtents();
  void MissDevice(storage::NvmeFileId id, const std::vector<NamedExtent>& extents);
  Finding& Add(Harm harm, const std::string& job, std::string what, std::string file, std::string expected,
               std::string found, std::string advice) {
    return report_.findings.emplace_back(Finding{harm, job, std::move(what), std::move(file), 0, std::move(expected),
                                                 std::move(found), std::move(advice)});
  }

  DataDirectory* const directory_;
  Progress progress_;
  std::string server_id_;
  std::vector<NamedExtent> extents_;
  ScrubReport report_;
};

absl::StatusOr<ScrubReport> Scrub::Run() {
  std::map<std::string, CatalogJob> jobs;
  const std::string catalog_path = directory_->path() + "/catalog";
  if (directory_->catalog() == nullptr) {
    // Logs and extents cannot be judged without the catalog; a rebuild judges them.
    const absl::Status& error = directory_->catalog_error();
    BALLAST_ASSIGN_OR_RETURN(const TierFiles tier, directory_->OpenTierFiles());
    uint64_t tier_bytes = 0;
    for (const auto& [id, file] : tier) tier_bytes += file.bytes;
    const bool used = tier_bytes > 0 || !directory_->LogNames().empty();
    if (absl::IsNotFound(error) && !used) return std::move(report_);  // never
    const bool unnoticed = directory_->begins_anew() && !used;  // its files alone look like those of a first start
    Add(unnoticed ? Harm::kUnnoticed : Harm::kServerRefused, "", "the catalog cannot be opened", catalog_path,
        "a catalog", std::string(error.message()), kRebuildAdvice);
    return std::move(report_);
  } else {
    BALLAST_ASSIGN_OR_RETURN(jobs, directory_->ReadJobs(&report_.findings));
    const auto id = directory_->server_id();
    if (id.ok()) server_id_ = *id;
  }
  for (const auto& [name, job] : jobs) CheckJob(name, job);
  for (const std::string& name : directory_->LogNames()) {
    const auto job = jobs.find(name);
    if (job == jobs.end() || !job->second.durable()) CheckOrphan(name);
  }
  CheckExtents();
  return std::move(report_);
}

void Scrub::CheckJob(const std::string& name, const CatalogJob& job) {
  ++report_.counts.jobs;
  if (job.entry.every_k()) {
    // No log: state outside the pins is unknown after a restart, whatever the disk holds.
    ++report_.counts.durable_jobs;
    for (const v1::PinnedVersion& pin : job.entry.pins) {
      const uint64_t life = LifeOf(pin);
      if (life == 0) continue;
      CheckLives(name, job.entry, life, absl::StrCat("the catalog's pin of version ", pin.version()));
      break;
    }
    return CheckChunks(name, job.entry);
  }
  if (!job.durable()) {
    if (job.entry.chunks.empty()) return;
    Add(Harm::kUnnoticed, name, "the catalog has chunks of a job without its Open", directory_->path() + "/catalog",
        "an entry 'open'", absl::StrCat(job.entry.chunks.size(), " chunks and no Open: the job would seem to be empty"),
        kRebuildAdvice);
    return;
  }
  ++report_.counts.durable_jobs;
  CheckChunks(name, job.entry);
  CheckLog(name, job);
}

bool Scrub::IsElsewhere(const model::EpochPlan& plan, uint64_t chunk) const {
  if (!plan.open().has_table()) return false;
  const absl::Span<const uint32_t> holders = plan.holders_of(chunk);
  return std::any_of(holders.begin(), holders.end(), [&](uint32_t holder) {
    return plan.members()[static_cast<int>(holder)].server_id() != server_id_;
  });
}

void Scrub::CheckChunks(const std::string& name, const JobEntry& entry) {
  const auto optimizer = model::OptimizerOf(entry.open->spec());
  const auto plan = model::EpochPlan::Make(*entry.open);
  if (!optimizer.ok() || !plan.ok()) {
    Add(Harm::kJobRefused, name, "the Open in the catalog", directory_->path() + "/catalog", "a job of this version",
        std::string((optimizer.ok() ? plan.status() : optimizer.status()).message()), kRebuildAdvice);
    return;
  }
  const auto& chunks = plan->layout().chunks();
  const storage::StateLayout trained(*optimizer);
  const auto layout_of = [&](const storage::DurableChunk& chunk) {
    return LayoutOfChunk(trained, plan->layout(), chunk);
  };
  for (const storage::DurableChunk& chunk : entry.chunks) {
    const storage::StateLayout layout = layout_of(chunk);
    // The catalog's Open may lag behind the log's Open, whose chunks continue these.
    const bool known = chunk.id < chunks.size();
    const uint64_t elements = known ? chunks[chunk.id].range.size() : chunk.elements;
    if (chunk.elements != elements || elements > model::kChunkElementsMax || chunk.version < 0 ||
        chunk.bytes != layout.StateBytes(elements)) {
      Add(Harm::kJobRefused, name, absl::StrCat("the catalog's entry of chunk ", chunk.id),
          directory_->path() + "/catalog",
          absl::StrCat(elements, " elements in ", layout.StateBytes(elements), " bytes, version 0 or higher"),
          absl::StrCat(chunk.elements, " elements in ", chunk.bytes, " bytes, version ", chunk.version),
          kRebuildAdvice);
      continue;
    }
    extents_.push_back({name, layout, chunk});
    extents_.back().copied = known && IsElsewhere(*plan, chunk.id);
  }
  for (NamedExtent& pinned : PinnedExtents(name, layout_of, entry.chunks, entry.pins)) {
    const storage::DurableChunk& chunk = pinned.chunk;
    const storage::StateLayout& layout = pinned.layout;
    if (chunk.elements <= model::kChunkElementsMax && chunk.bytes == layout.StateBytes(chunk.elements)) {
      extents_.push_back(pinned);
      continue;
    }
    Add(Harm::kJobRefused, name, absl::StrCat("the catalog's entry of version ", *pinned.pin, ", which is pinned"),
        directory_->path() + "/catalog",
        absl::StrCat("chunk ", chunk.id, " in ", layout.StateBytes(chunk.elements), " bytes"),
        absl::StrCat(chunk.bytes, " bytes"),
        entry.every_k() ? "put a copy of the catalog back, or drop the job" : kRebuildAdvice);
  }
}

void Scrub::CheckLog(const std::string& name, const CatalogJob& job) {
  const std::string path = directory_->LogPath(name);
  const JobEntry& entry = job.entry;
  const auto refuse = [&](const absl::Status& status) {
    Add(Harm::kJobRefused, name, "the log cannot be read", path, "the log of the job", std::string(status.message()),
        kLogAdvice);
  };
  auto file = directory_->OpenFile(path);
  if (!file.ok()) return refuse(file.status());
  absl::StatusOr<ReadLog> log = absl::NotFoundError(absl::StrCat("there is no ", path));
  if (*file != nullptr) log = ReadJobLog(*std::move(file), name);
  // The log was still being made: no step was ever prepared.
  if (absl::IsNotFound(log.status()) && entry.chunks.empty() && entry.pins.empty() && !entry.life.has_value()) return;
  if (!log.ok()) return refuse(log.status());
  report_.counts.log_records += log->scanned.record_count;
  report_.counts.torn_batches += log->scanned.torn_batches;
  if (log->scanned.repaired_blocks > 0) {
    Add(Harm::kRepaired, name, absl::StrCat(log->scanned.repaired_blocks, " blocks of the log are damaged"), path,
        "both copies of small records whole", "one of the two",
        "nothing for now, they are read from their copies; check the disk");
  }
  std::string id = server_id_;
  if (id.empty()) {
    std::set<uint64_t> chunks = ChunksInLog(*log);
    for (const storage::DurableChunk& chunk : entry.chunks) chunks.insert(chunk.id);
    const auto owner = FindOwner(log->open.value_or(*entry.open), chunks);
    Add(Harm::kJobRefused, name, "the catalog has no 'server_id'", directory_->path() + "/catalog",
        owner.ok() ? *owner : "one of the job's members", "none: a server would take a new one", kRebuildAdvice);
    if (!owner.ok()) return;
    id = *owner;
  }
  DurableStates durable;
  for (const storage::DurableChunk& chunk : entry.chunks) durable.versions[chunk.id] = chunk.version;
  for (const v1::PinnedVersion& pin : entry.pins) durable.pinned.insert(pin.version());
  const LogReplay replay = Replay(*log, id, durable, path, &report_.findings);
  CompareWithLog(name, entry, *log, replay.committed, replay.prepared);
  CheckPayloads(*log->file, name, replay, &progress_, &report_);
}

void Scrub::CompareWithLog(const std::string& name, const JobEntry& entry, const ReadLog& log, int64_t committed,
                           bool prepared) {
  const std::string file = directory_->path() + "/catalog";
  // A promise is answered, and its Open may come, once both catalog and log have the promise.
  if (log.open.has_value() && (!entry.promised.has_value() || model::Compare(log.open->epoch(), *entry.promised) > 0)) {
    Add(entry.promised.has_value() ? Harm::kUnnoticed : Harm::kRepaired, name, "the catalog's promise is too old", file,
        absl::StrCat("epoch ", log.open->epoch().counter(), " or later, which the log opens"),
        entry.promised.has_value() ? absl::StrCat("epoch ", entry.promised->counter()) : "none", kRebuildAdvice);
  }
  if (log.open.has_value() && log.open->spec().durability() != v1::DURABILITY_STEP) {
    Add(Harm::kJobRefused, name, "the log opens a job of another durability", log.job, "DURABILITY_STEP",
        v1::Durability_Name(log.open->spec().durability()), kLogAdvice);
  }
  CheckLives(name, entry, log.scanned.life, "its log");
  if (entry.committed > committed + (prepared ? 1 : 0)) {
    Add(Harm::kJobRefused, name, "the log ends before the step that the catalog knows as applied",
        directory_->LogPath(name), absl::StrCat("step ", entry.committed), absl::StrCat("step ", committed),
        "was the log replaced by an older copy? Bring the newer one back, or drop the job");
  }
}

// All entries of a job must be of the life found in `whose`.
void Scrub::CheckLives(const std::string& name, const JobEntry& entry, uint64_t expected, absl::string_view whose) {
  const std::string file = directory_->path() + "/catalog";
  const auto check = [&](absl::string_view what, uint64_t life) {
    if (life == expected) return;
    Add(Harm::kJobRefused, name, absl::StrCat(what, " is of another life of the job than ", whose), file,
        ShowLife(expected), ShowLife(life),
        "the job was dropped and made again, and one of the two is an older copy: bring back what belongs together");
  };
  if (entry.life.has_value()) check("the catalog's 'log'", *entry.life);
  for (const storage::DurableChunk& chunk : entry.chunks) {
    check(absl::StrCat("the catalog's chunk ", chunk.id), chunk.life);
  }
  for (const v1::PinnedVersion& pin : entry.pins) {
    if (pin.life() != 0) check(absl::StrCat("the catalog's pin of version ", pin.version()), pin.life());
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      check(absl::StrCat("chunk ", chunk.id, " of the catalog's pin of version ", pin.version()), chunk.life);
    }
  }
}

void Scrub::CheckOrphan(const std::string& name) {
  const std::string path = directory_->LogPath(name);
  auto file = directory_->OpenFile(path);
  if (!file.ok() || *file == nullptr) return;
  const auto log = ReadJobLog(*std::move(file), name);
  // The log is still being made, or nothing was ever prepared: an Open makes it anew.
  if (absl::IsNotFound(log.status())) return;
  if (log.ok() && !log->steps.any()) return;
  Add(Harm::kJobRefused, name, "the catalog does not know the job of this log", path, "an entry 'open' in the catalog",
      log.ok() ? absl::StrCat("a log up to step ", log->steps.committed) : std::string(log.status().message()),
      absl::StrCat(kRebuildAdvice, "; or remove the file, if you do not need the job"));
}

void Scrub::CheckExtents() {
  if (extents_.empty()) return;
  const auto files = directory_->OpenTierFiles();
  std::map<storage::NvmeFileId, std::vector<NamedExtent>> by_file;
  for (const NamedExtent& extent : extents_) by_file[extent.chunk.file].push_back(extent);
  for (const auto& [id, extents] : by_file) {
    const bool there = files.ok() && files->contains(id);
    if (!there && id != 0) {
      MissDevice(id, extents);
      continue;
    }
    const uint64_t file_bytes = there ? files->at(id).bytes : 0;
    CheckPlaces(extents, there ? files->at(id).file->path() : directory_->TierPath(id), file_bytes, &report_);
    for (const NamedExtent& extent : extents) {
      const storage::DurableChunk& chunk = extent.chunk;
      if ((chunk.offset | chunk.bytes) % storage::kIoAlignment != 0 || chunk.offset > file_bytes ||
          chunk.bytes > file_bytes - chunk.offset) {
        continue;  // said already
      }
      CheckExtent(*files->at(id).file, extent, &progress_, &report_);
    }
  }
}

// A finding for each job with state on a device that is not there.
void Scrub::MissDevice(storage::NvmeFileId id, const std::vector<NamedExtent>& extents) {
  std::map<std::string, std::pair<uint64_t, uint64_t>> by_job;  // extents and bytes
  for (const NamedExtent& extent : extents) {
    auto& [count, bytes] = by_job[extent.job];
    ++count;
    bytes += extent.chunk.bytes;
  }
  for (const auto& [job, held] : by_job) {
    Add(Harm::kJobRefused, job, "an nvme device is not there", directory_->TierPath(id),
        absl::StrCat("a file with id ", storage::ShowFileId(id), " and ", held.first, " extents of the job, ",
                     held.second, " bytes"),
        "no such file",
        "bring the disk back, or name its directory with --nvme; drop the job with `ballastctl drop` if the disk is "
        "lost");
  }
}

}  // namespace

absl::StatusOr<ScrubReport> Verify(DataDirectory* directory, const SayProgress& say) {
  return Scrub(directory, say).Run();
}

absl::StatusOr<ScrubReport> Verify(const std::string& directory, const SayProgress& say,
                                   const std::vector<std::string>& nvme) {
  BALLAST_ASSIGN_OR_RETURN(const auto opened,
                           DataDirectory::Open(directory, storage::Catalog::Access::kReadOnly, nvme));
  return Verify(opened.get(), say);
}

}  // namespace ballast::services
