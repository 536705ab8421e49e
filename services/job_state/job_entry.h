// A job's entries in the catalog, and their keys: "job/<name>/<suffix>".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/v1/log.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// The catalog's keys. A program must not use a catalog with an unknown key: what the key keeps would be freed. A new
// key raises storage::kDirectoryFormat, and CheckKnownKey lists the key.
//
// Key of the server's own id.
inline constexpr char kCatalogServerId[] = "server_id";
// Key of Member.disk of this server: 16 hexadecimal digits.
inline constexpr char kCatalogDisk[] = "disk";
// Prefix of all jobs' keys.
inline constexpr char kCatalogJobs[] = "job/";
// Prefix of the keys of files of the NVMe tier outside the data directory; their values are the files' last paths.
inline constexpr char kCatalogNvme[] = "nvme/";
std::string NvmeFileKey(storage::NvmeFileId id);
std::optional<storage::NvmeFileId> NvmeFileOfKey(absl::string_view key);
// Suffixes behind CatalogPrefix(job). A durable chunk has kCatalogChunk followed by its id, a durable pin CatalogPin.
inline constexpr char kCatalogPromise[] = "promise";
inline constexpr char kCatalogOpen[] = "open";
inline constexpr char kCatalogHadState[] = "had_state";
inline constexpr char kCatalogCommitted[] = "committed";
inline constexpr char kCatalogDram[] = "dram";
inline constexpr char kCatalogLog[] = "log";
inline constexpr char kCatalogChunk[] = "chunk-";
inline constexpr char kCatalogPin[] = "pin-";
// A whole pin is a single entry, so that a crash leaves all of the pin or nothing. The suffix of a version is never the
// beginning of another version's.
std::string CatalogPin(int64_t version);
// A small entry that names the owners of a pin, once these have changed: the entry counts instead of the same fields
// in the pin's own entry, which may be megabytes.
inline constexpr char kCatalogWanted[] = "wanted-";
std::string CatalogWanted(int64_t version);
std::string CatalogPrefix(absl::string_view job);

struct JobEntry {
  std::optional<v1::Epoch> promised;
  std::optional<v1::OpenRequest> open;
  // For a job without a log: some step was prepared here. After a restart the job's state is lost, or whatever came
  // since its pins.
  bool had_state = false;
  int64_t committed = -1;  // as last written: may lag
  // Bytes of DRAM without which the job cannot load: jobs that load earlier must leave so much. As last written, too.
  uint64_t least_dram = 0;
  // Set once the gradient log was made in this life of the name: from then on a missing log means lost state.
  std::optional<uint64_t> life;
  std::vector<storage::DurableChunk> chunks;  // of a job with durability `step`
  // Durable ones, ascending; their chunks can be decoded, and their wants are the newest.
  std::vector<v1::PinnedVersion> pins;
  // Suffixes of the keys whose entries cannot be read.
  std::vector<std::string> unreadable;

  // Was the job ever opened? True also if an unreadable entry may say so.
  bool opened() const {
    return open.has_value() || had_state || !chunks.empty() || !pins.empty() || !unreadable.empty();
  }
  // Does the job have a gradient log? True also if an unreadable entry may have been a durable job's.
  bool durable() const;
  // Is the durability every-K? After a restart only the pins are left of such a job's state.
  bool every_k() const;
  // Every extent that the entry names, once: a pin may keep an extent that is still its chunk's newest state.
  std::vector<storage::DurableChunk> ChunksAndPinned() const;
};

// FAILED_PRECONDITION (LATER_VERSION) unless this version knows the catalog's key.
absl::Status CheckKnownKey(absl::string_view key);
// Adds a pair, in the order of keys. REQUIRES: CheckKnownKey. A value that cannot be read, or has fields of a later
// version, goes to `unreadable`.
void AddToEntry(absl::string_view what, absl::string_view value, JobEntry* entry);
absl::StatusOr<JobEntry> ReadJobEntry(const storage::Catalog& catalog, absl::string_view job);

using CatalogPair = std::pair<std::string, std::string>;
CatalogPair LogPair(absl::string_view job, uint64_t life);
// The last step that the server applied: a log that ends earlier is an older copy.
CatalogPair CommittedPair(absl::string_view job, int64_t committed);
// Key of a chunk's entry.
std::string ChunkKey(absl::string_view job, uint64_t chunk);
CatalogPair ChunkPair(absl::string_view job, const storage::DurableChunk& chunk);
// Writes all that the catalog has of the pin, at once: it keeps these `chunks`.
absl::Status WritePin(storage::Catalog* catalog, absl::string_view job, v1::PinnedVersion pin,
                      absl::Span<const storage::DurableChunk> chunks);
CatalogPair PinPair(absl::string_view job, const v1::PinnedVersion& pin);
CatalogPair WantedPair(absl::string_view job, const v1::PinnedVersion& pin);
// Prefixes of all that the catalog has of a pin.
std::vector<std::string> PinPrefixes(absl::string_view job, int64_t version);
// REQUIRES: `pin` comes from an entry, so that its chunks can be decoded.
std::vector<storage::DurableChunk> PinnedChunks(const v1::PinnedVersion& pin);
// The job's life on this server, as its pin tells. 0: an earlier version of the server made the pin, without chunks.
uint64_t LifeOf(const v1::PinnedVersion& pin);
// Not synced: after a power cut the catalog may name an earlier step than was applied.
absl::Status WriteCommitted(storage::Catalog* catalog, absl::string_view job, int64_t committed);
// Not synced either.
absl::Status WriteLeastDram(storage::Catalog* catalog, absl::string_view job, uint64_t bytes);
// A life as messages and the catalog spell it.
std::string ShowLife(uint64_t life);
// Is all of the entry of `life`, which was found in `whose`? A name may have stood for several jobs, one after the
// other, whose files must not be mixed: DATA_LOSS (DIVERGED) if the catalog names a different life.
absl::Status CheckLife(absl::string_view job, const JobEntry& entry, uint64_t life, absl::string_view whose);

}  // namespace ballast::services
