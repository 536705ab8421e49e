// Which slices of the step in progress one server holds: by kind, rank and attempt, never as a bitmap (rules 3 and 6).
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
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::services {

class SliceLedger {
 public:
  // A new epoch: nothing is held, every rank is at attempt 0. Borrows `plan`. Pushes under way keep their places.
  void Open(const model::EpochPlan* plan, uint32_t member);
  // The next step: as above, in the same epoch.
  void NextStep();

  // Where this server keeps a slice. Errors say which rule the range broke.
  absl::StatusOr<uint32_t> FindPlace(const v1::PushRequest& header) const;

  uint64_t attempt(uint32_t rank) const { return attempts_[rank]; }
  // Everything that `rank` pushed in older attempts is forgotten.
  void RaiseAttempt(uint32_t rank, uint64_t attempt);

  // Digest of the slice that is held, whatever its attempt.
  std::optional<uint32_t> Held(v1::SliceKind kind, uint32_t place) const;
  void Hold(v1::SliceKind kind, uint32_t place, uint64_t attempt, uint32_t crc32c);
  // What was held of that attempt is not any more.
  void Lose(v1::SliceKind kind, uint32_t place, uint64_t attempt);

  // A place takes one writer at a time, over steps, attempts and epochs: bytes of an overtaken push may still be
  // coming. Bound: one per place.
  bool TakePlace(const v1::PushRequest& header);
  void FreePlace(const v1::PushRequest& header);

  // Has every slice of this server that touches a tensor of the bitmap come in exactly this attempt?
  bool Covered(v1::SliceKind kind, absl::string_view presence, uint64_t attempt);
  // Adds what Covered misses to `pending`, up to its bounds on ranges: of rank `asker`, and of others.
  void AddMissing(v1::SliceKind kind, absl::string_view presence, uint64_t attempt, uint32_t asker,
                  v1::SealResponse::Pending* pending) const;
  // This server's chunks that hold a part of a tensor of the bitmap, in registration order.
  std::vector<uint64_t> Chunks(absl::string_view presence) const;

 private:
  struct Entry {
    bool held = false;
    uint64_t attempt = 0;
    uint32_t crc32c = 0;
  };
  // What one presence bitmap asks for, and how far it is covered: places before `next` are.
  struct Requirement {
    std::string presence;
    uint64_t attempt = 0;
    std::vector<uint32_t> places;
    size_t next = 0;
    bool valid = false;
  };

  std::vector<Entry>& entries(v1::SliceKind kind) { return entries_[kind == v1::SLICE_KIND_VALUE]; }
  const std::vector<Entry>& entries(v1::SliceKind kind) const { return entries_[kind == v1::SLICE_KIND_VALUE]; }
  const model::Slice& slice(uint32_t place) const { return plan_->slices()[own_[place]]; }
  static bool Covers(const Entry& entry, uint64_t attempt);
  void Forget();

  const model::EpochPlan* plan_ = nullptr;
  std::vector<uint32_t> own_;  // place -> index into the plan's slices; ascending
  std::vector<Entry> entries_[2];
  std::vector<uint64_t> attempts_;  // by rank
  Requirement requirements_[2];
  // (kind, unit, chunk of the unit) -> ranges being written. Chunks never move, so the key outlives epochs.
  absl::flat_hash_map<std::tuple<int, uint32_t, uint64_t>, std::vector<model::Range>> writing_;
};

}  // namespace ballast::services
