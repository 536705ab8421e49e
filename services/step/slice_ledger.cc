#include "ballast/services/step/slice_ledger.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// Bounds on the missing slices listed in an answer. The asking rank sends its slices again; slices of
// other ranks are listed for messages only.
constexpr uint32_t kMissingListedMax = 4096;
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

void SliceLedger::Open(const model::EpochPlan* plan, uint32_t member, bool keep) {
  plan_ = plan;
  passed_.clear();
  const std::vector<uint32_t> own = std::exchange(own_, {});
  for (uint32_t i = 0; i < plan->slices().size(); ++i) {
    if (plan->Has(member, plan->slices()[i].chunk)) own_.push_back(i);
  }
  rank_begins_.assign(plan->world_size() + 1, 0);
  for (uint32_t place = 0; place < own_.size(); ++place) ++rank_begins_[slice(place).rank + 1];
  std::partial_sum(rank_begins_.begin(), rank_begins_.end(), rank_begins_.begin());
  by_rank_.resize(own_.size());
  std::vector<uint32_t> next(rank_begins_.begin(), rank_begins_.end() - 1);
  for (uint32_t place = 0; place < own_.size(); ++place) by_rank_[next[slice(place).rank]++] = place;
  std::vector<Entry> held[2] = {std::move(entries_[0]), std::move(entries_[1])};
  for (auto& entries : entries_) entries.assign(own_.size(), Entry{});
  Forget();
  if (!keep) {
    attempts_.assign(plan->world_size(), 0);
    return;
  }
  for (uint32_t place = 0; place < own_.size(); ++place) {
    const auto was = std::lower_bound(own.begin(), own.end(), own_[place]);
    if (was == own.end() || *was != own_[place]) continue;
    for (int kind : {0, 1}) entries_[kind][place] = held[kind][was - own.begin()];
  }
}

void SliceLedger::PassOver(std::vector<uint64_t> chunks) {
  passed_ = std::move(chunks);
  Forget();
}

void SliceLedger::PassOverNoMore(uint64_t chunk) {
  const auto passed = std::lower_bound(passed_.begin(), passed_.end(), chunk);
  if (passed == passed_.end() || *passed != chunk) return;
  passed_.erase(passed);
  for (const uint32_t index : plan_->slices_of_chunk(chunk)) {
    const auto own = std::lower_bound(own_.begin(), own_.end(), index);
    if (own == own_.end() || *own != index) continue;
    const auto place = static_cast<uint32_t>(own - own_.begin());
    for (int kind : {0, 1}) {
      Requirement& requirement = requirements_[kind];
      if (!requirement.valid || !plan_->Touches(slice(place), requirement.presence)) continue;
      requirement.required[place] = true;
      if (Covers(entries_[kind][place], requirement.attempt)) continue;
      ++requirement.missing;
      Requirement::OfRank& rank = requirement.ranks[slice(place).rank];
      ++rank.missing;
      rank.next = 0;
    }
  }
}

bool SliceLedger::Passes(uint32_t place) const {
  return std::binary_search(passed_.begin(), passed_.end(), slice(place).chunk);
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
    return BadRange(model::kBadRequest, absl::StrCat("chunk ", chunk, " lies on server ", plan_->ShowServersOf(chunk),
                                                     "; send its slices there"));
  }
  return static_cast<uint32_t>(it - own_.begin());
}

void SliceLedger::RaiseAttempt(uint32_t rank, uint64_t attempt) {
  attempts_[rank] = attempt;
  for (const uint32_t place : places_of(rank)) {
    for (const v1::SliceKind kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) Set(kind, place, Entry{});
  }
}

bool SliceLedger::Holds(const v1::PushRequest& header) const {
  const auto slice = plan_->FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
  if (!slice.has_value()) return false;
  const auto it = std::lower_bound(own_.begin(), own_.end(), *slice);
  if (it == own_.end() || *it != *slice) return false;
  return Covers(entries(header.kind())[static_cast<size_t>(it - own_.begin())], header.attempt());
}

std::optional<uint32_t> SliceLedger::Held(v1::SliceKind kind, uint32_t place) const {
  const Entry& entry = entries(kind)[place];
  if (!entry.held) return std::nullopt;
  return entry.crc32c;
}

