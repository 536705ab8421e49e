#include "ballast/services/job_state/job_entry.h"

#include <algorithm>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::services {
namespace {

template <typename Message>
bool ParseMessage(absl::string_view value, Message* message) {
  return message->ParseFromArray(value.data(), static_cast<int>(value.size())) && model::CheckKnown(*message).ok();
}

template <typename Message>
bool Parse(absl::string_view value, std::optional<Message>* to) {
  Message message;
  if (!ParseMessage(value, &message)) return false;
  *to = std::move(message);
  return true;
}

bool ParseChunk(absl::string_view id_text, absl::string_view value, JobEntry* entry) {
  storage::DurableChunk chunk;
  uint64_t id = 0;
  if (!chunk.Decode(value) || !absl::SimpleAtoi(id_text, &id) || id != chunk.id) return false;
  entry->chunks.push_back(chunk);
  return true;
}

void CopyWants(const v1::PinnedVersion& from, v1::PinnedVersion* to) {
  to->set_automatic(from.automatic());
  to->set_automatic_since(from.automatic_since());
  to->set_requested(from.requested());
}

bool ParsePin(absl::string_view what, absl::string_view value, JobEntry* entry) {
  v1::PinnedVersion pin;
  if (!ParseMessage(value, &pin)) return false;
  if (pin.version() < 0 || what != CatalogPin(pin.version())) return false;
  std::set<uint64_t> ids;
  for (const std::string& bytes : pin.chunks()) {
    if (storage::DurableChunk chunk; !chunk.Decode(bytes) || !ids.insert(chunk.id).second) return false;
  }
  entry->pins.push_back(std::move(pin));
  return true;
}

// A pin that an earlier version of the server gave up may have left its wants behind: they count for no pin.
bool ParseWanted(absl::string_view what, absl::string_view value, JobEntry* entry) {
  v1::PinnedVersion wanted;
  if (!ParseMessage(value, &wanted)) return false;
  if (wanted.version() < 0 || what != CatalogWanted(wanted.version())) return false;
  for (v1::PinnedVersion& pin : entry->pins) {
    if (pin.version() == wanted.version()) CopyWants(wanted, &pin);
  }
  return true;
}

}  // namespace

std::string NvmeFileKey(storage::NvmeFileId id) { return absl::StrCat(kCatalogNvme, absl::Hex(id, absl::kZeroPad16)); }

std::optional<storage::NvmeFileId> NvmeFileOfKey(absl::string_view key) {
  storage::NvmeFileId id = 0;
  if (!absl::ConsumePrefix(&key, kCatalogNvme) || !absl::SimpleHexAtoi(key, &id)) return std::nullopt;
  return id;
}

std::string CatalogPrefix(absl::string_view job) { return absl::StrCat(kCatalogJobs, job, "/"); }

std::string CatalogPin(int64_t version) { return absl::StrFormat("%s%020d", kCatalogPin, version); }
std::string CatalogWanted(int64_t version) { return absl::StrFormat("%s%020d", kCatalogWanted, version); }

bool JobEntry::every_k() const { return open.has_value() && open->spec().durability() == v1::DURABILITY_EVERY_K; }

bool JobEntry::durable() const {
  if (every_k()) return false;
  return life.has_value() || !chunks.empty() || !pins.empty() ||
         (open.has_value() && open->spec().durability() == v1::DURABILITY_STEP) ||
         // An unreadable entry may have been a durable job's.
         std::any_of(unreadable.begin(), unreadable.end(), [](const std::string& what) {
           return what == kCatalogOpen || what == kCatalogLog || what.starts_with(kCatalogChunk) ||
                  what.starts_with(kCatalogPin) || what.starts_with(kCatalogWanted);
         });
}

std::vector<storage::DurableChunk> JobEntry::ChunksAndPinned() const {
  std::vector<storage::DurableChunk> all = chunks;
  // Another entry for the same place is not the same extent: the two are in dispute.
  std::set<std::string> known;
  for (const storage::DurableChunk& chunk : chunks) known.insert(chunk.Encode());
  for (const v1::PinnedVersion& pin : pins) {
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      if (known.insert(chunk.Encode()).second) all.push_back(chunk);
    }
  }
  return all;
}

absl::Status CheckKnownKey(absl::string_view key) {
  const std::vector<absl::string_view> parts = absl::StrSplit(key, '/');
  bool known = key == kCatalogServerId || key == kCatalogDisk || NvmeFileOfKey(key).has_value();
  if (parts.size() == 3 && absl::StartsWith(key, kCatalogJobs)) {
    const absl::string_view what = parts[2];
    for (const absl::string_view single :
         {kCatalogPromise, kCatalogOpen, kCatalogHadState, kCatalogCommitted, kCatalogDram, kCatalogLog}) {
      known = known || what == single;
    }
    for (const absl::string_view prefix : {kCatalogChunk, kCatalogPin, kCatalogWanted}) {
      known = known || absl::StartsWith(what, prefix);
    }
  }
  if (known) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kLaterVersion,
      absl::StrCat("the catalog has the key '", absl::CEscape(key), "', which Ballast ", model::Version(),
                   " does not know: a later version wrote it, and this one might free what it keeps. "
                   "Nothing was changed. Run the version that used the directory last"));
}

