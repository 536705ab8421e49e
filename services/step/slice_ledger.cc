#include "ballast/services/step/slice_ledger.h"

#include <algorithm>

#include "ballast/proto/model/status.h"
#include "ballast/services/step/seeded_bugs.h"

namespace ballast::services {
namespace {

// Bounds on the missing slices listed in an answer. The asking rank sends its slices again; slices of other ranks are
// listed for messages only.
constexpr int kMissingListedMax = 4096;
constexpr int kMissingOfOthersListedMax = 16;

std::string Show(uint64_t begin, uint64_t end) { return absl::StrCat("[", begin, ", ", end, ")"); }

absl::Status BadRange(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

// Explains why the header names no slice of the plan.
absl::Status ExplainUnknownSlice(const model::EpochPlan& plan, const v1::PushRequest& header) {
  const auto& units = plan.layout().units();
  if (header.unit() >= units.size()) {
    return model::Error(absl::StatusCode::kNotFound, model::kUnknownUnit,
                        absl::StrCat("the job has ", units.size(), " units, the push names unit ", header.unit()));
  }
  const std::string unit = absl::StrCat("unit '", units[header.unit()].name, "'");
  const std::string range = Show(header.begin(), header.end());
  if (header.begin() >= header.end() || header.end() > units[header.unit()].elements) {
    return BadRange(model::kBadRange, absl::StrCat("range ", range, " must be non-empty and lie in ", unit,
                                                   ", which has ", units[header.unit()].elements, " elements"));
  }
  for (const model::Slice& slice : plan.slices()) {
    if (slice.unit != header.unit()) continue;
    if (model::Intersect(slice.range, {header.begin(), header.end()}).size() == 0) continue;
    const std::string theirs = Show(slice.range.begin, slice.range.end);
    if (slice.rank != header.rank()) {
      return BadRange(model::kBadRange, absl::StrCat("range ", range, " of ", unit, " was pushed by rank ",
                                                     header.rank(), ", but ", theirs, " belongs to rank ", slice.rank,
                                                     " in this epoch; push what the tiling gives to the rank"));
    }
    return BadRange(model::kOverlap,
                    absl::StrCat("range ", range, " of ", unit, " overlaps slice ", theirs, " of rank ", slice.rank,
                                 "; only whole slices (a rank's range cut at chunk boundaries) are accepted"));
  }
  return BadRange(model::kBadRange, absl::StrCat("range ", range, " of ", unit, " belongs to no rank"));
}

}  // namespace

void SliceLedger::Open(const model::EpochPlan* plan, uint32_t member) {
  plan_ = plan;
  own_.clear();
  for (uint32_t i = 0; i < plan->slices().size(); ++i) {
    if (plan->server_of(plan->slices()[i].chunk) == member) own_.push_back(i);
  }
  attempts_.assign(plan->world_size(), 0);
  for (auto& entries : entries_) {
    if (Seeded(SeededBug::kOpenKeepsSlices) && entries.size() == own_.size()) continue;
    entries.assign(own_.size(), Entry{});
  }
  Forget();
}

void SliceLedger::NextStep() {
  std::fill(attempts_.begin(), attempts_.end(), 0);
  for (auto& entries : entries_) std::fill(entries.begin(), entries.end(), Entry{});
  Forget();
}

void SliceLedger::Forget() {
  for (Requirement& requirement : requirements_) requirement.valid = false;
}

absl::StatusOr<uint32_t> SliceLedger::FindPlace(const v1::PushRequest& header) const {
  if (header.kind() != v1::SLICE_KIND_GRADIENT && header.kind() != v1::SLICE_KIND_VALUE) {
    return BadRange(model::kBadRequest,
                    absl::StrCat("slice kind must be GRADIENT or VALUE, got ", static_cast<int>(header.kind())));
  }
  const auto slice = plan_->FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
  if (!slice.has_value()) return ExplainUnknownSlice(*plan_, header);
  const uint64_t chunk = plan_->slices()[*slice].chunk;
  if (header.kind() == v1::SLICE_KIND_GRADIENT && plan_->layout().chunks()[chunk].frozen != v1::FROZEN_UNSPECIFIED) {
    return BadRange(model::kBadRequest,
                    absl::StrCat("range ", Show(header.begin(), header.end()), " of unit '",
                                 plan_->layout().units()[header.unit()].name,
                                 "' is of frozen tensors, whose values never change by a gradient: push none of them"));
  }
  const auto it = std::lower_bound(own_.begin(), own_.end(), *slice);
  if (it == own_.end() || *it != *slice) {
    return BadRange(model::kBadRequest, absl::StrCat("chunk ", chunk, " lies on server '",
                                                     plan_->open().members(plan_->server_of(chunk)).server_id(),
                                                     "'; send its slices there"));
  }
  return static_cast<uint32_t>(it - own_.begin());
}

void SliceLedger::RaiseAttempt(uint32_t rank, uint64_t attempt) {
  attempts_[rank] = attempt;
  if (Seeded(SeededBug::kCoverageIgnoresAttempt)) return;
  for (uint32_t place = 0; place < own_.size(); ++place) {
    if (slice(place).rank != rank) continue;
    for (auto& entries : entries_) entries[place] = Entry{};
  }
  Forget();
}

std::optional<uint32_t> SliceLedger::Held(v1::SliceKind kind, uint32_t place) const {
  const Entry& entry = entries(kind)[place];
  if (!entry.held) return std::nullopt;
  if (Seeded(SeededBug::kCoverageIgnoresAttempt) && entry.attempt != attempts_[slice(place).rank]) return std::nullopt;
  return entry.crc32c;
}

void SliceLedger::Hold(v1::SliceKind kind, uint32_t place, uint64_t attempt, uint32_t crc32c) {
  entries(kind)[place] = Entry{true, attempt, crc32c};
}

void SliceLedger::Lose(v1::SliceKind kind, uint32_t place, uint64_t attempt) {
  Entry& entry = entries(kind)[place];
  if (entry.attempt == attempt) entry = Entry{};
  Forget();
}

bool SliceLedger::TakePlace(const v1::PushRequest& header) {
  if (Seeded(SeededBug::kPlaceShared)) return true;
  const model::Range range{header.begin(), header.end()};
  auto& ranges = writing_[{header.kind(), header.unit(), header.begin() / plan_->layout().chunk_elements()}];
  for (const model::Range& other : ranges) {
    if (model::Intersect(range, other).size() > 0) return false;
  }
  ranges.push_back(range);
  return true;
}

void SliceLedger::FreePlace(const v1::PushRequest& header) {
  if (plan_ == nullptr) return;
  const auto it = writing_.find({header.kind(), header.unit(), header.begin() / plan_->layout().chunk_elements()});
  if (it == writing_.end()) return;
  std::erase(it->second, model::Range{header.begin(), header.end()});
  if (it->second.empty()) writing_.erase(it);
}

bool SliceLedger::Covers(const Entry& entry, uint64_t attempt) {
  return entry.held && (entry.attempt == attempt || Seeded(SeededBug::kCoverageIgnoresAttempt));
}

bool SliceLedger::Covered(v1::SliceKind kind, absl::string_view presence, uint64_t attempt) {
  Requirement& requirement = requirements_[kind == v1::SLICE_KIND_VALUE];
  if (!requirement.valid || requirement.attempt != attempt || requirement.presence != presence) {
    requirement = Requirement{std::string(presence), attempt, {}, 0, true};
    for (uint32_t place = 0; place < own_.size(); ++place) {
      if (plan_->Touches(slice(place), presence)) requirement.places.push_back(place);
    }
  }
  // Held slices stay held while the requirement is valid, so over all calls each slice is checked once.
  const auto& held = entries(kind);
  while (requirement.next < requirement.places.size() && Covers(held[requirement.places[requirement.next]], attempt)) {
    ++requirement.next;
  }
  return requirement.next == requirement.places.size();
}

void SliceLedger::AddMissing(v1::SliceKind kind, absl::string_view presence, uint64_t attempt, uint32_t asker,
                             v1::SealResponse::Pending* pending) const {
  for (uint32_t place = 0; place < own_.size(); ++place) {
    if (Covers(entries(kind)[place], attempt) || !plan_->Touches(slice(place), presence)) continue;
    pending->set_missing_count(pending->missing_count() + 1);
    const bool own = slice(place).rank == asker;
    if (pending->missing_size() >= (own ? kMissingListedMax : kMissingOfOthersListedMax)) continue;
    v1::RankRange* range = pending->add_missing();
    range->set_rank(slice(place).rank);
    range->set_unit(slice(place).unit);
    range->set_begin(slice(place).range.begin);
    range->set_end(slice(place).range.end);
  }
}

std::vector<uint64_t> SliceLedger::Chunks(absl::string_view presence) const {
  std::vector<uint64_t> chunks;
  for (uint32_t place = 0; place < own_.size(); ++place) {
    if (plan_->Touches(slice(place), presence)) chunks.push_back(slice(place).chunk);
  }
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return chunks;
}

}  // namespace ballast::services
