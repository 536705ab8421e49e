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

// Threads: any. Durability: Put and ErasePrefix are synced on OK, unless kUnsynced is said: the system writes such a
// value when it likes, or with the next synced one.
class Catalog {
 public:
  // Creates `directory` if needed. FAILED_PRECONDITION naming the holder if another process has it open; DATA_LOSS (IO)
  // if what is there is damaged; INTERNAL (IO) else.
  static absl::StatusOr<std::unique_ptr<Catalog>> Open(const std::string& directory);
  ~Catalog();

  enum class Sync { kSynced, kUnsynced };
  // After one failed write every later one returns its error.
  absl::Status Put(absl::string_view key, absl::string_view value, Sync sync = Sync::kSynced);
  // All or none of them; synced.
  absl::Status PutAll(absl::Span<const std::pair<std::string, std::string>> pairs);
  absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const;
  absl::Status ErasePrefix(absl::string_view prefix);
  // Key-value pairs under `prefix`, by key.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(absl::string_view prefix) const;

 private:
  struct Impl;
  explicit Catalog(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::storage