void SliceLedger::Set(v1::SliceKind kind, uint32_t place, const Entry& next) {
  Entry& entry = entries(kind)[place];
  Requirement& requirement = requirements_[kind == v1::SLICE_KIND_VALUE];
  if (requirement.valid && requirement.required[place]) {
    const bool covered = Covers(entry, requirement.attempt), covers = Covers(next, requirement.attempt);
    Requirement::OfRank& rank = requirement.ranks[slice(place).rank];
    if (covered && !covers) {
      ++requirement.missing;
      ++rank.missing;
      rank.next = 0;
    } else if (!covered && covers) {
      --requirement.missing;
      --rank.missing;
    }
  }
  entry = next;
}

void SliceLedger::Hold(v1::SliceKind kind, uint32_t place, uint64_t attempt, uint32_t crc32c) {
  Set(kind, place, Entry{true, attempt, crc32c});
}

void SliceLedger::Lose(v1::SliceKind kind, uint32_t place, uint64_t attempt) {
  if (entries(kind)[place].attempt == attempt) Set(kind, place, Entry{});
}

bool SliceLedger::TakePlace(const v1::PushRequest& header) {
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

bool SliceLedger::Covers(const Entry& entry, uint64_t attempt) { return entry.held && entry.attempt == attempt; }

SliceLedger::Requirement& SliceLedger::Require(v1::SliceKind kind, absl::string_view presence, uint64_t attempt) {
  Requirement& requirement = requirements_[kind == v1::SLICE_KIND_VALUE];
  if (requirement.valid && requirement.attempt == attempt && requirement.presence == presence) return requirement;
  requirement = Requirement{std::string(presence),
                            attempt,
                            std::vector<bool>(own_.size()),
                            std::vector<Requirement::OfRank>(plan_->world_size()),
                            /*missing=*/0,
                            /*valid=*/true};
  for (uint32_t place = 0; place < own_.size(); ++place) {
    if (!plan_->Touches(slice(place), presence)) continue;
    if (Passes(place)) continue;
    requirement.required[place] = true;
    if (Covers(entries(kind)[place], attempt)) continue;
    ++requirement.missing;
    ++requirement.ranks[slice(place).rank].missing;
  }
  return requirement;
}

std::vector<uint64_t> SliceLedger::Lacking(v1::SliceKind kind, absl::string_view presence, uint64_t attempt) const {
  std::vector<uint64_t> chunks;
  for (uint32_t place = 0; place < own_.size() && !passed_.empty(); ++place) {
    const model::Slice& slice = this->slice(place);
    if (Covers(entries(kind)[place], attempt) || !plan_->Touches(slice, presence)) continue;
    if (Passes(place)) chunks.push_back(slice.chunk);
  }
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return chunks;
}

void SliceLedger::AddMissingOf(uint32_t rank, v1::SliceKind kind, uint32_t count, Requirement* requirement,
                               v1::SealResponse::Pending* pending) {
  Requirement::OfRank& of_rank = requirement->ranks[rank];
  const absl::Span<const uint32_t> places = places_of(rank);
  const auto missing = [&](uint32_t i) {
    return requirement->required[places[i]] && !Covers(entries(kind)[places[i]], requirement->attempt);
  };
  uint32_t left = std::min(count, of_rank.missing);
  if (left > 0) {
    while (!missing(of_rank.next)) ++of_rank.next;
  }
  for (uint32_t i = of_rank.next; left > 0; ++i) {
    if (!missing(i)) continue;
    --left;
    const model::Slice& slice = this->slice(places[i]);
    v1::RankRange* range = pending->add_missing();
    range->set_rank(slice.rank);
    range->set_unit(slice.unit);
    range->set_begin(slice.range.begin);
    range->set_end(slice.range.end);
  }
}

void SliceLedger::AddMissing(v1::SliceKind kind, absl::string_view presence, uint64_t attempt, uint32_t asker,
                             v1::SealResponse::Pending* pending) {
  Requirement& requirement = Require(kind, presence, attempt);
  pending->set_missing_count(pending->missing_count() + requirement.missing);
  if (asker < requirement.ranks.size()) {
    const auto listed = static_cast<uint32_t>(pending->missing_size());
    AddMissingOf(asker, kind, kMissingListedMax - listed, &requirement, pending);
  }
  for (uint32_t rank = 0; rank < requirement.ranks.size() && pending->missing_size() < kMissingOfOthersListedMax;
       ++rank) {
    if (rank != asker) AddMissingOf(rank, kind, 1, &requirement, pending);
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
