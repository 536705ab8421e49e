// The catalog: a server's memory of its jobs across a restart. A small index in RocksDB, written with synced batches.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Threads: any. Durability: writes are synced on OK. A value put with kUnsynced becomes durable with the next synced
// write, or earlier when the system writes it.
// If Open cannot read the end of the database's log, it drops the end, because a crash may have torn it. So rot there
// silently removes the newest synced writes. A value that was put with kTwice is in two distant places of the log:
// either Open reads one of them, or it fails.
class Catalog {
 public:
  // Opens the RocksDB database, and creates `directory` if needed. FAILED_PRECONDITION naming the holder if another
  // process has the directory open; DATA_LOSS (IO) if the database is damaged; INTERNAL (DISK_FULL) or (IO)
  // for everything else. Gives the directory its format file if it has none.
  // Before anything is written: FAILED_PRECONDITION (LATER_VERSION) and DATA_LOSS (IO) as CheckDirectoryFormat.
  // kReadOnly: the database's files stay as they are; every write fails, and so does opening a missing database.
  enum class Access { kReadWrite, kReadOnly };
  static absl::StatusOr<std::unique_ptr<Catalog>> Open(const std::string& directory,
                                                       Access access = Access::kReadWrite);
  virtual ~Catalog() = default;

  enum class Sync { kSynced, kUnsynced, kTwice };
  // After a failed write every later write returns the same error.
  virtual absl::Status Put(absl::string_view key, absl::string_view value, Sync sync = Sync::kSynced) = 0;
  // The error of the first failed write, which every later one returns. UNAVAILABLE (IO) while a write takes longer
  // than `patience`, because a hanging disk makes no write fail.
  virtual absl::Status CheckWrites(absl::Duration /*patience*/) const { return absl::OkStatus(); }
  // Puts all pairs or none.
  virtual absl::Status PutAll(absl::Span<const std::pair<std::string, std::string>> pairs) = 0;
  virtual absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const = 0;
  virtual absl::Status ErasePrefix(absl::string_view prefix) = 0;
  // Erases exactly these keys, all or none; a key that is not there does no harm.
  virtual absl::Status Erase(absl::Span<const std::string> keys) = 0;
  // Erases everything under these prefixes and puts the pairs, all or nothing.
  virtual absl::Status Replace(absl::Span<const std::string> prefixes,
                               absl::Span<const std::pair<std::string, std::string>> pairs) = 0;
  // Key-value pairs under `prefix`, by key.
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(absl::string_view prefix) const = 0;
};

}  // namespace ballast::storage
