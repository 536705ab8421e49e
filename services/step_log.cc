#include "ballast/services/step_log.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/io/seeded_bugs.h"

namespace ballast::services {
namespace {

constexpr char kPromise[] = "promise";
constexpr char kOpen[] = "open";
constexpr char kMark[] = "had_state";
constexpr char kCommitted[] = "committed";

absl::Status Unreadable(absl::string_view job, absl::string_view what) {
  return model::Error(
      absl::StatusCode::kDataLoss, model::kIo,
      absl::StrCat("the catalog's '", what, "' of job '", job,
                   "' cannot be read; expected what an earlier run wrote. The data directory is damaged: "
                   "start with an empty one"));
}

}  // namespace

std::string CatalogPrefix(absl::string_view job) { return absl::StrCat("job/", job, "/"); }

absl::StatusOr<CatalogEntry> ReadCatalogEntry(const storage::Catalog& catalog, absl::string_view job) {
  CatalogEntry entry;
  const std::string prefix = CatalogPrefix(job);
  BALLAST_ASSIGN_OR_RETURN(const auto promise, catalog.Get(prefix + kPromise));
  if (promise.has_value() && !entry.promised.emplace().ParseFromString(*promise)) return Unreadable(job, kPromise);
  BALLAST_ASSIGN_OR_RETURN(const auto open, catalog.Get(prefix + kOpen));
  if (open.has_value() && !entry.open.emplace().ParseFromString(*open)) return Unreadable(job, kOpen);
  BALLAST_ASSIGN_OR_RETURN(const auto mark, catalog.Get(prefix + kMark));
  entry.had_state = mark.has_value();
  BALLAST_ASSIGN_OR_RETURN(const auto committed, catalog.Get(prefix + kCommitted));
  if (committed.has_value() && !absl::SimpleAtoi(*committed, &entry.committed)) return Unreadable(job, kCommitted);
  BALLAST_ASSIGN_OR_RETURN(const auto log, catalog.Get(prefix + kCatalogLog));
  entry.has_log = log.has_value();
  BALLAST_ASSIGN_OR_RETURN(const auto chunks, catalog.List(absl::StrCat(prefix, kCatalogChunk)));
  for (const auto& [key, value] : chunks) {
    if (!entry.chunks.emplace_back().Decode(value)) return Unreadable(job, key);
  }
  return entry;
}

absl::Status WriteCommitted(storage::Catalog* catalog, absl::string_view job, int64_t committed) {
  return catalog->Put(CatalogPrefix(job) + kCommitted, absl::StrCat(committed), storage::Catalog::Sync::kUnsynced);
}

uint64_t StepLog::Append(const StepRecord& record) {
  const uint64_t lsn = next_lsn_++;
  const std::string prefix = CatalogPrefix(job_);
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) {
    unwritten_.push_back({lsn, prefix + kPromise, promise->epoch.SerializeAsString()});
  } else if (const auto* open = std::get_if<OpenRecord>(&record)) {
    unwritten_.push_back({lsn, prefix + kOpen, open->open.SerializeAsString()});
    Sync(lsn);  // nobody waits for it, but operators read it after a restart
  } else if (std::holds_alternative<PreparedStepRecord>(record) && !marked_) {
    marked_ = true;
    unwritten_.push_back({lsn, prefix + kMark, ""});
  }
  return lsn;
}

void StepLog::KeptHere() { marked_ = false; }

void StepLog::KeptElsewhere(uint64_t next_lsn) {
  marked_ = true;
  next_lsn_ = std::max(next_lsn_, next_lsn);
}

void StepLog::Sync(uint64_t lsn) { requested_lsn_ = std::max(requested_lsn_, lsn); }

std::optional<StepLog::Durable> StepLog::NextToWrite() {
  if (writing_ || unwritten_.empty() || unwritten_.front().lsn > requested_lsn_) return std::nullopt;
  writing_ = true;
  return unwritten_.front();
}

absl::Status StepLog::Write(storage::Catalog* catalog, const Durable& record) {
  storage::Pass("fence/catalog_put");
  using Sync = storage::Catalog::Sync;
  const absl::Status status = catalog->Put(
      record.key, record.value, Seeded(storage::StorageBug::kPromiseUnsynced) ? Sync::kUnsynced : Sync::kSynced);
  storage::Pass("fence/catalog_done");
  return status;
}

void StepLog::Written(uint64_t lsn) {
  writing_ = false;
  if (!unwritten_.empty() && unwritten_.front().lsn == lsn) unwritten_.pop_front();
}

std::optional<uint64_t> StepLog::TakeSynced(uint64_t elsewhere) {
  // A log is durable as a prefix: a later record never overtakes one that is still being written.
  uint64_t durable = std::min(requested_lsn_, elsewhere);
  if (!unwritten_.empty() && !Seeded(storage::StorageBug::kPromiseNotAwaited))
    durable = std::min(durable, unwritten_.front().lsn - 1);
  if (durable <= reported_lsn_) return std::nullopt;
  reported_lsn_ = durable;
  return durable;
}

}  // namespace ballast::services