void AddToEntry(absl::string_view what, absl::string_view value, JobEntry* entry) {
  bool read = true;
  if (what == kCatalogPromise) {
    read = Parse(value, &entry->promised);
  } else if (what == kCatalogOpen) {
    read = Parse(value, &entry->open);
  } else if (what == kCatalogHadState) {
    entry->had_state = true;
  } else if (what == kCatalogCommitted) {
    read = absl::SimpleAtoi(value, &entry->committed);
  } else if (what == kCatalogDram) {
    if (!absl::SimpleAtoi(value, &entry->least_dram)) entry->least_dram = 0;
  } else if (what == kCatalogLog) {
    uint64_t life = 0;
    read = value.size() == ShowLife(0).size() && absl::SimpleHexAtoi(value, &life);
    if (read) entry->life = life;
  } else if (absl::string_view id = what; absl::ConsumePrefix(&id, kCatalogChunk)) {
    read = ParseChunk(id, value, entry);
  } else if (absl::StartsWith(what, kCatalogPin)) {
    read = ParsePin(what, value, entry);
  } else if (absl::StartsWith(what, kCatalogWanted)) {
    read = ParseWanted(what, value, entry);
  }
  if (!read) entry->unreadable.emplace_back(what);
}

absl::StatusOr<JobEntry> ReadJobEntry(const storage::Catalog& catalog, absl::string_view job) {
  JobEntry entry;
  const std::string prefix = CatalogPrefix(job);
  BALLAST_ASSIGN_OR_RETURN(const auto pairs, catalog.List(prefix));
  for (const auto& [key, value] : pairs) AddToEntry(absl::string_view(key).substr(prefix.size()), value, &entry);
  return entry;
}

CatalogPair LogPair(absl::string_view job, uint64_t life) {
  return {absl::StrCat(CatalogPrefix(job), kCatalogLog), ShowLife(life)};
}

CatalogPair CommittedPair(absl::string_view job, int64_t committed) {
  return {absl::StrCat(CatalogPrefix(job), kCatalogCommitted), absl::StrCat(committed)};
}

std::string ChunkKey(absl::string_view job, uint64_t chunk) {
  return absl::StrCat(CatalogPrefix(job), kCatalogChunk, chunk);
}

CatalogPair ChunkPair(absl::string_view job, const storage::DurableChunk& chunk) {
  return {ChunkKey(job, chunk.id), chunk.Encode()};
}

CatalogPair PinPair(absl::string_view job, const v1::PinnedVersion& pin) {
  return {absl::StrCat(CatalogPrefix(job), CatalogPin(pin.version())), pin.SerializeAsString()};
}

CatalogPair WantedPair(absl::string_view job, const v1::PinnedVersion& pin) {
  v1::PinnedVersion wanted;
  wanted.set_version(pin.version());
  CopyWants(pin, &wanted);
  return {absl::StrCat(CatalogPrefix(job), CatalogWanted(pin.version())), wanted.SerializeAsString()};
}

std::vector<std::string> PinPrefixes(absl::string_view job, int64_t version) {
  const std::string prefix = CatalogPrefix(job);
  return {prefix + CatalogPin(version), prefix + CatalogWanted(version)};
}

absl::Status WritePin(storage::Catalog* catalog, absl::string_view job, v1::PinnedVersion pin,
                      absl::Span<const storage::DurableChunk> chunks) {
  pin.clear_chunks();
  for (const storage::DurableChunk& chunk : chunks) pin.add_chunks(chunk.Encode());
  const CatalogPair pair = PinPair(job, pin);
  return catalog->Replace(PinPrefixes(job, pin.version()), {&pair, 1});
}

std::vector<storage::DurableChunk> PinnedChunks(const v1::PinnedVersion& pin) {
  std::vector<storage::DurableChunk> chunks;
  for (const std::string& bytes : pin.chunks()) chunks.emplace_back().Decode(bytes);
  return chunks;
}

uint64_t LifeOf(const v1::PinnedVersion& pin) {
  if (pin.life() != 0 || pin.chunks().empty()) return pin.life();
  return PinnedChunks(pin).front().life;
}

absl::Status WriteCommitted(storage::Catalog* catalog, absl::string_view job, int64_t committed) {
  const auto [key, value] = CommittedPair(job, committed);
  return catalog->Put(key, value, storage::Catalog::Sync::kUnsynced);
}

absl::Status WriteLeastDram(storage::Catalog* catalog, absl::string_view job, uint64_t bytes) {
  return catalog->Put(CatalogPrefix(job) + kCatalogDram, absl::StrCat(bytes), storage::Catalog::Sync::kUnsynced);
}

std::string ShowLife(uint64_t life) { return absl::StrCat(absl::Hex(life, absl::kZeroPad16)); }

absl::Status CheckLife(absl::string_view job, const JobEntry& entry, uint64_t life, absl::string_view whose) {
  const auto refuse = [&](absl::string_view what, uint64_t other) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat(whose, " is of life ", ShowLife(life), " of job '", job, "', and ", what,
                                     " of life ", ShowLife(other),
                                     ": one of the two is a copy from before the job was dropped and made again. Bring "
                                     "back what belongs together; `ballastctl verify` lists it"));
  };
  if (entry.life.value_or(life) != life) return refuse("the catalog's entry", *entry.life);
  for (const storage::DurableChunk& chunk : entry.chunks) {
    if (chunk.life != life) return refuse(absl::StrCat("the catalog's chunk ", chunk.id), chunk.life);
  }
  for (const v1::PinnedVersion& pin : entry.pins) {
    if (pin.life() != 0 && pin.life() != life) {
      return refuse(absl::StrCat("the catalog's pin of version ", pin.version()), pin.life());
    }
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      if (chunk.life != life) return refuse(absl::StrCat("the catalog's pin of version ", pin.version()), chunk.life);
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::services
