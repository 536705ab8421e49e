// What the catalog keeps of a job, and under which keys: "job/<name>/<what>".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/extent_label.h"
#include "ballast/v1/log.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Of the server itself.
inline constexpr char kCatalogServerId[] = "server_id";
// All jobs' keys begin so.
inline constexpr char kCatalogJobs[] = "job/";
// Of a job: what comes behind CatalogPrefix. A durable chunk's is kCatalogChunk and its id, a durable pin's CatalogPin.
inline constexpr char kCatalogPromise[] = "promise";
inline constexpr char kCatalogOpen[] = "open";
inline constexpr char kCatalogHadState[] = "had_state";
inline constexpr char kCatalogCommitted[] = "committed";
inline constexpr char kCatalogDram[] = "dram";
inline constexpr char kCatalogLog[] = "log";
inline constexpr char kCatalogChunk[] = "chunk-";
inline constexpr char kCatalogPin[] = "pin-";
// A pin is one entry, so that a crash leaves all of it or nothing. No version's is the beginning of another's.
std::string CatalogPin(int64_t version);
std::string CatalogPrefix(absl::string_view job);

struct CatalogEntry {
  std::optional<v1::Epoch> promised;
  std::optional<v1::OpenRequest> open;
  // Some step was prepared here, of a job without a log: after a restart its state is lost, or what came since its
  // pins.
  bool had_state = false;
  int64_t committed = -1;  // as last written: may lag
  // Bytes of DRAM that it cannot do without: what jobs that come back before it must leave. As last written, too.
  uint64_t least_dram = 0;
  // Its gradient log was made, in this life of the name: without that log, state is lost.
  std::optional<uint64_t> life;
  std::vector<storage::DurableChunk> chunks;  // of a job with durability `step`
  std::vector<v1::PinnedVersion> pins;        // durable ones, ascending; their chunks can be decoded
  // What comes behind the prefix, of entries that are none.
  std::vector<std::string> unreadable;

  // It has a gradient log.
  bool durable() const;
  // What is left of its state is in pins.
  bool every_k() const;
  // Of every extent that an entry names once: a pin may keep what is still its chunk's newest state.
  std::vector<storage::DurableChunk> ChunksAndPinned() const;
};

// Takes in one pair; what cannot be read goes to `unreadable`, what is unknown is a later version's and let be.
void AddToEntry(absl::string_view what, absl::string_view value, CatalogEntry* entry);
absl::StatusOr<CatalogEntry> ReadCatalogEntry(const storage::Catalog& catalog, absl::string_view job);

using CatalogPair = std::pair<std::string, std::string>;
CatalogPair LogPair(absl::string_view job, uint64_t life);
// The last step that the server applied: a log that ends before it is an older copy.
CatalogPair CommittedPair(absl::string_view job, int64_t committed);
CatalogPair ChunkPair(absl::string_view job, const storage::DurableChunk& chunk);
CatalogPair PinPair(absl::string_view job, const v1::PinnedVersion& pin);
// Of a pin that an entry holds.
std::vector<storage::DurableChunk> PinnedChunks(const v1::PinnedVersion& pin);
// Not synced: after a power cut it may be lower than what was applied.
absl::Status WriteCommitted(storage::Catalog* catalog, absl::string_view job, int64_t committed);
// Not synced either.
absl::Status WriteLeastDram(storage::Catalog* catalog, absl::string_view job, uint64_t bytes);
// A life, as messages and the catalog spell it.
std::string ShowLife(uint64_t life);

}  // namespace ballast::services
