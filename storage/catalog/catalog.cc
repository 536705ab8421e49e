#include "ballast/storage/catalog/catalog.h"

#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>
#include <spdlog/spdlog.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/catalog/directory_format.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/file_lock.h"

namespace ballast::storage {
namespace {

// A server's jobs are kilobytes each: small buffers keep the resident set small.
constexpr uint64_t kWriteBufferBytes = uint64_t{2} << 20;

// RocksDB reads its log in blocks of this size. It takes damage for a torn end in the last block only.
constexpr uint64_t kLogBlockBytes = uint64_t{32} << 10;
// Lies between two copies of a value in the log; never there for readers. Counts in the write buffer too, so that the
// log does not grow beyond it.
constexpr char kGapKey[] = "gap";

rocksdb::Slice AsSlice(absl::string_view text) { return {text.data(), text.size()}; }
absl::string_view AsView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

absl::Status CatalogError(const rocksdb::Status& status, absl::string_view what, absl::string_view path) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = absl::StrCat("catalog ", path, ": ", what, ": ", status.ToString());
  if (status.IsNoSpace()) return model::Error(absl::StatusCode::kInternal, model::kDiskFull, message);
  if (!status.IsCorruption()) return model::Error(absl::StatusCode::kInternal, model::kIo, message);
  return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                      absl::StrCat(message,
                                   "; it is damaged: check its disk, then run `ballastctl verify --rebuild`, which "
                                   "rebuilds the entries of durable jobs"));
}

// Sends RocksDB's messages to the server's log. RocksDB's own log file would fill the disk too, and Debian's build
// aborts if the file cannot be written.
class ForwardingLogger final : public rocksdb::Logger {
 public:
  ForwardingLogger() : rocksdb::Logger(rocksdb::InfoLogLevel::WARN_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char*, va_list) override {}  // headers and messages without a level
  void Logv(rocksdb::InfoLogLevel level, const char* format, va_list arguments) override {
    if (level < rocksdb::InfoLogLevel::WARN_LEVEL || level >= rocksdb::InfoLogLevel::HEADER_LEVEL) return;
    char text[512];
    std::vsnprintf(text, sizeof text, format, arguments);
    text[std::strcspn(text, "\n")] = '\0';
    if (level == rocksdb::InfoLogLevel::WARN_LEVEL) {
      spdlog::warn("catalog: {}", text);
    } else {
      spdlog::error("catalog: {}", text);
    }
  }
};

rocksdb::Options CatalogOptions() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  options.paranoid_file_checks = true;
  options.track_and_verify_wals_in_manifest = true;
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.max_bgerror_resume_count = 0;  // fail-stop
  options.write_buffer_size = kWriteBufferBytes;
  options.max_write_buffer_number = 2;
  options.max_open_files = 64;
  options.max_background_jobs = 2;
  options.info_log = std::make_shared<ForwardingLogger>();
  options.compression = rocksdb::kNoCompression;
  return options;
}

class RocksCatalog : public Catalog {
 public:
  RocksCatalog(FileLock l, std::string p) : lock_(std::move(l)), path_(std::move(p)) {}
  absl::Status Open(Access access);
  absl::Status Put(absl::string_view key, absl::string_view value, Sync sync) override;
  absl::Status PutAll(absl::Span<const std::pair<std::string, std::string>> pairs) override;
  absl::Status CheckWrites(absl::Duration patience) const override {
    {
      absl::MutexLock guard(&mutex_);
      BALLAST_RETURN_IF_ERROR(failed_);
      const absl::Duration took = writing_.empty() ? absl::ZeroDuration() : absl::Now() - *writing_.begin();
      if (took > patience) {
        return model::Error(absl::StatusCode::kUnavailable, model::kIo,
                            absl::StrCat("a write to ", path_, " has not ended for ", absl::ToInt64Seconds(took),
                                         " s; look at the disk below it"));
      }
    }
    uint64_t errors = 0;  // of RocksDB's own threads, after which it takes no writes
    if (!db_->GetIntProperty(rocksdb::DB::Properties::kBackgroundErrors, &errors) || errors == 0) {
      return absl::OkStatus();
    }
    return model::Error(absl::StatusCode::kInternal, model::kIo,
                        absl::StrCat("RocksDB's threads had ", errors, " errors in ", path_, "; see the log"));
  }
  absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const override;
  absl::Status ErasePrefix(absl::string_view prefix) override;
  absl::Status Erase(absl::Span<const std::string> keys) override;
  absl::Status Replace(absl::Span<const std::string> prefixes,
                       absl::Span<const std::pair<std::string, std::string>> pairs) override;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(absl::string_view prefix) const override;

