// Makes the catalog's job entries from the other files. Labels tell the owner of each state. The log tells up to where
// a state may be, and what must follow on the state. Where labels and log leave room for doubt, nothing is written.
#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/tools/verify/newest_versions.h"
#include "ballast/services/tools/verify/verify.h"

namespace ballast::services {
namespace {

// A job whose entries are to be made anew.
struct Candidate {
  ReadLog log;
  JobEntry old;                 // what the catalog could tell
  storage::StateLayout layout;  // of chunks that are not frozen
  std::vector<FoundLabel> labels;
  std::map<uint64_t, storage::DurableChunk> chosen;  // by chunk id
  int64_t committed = -1;
};

class Rebuilding {
 public:
  Rebuilding(DataDirectory* directory, const SayProgress& say, RebuildResult* result)
      : directory_(directory), say_(say), progress_(say), result_(*result) {}
  absl::Status Run();

 private:
  absl::Status ReadCandidates();
  absl::Status ReadLabels();
  void RefuseMissingDevices();
  void SettleServerId();
  void Choose(const std::string& name, Candidate* candidate);
  bool CheckLives(const std::string& name, const Candidate& candidate);
  std::optional<int64_t> ReadHistory(const std::string& name, Candidate* candidate);
  void DropStalePins(const std::string& name, Candidate* candidate);
  void CheckFit(const std::string& name, Candidate* candidate);
  void CheckPlacesOfAll();
  absl::Status Write();
  void Refuse(const std::string& job, absl::string_view why) {
    result_.refused.push_back(absl::StrCat("job '", job, "': ", why));
  }

