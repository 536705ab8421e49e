// What a server remembers about its jobs across a restart, in RocksDB: an index, small, written with synced batches.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Threads: any. Durability: writes are synced on OK, unless kUnsynced is said: the system writes such a value when it
// likes, or with the next synced one.
class Catalog {
 public:
  // In RocksDB. Creates `directory` if needed. FAILED_PRECONDITION naming the holder if another process has it open;
  // DATA_LOSS (IO) if what is there is damaged; INTERNAL (IO) else.
  // kReadOnly: the database's files stay as they are, and every write fails; so does opening what is not there.
  enum class Access { kReadWrite, kReadOnly };
  static absl::StatusOr<std::unique_ptr<Catalog>> Open(const std::string& directory,
                                                       Access access = Access::kReadWrite);
  virtual ~Catalog() = default;

  enum class Sync { kSynced, kUnsynced };
  // After one failed write every later one returns its error.
  virtual absl::Status Put(absl::string_view key, absl::string_view value, Sync sync = Sync::kSynced) = 0;
  // All or none of them.
  virtual absl::Status PutAll(absl::Span<const std::pair<std::string, std::string>> pairs) = 0;
  virtual absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const = 0;
  virtual absl::Status ErasePrefix(absl::string_view prefix) = 0;
  // What is under these prefixes goes and the pairs come: all of it or nothing.
  virtual absl::Status Replace(absl::Span<const std::string> prefixes,
                               absl::Span<const std::pair<std::string, std::string>> pairs) = 0;
  // Key-value pairs under `prefix`, by key.
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(absl::string_view prefix) const = 0;
};

}  // namespace ballast::storage