 private:
  absl::Status AddPuts(absl::Span<const std::pair<std::string, std::string>> pairs, rocksdb::WriteBatch* batch) const;
  absl::Status AddErase(absl::string_view prefix, rocksdb::WriteBatch* batch) const;
  // After a failed write the disk's content is unknown: every later write returns the same error.
  absl::Status Write(rocksdb::WriteBatch& batch, absl::string_view what, Sync sync = Sync::kSynced) {
    absl::ReleasableMutexLock before(&mutex_);
    BALLAST_RETURN_IF_ERROR(failed_);
    const auto writing = writing_.insert(absl::Now());
    before.Release();
    rocksdb::WriteOptions options;
    options.sync = sync != Sync::kUnsynced;
    // Without the lock: RocksDB syncs the writes of several threads together, and refuses those behind a failed one.
    const absl::Status written = CatalogError(db_->Write(options, &batch), what, path_);
    absl::MutexLock guard(&mutex_);
    writing_.erase(writing);
    failed_.Update(written);
    return failed_;
  }

  const FileLock lock_;  // released after the database is closed
  const std::string path_;
  std::unique_ptr<rocksdb::DB> db_;
  mutable absl::Mutex mutex_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  std::multiset<absl::Time> writing_ ABSL_GUARDED_BY(mutex_);  // since when, of each write under way
};

absl::Status RocksCatalog::Open(Access access) {
  rocksdb::DB* db = nullptr;
  rocksdb::Options options = CatalogOptions();
  options.create_if_missing = access == Access::kReadWrite;
  const rocksdb::Status opened = access == Access::kReadWrite ? rocksdb::DB::Open(options, path_, &db)
                                                              : rocksdb::DB::OpenForReadOnly(options, path_, &db);
  BALLAST_RETURN_IF_ERROR(CatalogError(opened, "open", path_));
  db_.reset(db);
  // One thread does all that a catalog has to do in the background.
  options.env->SetBackgroundThreads(0, rocksdb::Env::HIGH);
  return absl::OkStatus();
}

absl::Status RocksCatalog::Put(absl::string_view key, absl::string_view value, Sync sync) {
  const std::string what = absl::StrCat("put of '", key, "'");
  rocksdb::WriteBatch batch;
  if (sync == Sync::kTwice) {
    BALLAST_RETURN_IF_ERROR(Put(key, value, Sync::kUnsynced));  // synced with the second copy
    BALLAST_RETURN_IF_ERROR(CatalogError(batch.Put(kGapKey, std::string(kLogBlockBytes, '\0')), what, path_));
    BALLAST_RETURN_IF_ERROR(CatalogError(batch.Delete(kGapKey), what, path_));
  }
  BALLAST_RETURN_IF_ERROR(CatalogError(batch.Put(AsSlice(key), AsSlice(value)), what, path_));
  return Write(batch, what, sync);
}

absl::Status RocksCatalog::PutAll(absl::Span<const std::pair<std::string, std::string>> pairs) {
  rocksdb::WriteBatch batch;
  BALLAST_RETURN_IF_ERROR(AddPuts(pairs, &batch));
  return Write(batch, absl::StrCat("put of ", pairs.size(), " entries"));
}

