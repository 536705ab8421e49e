#include "ballast/services/server/stored_jobs.h"

#include <spdlog/spdlog.h>

#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/journal/data_files.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/storage/log/logged_records.h"

namespace ballast::services {
namespace {

// Reads the steps in the log of job `name`.
absl::StatusOr<LoggedSteps> StepsOf(const std::string& log, absl::string_view name, storage::Disk* disk) {
  BALLAST_ASSIGN_OR_RETURN(const auto file, disk->Open(log, storage::Disk::Mode::kShared));
  BALLAST_ASSIGN_OR_RETURN(const storage::ScannedLog scanned, storage::ScanLog(*file));
  if (scanned.name != name) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("it is the log of job '", scanned.name, "' under another name"));
  }
  LoggedSteps steps;
  storage::LoggedRecords records(file.get(), &scanned);
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(const storage::ReadRecord* const read, records.Next());
    if (read == nullptr) return steps;
    BALLAST_ASSIGN_OR_RETURN(const StepRecord record, DecodeRecord(*read));
    steps.Add(record);
  }
}

// Why the job of `log` is refused: its steps are not in the catalog. OK if the log has none, or if no job can be told
// from it.
absl::Status CheckOrphan(const std::string& log, absl::string_view name, bool has_entry, storage::Disk* disk) {
  const absl::StatusOr<LoggedSteps> steps = StepsOf(log, name, disk);
  // The log is still being made, or was never used: an Open makes it anew.
  if (absl::IsNotFound(steps.status()) || (steps.ok() && !steps->any())) return absl::OkStatus();
  if (!steps.ok() && !has_entry) {
    spdlog::warn("the server ignores {}: {}", log, std::string(steps.status().message()));
    return absl::OkStatus();
  }
  const std::string found =
      steps.ok() ? absl::StrCat("has steps up to ", steps->committed) : std::string(steps.status().message());
  return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                      absl::StrCat("the catalog does not know the job of ", log, ", which ", found,
                                   ". The catalog is an older copy, or damaged. Run `ballastctl "
                                   "verify --rebuild`, or drop the job if you do not need it"));
}

}  // namespace

absl::StatusOr<std::map<std::string, JobEntry>> ReadEntries(const storage::Catalog& catalog) {
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog.List(""));
  std::map<std::string, JobEntry> entries;
  for (const auto& [key, value] : stored) {
    BALLAST_RETURN_IF_ERROR(CheckKnownKey(key));
    if (!absl::StartsWith(key, kCatalogJobs)) continue;
    const std::vector<std::string> parts = absl::StrSplit(key, '/');
    AddToEntry(parts[2], value, &entries[parts[1]]);
  }
  return entries;
}

void FindOrphans(const std::string& directory, storage::Disk* disk, StoredJobs* jobs) {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(directory, error)) {
    const std::string file_name = file.path().filename().string();
    absl::string_view prefixed = file_name;
    if (!absl::ConsumePrefix(&prefixed, kLogPrefix)) continue;
    const std::string name(prefixed);
    const auto entry = jobs->entries.find(name);
    const bool has_entry = entry != jobs->entries.end();
    if (has_entry && entry->second.durable()) continue;
    const absl::Status status = CheckOrphan(file.path().string(), name, has_entry, disk);
    if (status.ok()) continue;
    jobs->orphans.emplace(name, status);
    jobs->entries.try_emplace(name);
  }
}

std::optional<uint64_t> LogBytes(const std::string& directory, const std::string& job) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(LogPath(directory, job), error);
  return error ? std::nullopt : std::optional<uint64_t>(bytes);
}

uint64_t BytesToRecover(const std::string& directory, const std::map<std::string, JobEntry>& entries) {
  uint64_t bytes = 0;
  for (const auto& [name, entry] : entries) {
    for (const storage::DurableChunk& chunk : entry.chunks) bytes += chunk.bytes;
    if (entry.durable()) bytes += LogBytes(directory, name).value_or(0);
  }
  return bytes;
}

}  // namespace ballast::services
