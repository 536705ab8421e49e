// Records the slices of the step in progress on one server: by kind, rank and attempt, never as a bitmap (rules 3, 6).
//
// Threads: none; the step machine's caller serialises.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::services {

class SliceLedger {
 public:
  // A new epoch: nothing is held, every rank is at attempt 0. Borrows `plan`. Pushes under way keep their places.
  // `keep`: slices of chunks that stay on this server are still held, and ranks stay at their attempts. REQUIRES then:
  // the same spec and tiling.
  void Open(const model::EpochPlan* plan, uint32_t member, bool keep = false);
  // Coverage passes over these chunks from here on, and over no others; ascending. Open passes over none.
  void PassOver(std::vector<uint64_t> chunks);
  // As PassOver with all of them but this one.
  void PassOverNoMore(uint64_t chunk);
  // The next step of the epoch: nothing is held, every rank is at attempt 0.
  void NextStep();

  // This server's place for a slice. Errors name the rule that the range broke.
  absl::StatusOr<uint32_t> FindPlace(const v1::PushRequest& header) const;
  uint32_t slice_index(uint32_t place) const { return own_[place]; }  // in the plan

  uint64_t attempt(uint32_t rank) const { return attempts_[rank]; }
  // Forgets the slices of older attempts of `rank`.
  void RaiseAttempt(uint32_t rank, uint64_t attempt);

  // Is this very slice, in its attempt, held? False also if this server has no place for it.
  bool Holds(const v1::PushRequest& header) const;
  // Digest of the held slice, of any attempt.
  std::optional<uint32_t> Held(v1::SliceKind kind, uint32_t place) const;
  void Hold(v1::SliceKind kind, uint32_t place, uint64_t attempt, uint32_t crc32c);
  // Forgets the slice if it is of this attempt.
  void Lose(v1::SliceKind kind, uint32_t place, uint64_t attempt);

  // Reserves the slice's place for its push. A place has one writer at a time, also across steps, attempts and epochs,
  // because bytes of an overtaken push may still arrive. Bound: one push per place.
  bool TakePlace(const v1::PushRequest& header);
  void FreePlace(const v1::PushRequest& header);

  // Does this server hold, in exactly this attempt, all its slices that touch a tensor of the bitmap?
  bool Covered(v1::SliceKind kind, absl::string_view presence, uint64_t attempt) {
    return Require(kind, presence, attempt).missing == 0;
  }
  // The chunks passed over that lack a slice of the bitmap in this attempt, ascending.
  std::vector<uint64_t> Lacking(v1::SliceKind kind, absl::string_view presence, uint64_t attempt) const;
  // Is the place's chunk passed over?
  bool Passes(uint32_t place) const;
  // Adds the slices that Covered lacks to `pending`: their number, and a bounded list of ranges. The list has slices of
  // `asker`, and the first of some other ranks. It searches only the asker's slices.
  void AddMissing(v1::SliceKind kind, absl::string_view presence, uint64_t attempt, uint32_t asker,
                  v1::SealResponse::Pending* pending);
  // This server's chunks that hold a part of a tensor of the bitmap, in registration order.
  std::vector<uint64_t> Chunks(absl::string_view presence) const;

 private:
  struct Entry {
    bool held = false;
    uint64_t attempt = 0;
    uint32_t crc32c = 0;
  };
  // The places that a presence bitmap requires, and how many of them are not covered. Made once for a step's bitmap,
  // then kept true place by place, so that neither a push nor a question looks at all places.
  struct Requirement {
    struct OfRank {
      uint32_t missing = 0;
      uint32_t next = 0;  // none of the rank's places before this one is missing
    };
    std::string presence;
    uint64_t attempt = 0;
    std::vector<bool> required;  // by place
    std::vector<OfRank> ranks;
    uint64_t missing = 0;
    bool valid = false;
  };

  std::vector<Entry>& entries(v1::SliceKind kind) { return entries_[kind == v1::SLICE_KIND_VALUE]; }
  const std::vector<Entry>& entries(v1::SliceKind kind) const { return entries_[kind == v1::SLICE_KIND_VALUE]; }
  const model::Slice& slice(uint32_t place) const { return plan_->slices()[own_[place]]; }
  absl::Span<const uint32_t> places_of(uint32_t rank) const {
    return absl::MakeConstSpan(by_rank_).subspan(rank_begins_[rank], rank_begins_[rank + 1] - rank_begins_[rank]);
  }
  static bool Covers(const Entry& entry, uint64_t attempt);
  void Set(v1::SliceKind kind, uint32_t place, const Entry& next);
  Requirement& Require(v1::SliceKind kind, absl::string_view presence, uint64_t attempt);
  // Adds up to `count` of the rank's missing slices.
  void AddMissingOf(uint32_t rank, v1::SliceKind kind, uint32_t count, Requirement* requirement,
                    v1::SealResponse::Pending* pending);
  void Forget();

  const model::EpochPlan* plan_ = nullptr;
  std::vector<uint32_t> own_;  // place -> index into the plan's slices; ascending
  std::vector<uint64_t> passed_;
  // Places, by rank; those of rank r begin at rank_begins_[r].
  std::vector<uint32_t> by_rank_, rank_begins_;
  std::vector<Entry> entries_[2];
  std::vector<uint64_t> attempts_;  // by rank
  Requirement requirements_[2];
  // (kind, unit, chunk of the unit) -> ranges being written. Chunks never move, so the key outlives epochs.
  absl::flat_hash_map<std::tuple<int, uint32_t, uint64_t>, std::vector<model::Range>> writing_;
};

}  // namespace ballast::services