absl::Status RocksCatalog::ErasePrefix(absl::string_view prefix) {
  rocksdb::WriteBatch batch;
  BALLAST_RETURN_IF_ERROR(AddErase(prefix, &batch));
  return Write(batch, absl::StrCat("erase of '", prefix, "'"));
}

absl::Status RocksCatalog::Erase(absl::Span<const std::string> keys) {
  rocksdb::WriteBatch batch;
  for (const std::string& key : keys) BALLAST_RETURN_IF_ERROR(CatalogError(batch.Delete(key), "erase", path_));
  return Write(batch, absl::StrCat("erase of ", keys.size(), " entries"));
}

absl::Status RocksCatalog::Replace(absl::Span<const std::string> prefixes,
                                   absl::Span<const std::pair<std::string, std::string>> pairs) {
  rocksdb::WriteBatch batch;
  for (const std::string& prefix : prefixes) BALLAST_RETURN_IF_ERROR(AddErase(prefix, &batch));
  BALLAST_RETURN_IF_ERROR(AddPuts(pairs, &batch));
  return Write(batch, absl::StrCat("replacement by ", pairs.size(), " entries"));
}

absl::Status RocksCatalog::AddPuts(absl::Span<const std::pair<std::string, std::string>> pairs,
                                   rocksdb::WriteBatch* batch) const {
  for (const auto& [key, value] : pairs) {
    BALLAST_RETURN_IF_ERROR(CatalogError(batch->Put(key, value), "put", path_));
  }
  return absl::OkStatus();
}

absl::Status RocksCatalog::AddErase(absl::string_view prefix, rocksdb::WriteBatch* batch) const {
  BALLAST_ASSIGN_OR_RETURN(const auto pairs, List(prefix));
  for (const auto& [key, value] : pairs) {
    BALLAST_RETURN_IF_ERROR(CatalogError(batch->Delete(key), "erase", path_));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string>> RocksCatalog::Get(absl::string_view key) const {
  std::string value;
  const rocksdb::Status status = db_->Get(rocksdb::ReadOptions(), AsSlice(key), &value);
  if (status.IsNotFound()) return std::optional<std::string>();
  BALLAST_RETURN_IF_ERROR(CatalogError(status, absl::StrCat("get of '", key, "'"), path_));
  return std::optional<std::string>(std::move(value));
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> RocksCatalog::List(absl::string_view prefix) const {
  std::vector<std::pair<std::string, std::string>> pairs;
  const std::unique_ptr<rocksdb::Iterator> at(db_->NewIterator(rocksdb::ReadOptions()));
  for (at->Seek(AsSlice(prefix)); at->Valid() && at->key().starts_with(AsSlice(prefix)); at->Next()) {
    pairs.emplace_back(std::string(AsView(at->key())), std::string(AsView(at->value())));
  }
  BALLAST_RETURN_IF_ERROR(CatalogError(at->status(), "list", path_));
  return pairs;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Catalog>> Catalog::Open(const std::string& directory, Access access) {
  BALLAST_RETURN_IF_ERROR(CheckDirectoryFormat(directory));  // before the lock, which writes
  std::error_code error;
  if (access == Access::kReadWrite) std::filesystem::create_directories(directory + "/catalog", error);
  if (error) return IoError(error.value(), "creation", directory, 0, 0);
  BALLAST_ASSIGN_OR_RETURN(FileLock lock, FileLock::Take(absl::StrCat(directory, "/LOCK.ballast"),
                                                         absl::StrCat("data directory ", directory)));
  // Again: another program may have had the directory meanwhile.
  BALLAST_RETURN_IF_ERROR(access == Access::kReadWrite ? SettleDirectoryFormat(directory)
                                                       : CheckDirectoryFormat(directory));
  auto catalog = std::make_unique<RocksCatalog>(std::move(lock), absl::StrCat(directory, "/catalog"));
  BALLAST_RETURN_IF_ERROR(catalog->Open(access));
  return std::unique_ptr<Catalog>(std::move(catalog));
}

}  // namespace ballast::storage