  DataDirectory* const directory_;
  const SayProgress& say_;
  Progress progress_;
  RebuildResult& result_;
  std::map<std::string, CatalogJob> known_;  // jobs of the catalog
  std::map<std::string, Candidate> candidates_;
  TierFiles tier_;
  std::string server_id_;
  bool new_server_id_ = false;
};

absl::Status Rebuilding::Run() {
  BALLAST_ASSIGN_OR_RETURN(result_.before, Verify(directory_, say_));
  result_.after = result_.before;
  if (result_.before.worst() <= Harm::kRepaired) {
    result_.done.push_back("nothing to rebuild: a server recovers from what is there");
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(ReadCandidates());
  BALLAST_RETURN_IF_ERROR(ReadLabels());
  if (!candidates_.empty()) SettleServerId();
  for (auto& [name, candidate] : candidates_) Choose(name, &candidate);
  if (result_.refused.empty()) CheckPlacesOfAll();
  if (candidates_.empty() && result_.refused.empty()) {
    result_.refused.push_back(
        directory_->catalog() != nullptr
            ? "new entries would not help any job: see the findings"
            : "no log names the job of the state there: put a copy of the catalog back, or move log-* "
              "and nvme.tier away if you do not need them");
  }
  if (!result_.refused.empty()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(Write());
  result_.written = true;
  BALLAST_ASSIGN_OR_RETURN(result_.after, Verify(directory_, say_));
  return absl::OkStatus();
}

// Finds jobs with a log that the scrub faulted. The rest of the catalog stays as it is.
absl::Status Rebuilding::ReadCandidates() {
  std::vector<Finding> ignored;
  if (directory_->catalog() != nullptr) {
    BALLAST_ASSIGN_OR_RETURN(known_, directory_->ReadJobs(&ignored));
  }
  std::set<std::string> bad;
  for (const Finding& finding : result_.before.findings) {
    if (finding.harm > Harm::kRepaired) bad.insert(finding.job);
  }
  const bool all = bad.contains("");
  for (const std::string& name : directory_->LogNames()) {
    if (!all && !bad.contains(name)) continue;
    BALLAST_ASSIGN_OR_RETURN(auto file, directory_->OpenFile(directory_->LogPath(name)));
    auto log = ReadJobLog(std::move(file), name);
    if (absl::IsNotFound(log.status())) continue;  // its creation was not finished
    if (!log.ok()) {
      Refuse(name, absl::StrCat("its log cannot be read: ", log.status().message(),
                                ". To give the job up, move the log elsewhere and run again"));
      continue;
    }
    if (!log->open.has_value()) continue;  // never opened
    const auto optimizer = model::OptimizerOf(log->open->spec());
    if (!optimizer.ok()) {
      Refuse(name, optimizer.status().message());
      continue;
    }
    Candidate& candidate = candidates_[name];
    candidate.log = *std::move(log);
    candidate.layout = storage::StateLayout(*optimizer);
    if (const auto known = known_.find(name); known != known_.end()) candidate.old = known->second.entry;
  }
  for (const auto& [name, job] : known_) {
    if (bad.contains(name) && !candidates_.contains(name)) {
      Refuse(name, job.entry.every_k()
                       ? "its durability is every-K, and only the catalog knew its pins; "
                         "drop it with `ballastctl drop` once the server runs"
                       : "it has no log to be rebuilt from; drop it with `ballastctl drop` once the server runs");
    }
  }
  return absl::OkStatus();
}

absl::Status Rebuilding::ReadLabels() {
  BALLAST_ASSIGN_OR_RETURN(tier_, directory_->OpenTierFiles());
  if (candidates_.empty()) return absl::OkStatus();
  std::map<std::string, WantedLabels> wanted;
  for (const auto& [name, candidate] : candidates_) wanted[name] = {candidate.layout, candidate.log.scanned.life};
  uint64_t of_other_lives = 0;
  for (const auto& [id, tier] : tier_) {
    BALLAST_ASSIGN_OR_RETURN(FoundLabels found, FindLabels(*tier.file, id, wanted, &progress_));
    for (auto& [name, labels] : found.of_jobs) {
      std::vector<FoundLabel>& all = candidates_[name].labels;
      all.insert(all.end(), labels.begin(), labels.end());
    }
    of_other_lives += found.of_other_lives;
    if (found.unreadable_blocks > 0) {
      result_.done.push_back(
          absl::StrCat(found.unreadable_blocks, " blocks of ", tier.file->path(), " cannot be read"));
    }
  }
  RefuseMissingDevices();
  if (of_other_lives > 0) {
    result_.done.push_back(absl::StrCat("passed over ", of_other_lives,
                                        " labels of jobs of these names that were dropped, or of other copies"));
  }
  return absl::OkStatus();
}

// A rebuild would forget what lies there.
void Rebuilding::RefuseMissingDevices() {
  for (const auto& [name, candidate] : candidates_) {
    for (const storage::DurableChunk& chunk : candidate.old.ChunksAndPinned()) {
      if (chunk.file == 0 || tier_.contains(chunk.file)) continue;
      Refuse(name, absl::StrCat("state of it is in ", directory_->TierPath(chunk.file), ", which is not there: bring ",
                                "the disk back, or name its directory with --nvme; drop the job if the disk is lost"));
      break;
    }
  }
}

void Rebuilding::SettleServerId() {
  if (const auto id = directory_->server_id(); id.ok()) {
    server_id_ = *id;
    return;
  }
  new_server_id_ = true;
  for (const auto& [name, candidate] : candidates_) {
    std::set<uint64_t> chunks = ChunksInLog(candidate.log);
    for (const FoundLabel& label : candidate.labels) chunks.insert(label.chunk.id);
    const auto owner = FindOwner(*candidate.log.open, chunks);
    if (!owner.ok()) continue;
    if (server_id_.empty()) server_id_ = *owner;
    if (server_id_ != *owner) {
      Refuse(name, absl::StrCat("it belongs to server '", *owner, "', others here to '", server_id_, "'"));
    }
  }
  if (server_id_.empty()) Refuse(candidates_.begin()->first, "no file tells which member of the job this server is");
}

void Rebuilding::Choose(const std::string& name, Candidate* candidate) {
  if (server_id_.empty()) return;
  if (!CheckLives(name, *candidate)) return;
  const std::optional<int64_t> version_max = ReadHistory(name, candidate);
  if (!version_max.has_value()) return;
  auto chosen = NewestVersions(candidate->labels, candidate->old.chunks, candidate->layout, tier_, *version_max);
  if (!chosen.ok()) return Refuse(name, chosen.status().message());
  candidate->chosen = *std::move(chosen);
  DropStalePins(name, candidate);
  CheckFit(name, candidate);
}

// False if the catalog's entries are of another life than the log: nobody can tell from here which of the two lives is
// the wanted job.
bool Rebuilding::CheckLives(const std::string& name, const Candidate& candidate) {
  const uint64_t life = candidate.log.scanned.life;
  const auto check_life = [&](absl::string_view what, uint64_t other) {
    if (other == life) return true;
    Refuse(name, absl::StrCat("its log is of life ", ShowLife(life), ", ", what, " of life ", ShowLife(other),
                              ": the job was dropped and made again, and one of the two is an older copy"));
    return false;
  };
  const JobEntry& old = candidate.old;
  if (old.life.has_value() && !check_life("the catalog's 'log'", *old.life)) return false;
  for (const storage::DurableChunk& chunk : old.chunks) {
    if (!check_life(absl::StrCat("the catalog's chunk ", chunk.id), chunk.life)) return false;
  }
  for (const v1::PinnedVersion& pin : old.pins) {
    const std::string whose = absl::StrCat("the catalog's pin of version ", pin.version());
    if (pin.life() != 0 && !check_life(whose, pin.life())) return false;
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      if (!check_life(whose, chunk.life)) return false;
    }
  }
  return true;
}

// Replays the log, which tells the committed step. Returns the highest version that a chunk may have; none if the log
// is bad or too old.
std::optional<int64_t> Rebuilding::ReadHistory(const std::string& name, Candidate* candidate) {
  std::vector<Finding> faults;
  const LogReplay bare = ReplayAlone(candidate->log, server_id_, &faults);
  for (const Finding& fault : faults) {
    if (fault.harm != Harm::kJobRefused) continue;
    Refuse(name, absl::StrCat("its log: ", fault.what, ": ", fault.found));
    return std::nullopt;
  }
  candidate->committed = bare.committed;
  const int64_t version_max = bare.committed + (bare.prepared ? 1 : 0);
  if (candidate->old.committed <= version_max) return version_max;
  Refuse(name, absl::StrCat("the catalog says that step ", candidate->old.committed,
                            " was applied, and its log ends at step ", bare.committed,
                            ": the log is an older copy, or its end is damaged"));
  return std::nullopt;
}

// A pin in an older copy of the catalog may have been unpinned since, and its extents be others' now.
void Rebuilding::DropStalePins(const std::string& name, Candidate* candidate) {
  std::set<std::string> labelled;
  for (const FoundLabel& label : candidate->labels) labelled.insert(label.chunk.Encode());
  const auto holds = [&](const storage::DurableChunk& chunk) {
    return labelled.contains(chunk.Encode()) &&
           std::none_of(candidate->chosen.begin(), candidate->chosen.end(), [&](const auto& entry) {
             const storage::DurableChunk& chosen = entry.second;
             return chosen.file == chunk.file && chosen.offset < chunk.offset + chunk.bytes &&
                    chunk.offset < chosen.offset + chosen.bytes && chosen.Encode() != chunk.Encode();
           });
  };
  std::erase_if(candidate->old.pins, [&](const v1::PinnedVersion& pin) {
    const std::vector<storage::DurableChunk> chunks = PinnedChunks(pin);
    if (std::all_of(chunks.begin(), chunks.end(), holds)) return false;
    result_.done.push_back(absl::StrCat("job '", name, "': forgot the pin of version ", pin.version(),
                                        ", whose states are not on the disk any more"));
    return true;
  });
  for (const std::string& what : candidate->old.unreadable) {
    if (!absl::StartsWith(what, kCatalogPin) && !absl::StartsWith(what, kCatalogWanted)) continue;
    result_.done.push_back(absl::StrCat("job '", name, "': forgot '", what, "', which cannot be read"));
  }
}

// Do the log and the chosen versions make one history?
void Rebuilding::CheckFit(const std::string& name, Candidate* candidate) {
  DurableStates durable;
  for (const auto& [id, chunk] : candidate->chosen) durable.versions[id] = chunk.version;
  for (const v1::PinnedVersion& pin : candidate->old.pins) durable.pinned.insert(pin.version());
  ScrubReport fit;
  const std::string path = directory_->LogPath(name);
  const LogReplay replay = Replay(candidate->log, server_id_, durable, path, &fit.findings);
  const auto file = directory_->OpenFile(path);
  if (!file.ok() || *file == nullptr) return Refuse(name, "its log is gone");
  CheckPayloads(**file, name, replay, &progress_, &fit);
  for (const Finding& finding : fit.findings) {
    if (finding.harm <= Harm::kRepaired) continue;
    Refuse(name, absl::StrCat("log and extents do not fit together: ", finding.what, "; expected ", finding.expected,
                              ", found ", finding.found));
  }
}

void Rebuilding::CheckPlacesOfAll() {
  std::vector<NamedExtent> extents;
  const auto any = [](const storage::DurableChunk&) { return storage::StateLayout(); };  // places have none
  for (const auto& [name, candidate] : candidates_) {
    std::vector<storage::DurableChunk> chosen;
    for (const auto& [id, chunk] : candidate.chosen) {
      extents.push_back({name, any(chunk), chunk});
      chosen.push_back(chunk);
    }
    for (NamedExtent& pinned : PinnedExtents(name, any, chosen, candidate.old.pins)) {
      extents.push_back(std::move(pinned));
    }
  }
  for (const auto& [name, job] : known_) {
    if (candidates_.contains(name)) continue;
    for (const storage::DurableChunk& chunk : job.entry.chunks) extents.push_back({name, any(chunk), chunk});
    for (NamedExtent& pinned : PinnedExtents(name, any, job.entry.chunks, job.entry.pins)) {
      extents.push_back(std::move(pinned));
    }
  }
  std::map<storage::NvmeFileId, std::vector<NamedExtent>> by_file;
  for (NamedExtent& extent : extents) by_file[extent.chunk.file].push_back(std::move(extent));
  ScrubReport places;
  for (const auto& [id, of_file] : by_file) {
    const auto tier = tier_.find(id);
    if (tier == tier_.end() && id != 0) continue;  // a device that is not there, which the scrub said
    CheckPlaces(of_file, directory_->TierPath(id), tier == tier_.end() ? 0 : tier->second.bytes, &places);
  }
  for (const Finding& finding : places.findings) Refuse(finding.job, absl::StrCat(finding.what, ": ", finding.found));
}

absl::Status Rebuilding::Write() {
  if (directory_->catalog() == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(const std::string aside, directory_->BeginCatalog());
    result_.done.push_back(aside.empty() ? "began a new catalog"
                                         : absl::StrCat("moved the catalog to ", aside, " and began a new one"));
    result_.done.push_back(
        "what the old catalog knew of durable pins and of jobs with durability none or every-K is not known any more");
    result_.done.push_back(
        "the directory has a new number: erase the key of each of its jobs in etcd (`etcdctl del "
        "/PREFIX/jobs/NAME`) while all servers of the job run; the next start of the job makes a new one");
  }
  std::vector<std::pair<std::string, std::string>> pairs;
  if (new_server_id_ && !server_id_.empty()) {
    pairs.emplace_back(kCatalogServerId, server_id_);
    result_.done.push_back(absl::StrCat("set server_id to '", server_id_, "'"));
  }
  std::vector<std::string> prefixes;
  // A server takes a file that its catalog does not know for another server's.
  for (const auto& [id, tier] : tier_) {
    if (id != 0) pairs.emplace_back(NvmeFileKey(id), tier.file->path());
  }
  for (const auto& [name, candidate] : candidates_) {
    const std::string& prefix = prefixes.emplace_back(CatalogPrefix(name));
    v1::Epoch promised = candidate.log.promised.value_or(candidate.log.open->epoch());
    if (candidate.old.promised.has_value() && model::Compare(*candidate.old.promised, promised) > 0) {
      promised = *candidate.old.promised;
    }
    pairs.emplace_back(prefix + kCatalogPromise, promised.SerializeAsString());
    pairs.emplace_back(prefix + kCatalogOpen, candidate.log.open->SerializeAsString());
    pairs.push_back(CommittedPair(name, candidate.committed));
    pairs.push_back(LogPair(name, candidate.log.scanned.life));
    for (const auto& [id, chunk] : candidate.chosen) pairs.push_back(ChunkPair(name, chunk));
    for (const v1::PinnedVersion& pin : candidate.old.pins) pairs.push_back(PinPair(name, pin));
    result_.done.push_back(absl::StrCat("job '", name, "': rebuilt its entries, up to step ", candidate.committed, ", ",
                                        candidate.chosen.size(), " chunks"));
  }
  // At once: pins are nowhere else.
  return directory_->catalog()->Replace(prefixes, pairs);
}

}  // namespace

absl::StatusOr<RebuildResult> Rebuild(const std::string& directory, const SayProgress& say,
                                      const std::vector<std::string>& nvme) {
  RebuildResult result;
  BALLAST_ASSIGN_OR_RETURN(const auto opened,
                           DataDirectory::Open(directory, storage::Catalog::Access::kReadWrite, nvme));
  BALLAST_RETURN_IF_ERROR(Rebuilding(opened.get(), say, &result).Run());
  return result;
}

}  // namespace ballast::services
