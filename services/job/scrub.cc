#include "ballast/services/job/scrub.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/flushes.h"

namespace ballast::services {
namespace {

// A disk that dies may damage everything: the number of all is told beside these.
constexpr int kDamageShown = 16;

}  // namespace

absl::Status Scrub::Mend(storage::ChunkStore* store, storage::ScrubbedExtent* extent) {
  if (extent->kept || !extent->in_memory) {
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum, "this extent is the only copy of its state");
  }
  if (extent->moments_unread) {
    BALLAST_RETURN_IF_ERROR(model::Annotate(store->LoadMoments(extent->chunk),
                                            "its moments, which only the disk has since the restart, cannot be read"));
    extent->moments_unread = false;
  }
  if (!extent->dirty) return store->Rewrite(*extent);
  // Memory has a newer version, which goes to an extent of its own. Where nothing is recorded, the damaged extent
  // serves kept versions alone, and no flush brings back what they hold.
  if (!store->records()) {
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum, "memory has a newer version, which is whole");
  }
  absl::Status status = flushes_->Run(store, {&extent->chunk, 1});
  if (status.ok()) status = store->Harden();
  if (status.ok()) flushes_->Cut(*store);
  if (!status.ok()) return status;
  for (const storage::ScrubbedExtent& left : store->Extents(extent->chunk)) {
    if (!left.kept || left.entry.file != extent->entry.file || left.entry.offset != extent->entry.offset) continue;
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                        "the newest version is whole now, and a version that is kept for restores is not");
  }
  return absl::OkStatus();
}

std::string Scrub::Tell(const storage::ScrubbedExtent& extent, const absl::Status& found,
                        const absl::Status& mended) const {
  const std::string what =
      absl::StrCat("chunk ", extent.entry.id, " of job '", core_->name, "'",
                   extent.entry.version < 0 ? "" : absl::StrCat(", version ", extent.entry.version),
                   extent.kept ? ", which is kept for restores" : "", ": ", found.message());
  if (mended.ok()) {
    spdlog::warn("scrub found damage and repaired it from memory: {}", what);
    return "";
  }
  const char* const next =
      extent.kept ? "A restore of this version will be refused; everything else goes on"
      : extent.moments_unread
          ? "Pulls of parameters go on from memory until a step updates the chunk, which stops the job: "
            "restore a kept version, but copy the parameters first if you need them"
      : extent.in_memory ? "Steps go on from memory; a restart or a restore that needs this extent will be refused"
                         : "Steps go on until the state is needed, and then the job stops here: restore a kept "
                           "version, or take a copy of the model, while it still runs";
  return absl::StrCat(what, ". It cannot be repaired: ", mended.message(), ". ", next);
}

Scrub::Repair Scrub::RepairOf(storage::ScrubbedExtent extent, const absl::Status& found, storage::ChunkStore* store) {
  Repair repair;
  repair.mended = Mend(store, &extent);
  const bool lost = absl::IsDataLoss(found) && absl::IsDataLoss(repair.mended) && !extent.kept && !extent.dirty;
  bool copied = lost && damaged_->GiveUp(store, extent.chunk, found).ok();
  const bool kept = !repair.mended.ok() && (extent.kept || extent.dirty);  // the chunk has left it to its pins
  if (kept) copied = damaged_->FoundKept(*store, extent, found);
  if (!copied) repair.line = Tell(extent, found, repair.mended);
  return repair;
}

void Scrub::Next(absl::Span<std::byte> buffer) {
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok() || core_->state.recovering()) return;
    store = core_->state.store();
  }
  if (store == nullptr) return;
  const storage::ScrubPiece piece = store->ScrubNext(buffer);
  Repair repair;
  if (piece.checked.has_value() && !piece.found.ok()) repair = RepairOf(*piece.checked, piece.found, store.get());
  JobMutexLock lock(&core_->mu);
  begun_ = true;
  if (std::exchange(over_, piece.pass_over)) done_bytes_ = 0;
  read_bytes_ += piece.bytes;
  done_bytes_ += piece.bytes;
  pass_bytes_ = store->scrub_pass_bytes();
  if (piece.checked.has_value()) {
    const storage::DurableChunk& entry = piece.checked->entry;
    const Place place = {piece.checked->chunk, entry.file, entry.offset};
    if (repair.line.empty()) {
      damage_.erase(place);
    } else if (!damage_.contains(place)) {
      spdlog::error("scrub found damage: {}", repair.line);
      damage_[place] = damage_.size() < kDamageShown ? repair.line : "";
    }
    if (!piece.found.ok() && repair.mended.ok()) ++mended_;
  }
  if (piece.pass_over) EndPass(*store);
}

void Scrub::EndPass(const storage::ChunkStore& store) {
  ++passes_;
  last_pass_ns_ = absl::ToUnixNanos(absl::Now());
  // The damage of extents that nothing needs any more is over.
  for (auto at = damage_.begin(); at != damage_.end();) {
    const std::vector<storage::ScrubbedExtent> extents = store.Extents(at->first[0]);
    const bool there = std::any_of(extents.begin(), extents.end(), [&](const storage::ScrubbedExtent& extent) {
      return extent.entry.file == at->first[1] && extent.entry.offset == at->first[2];
    });
    at = there ? std::next(at) : damage_.erase(at);
  }
}

v1::ScrubStatus Scrub::Describe() const {
  v1::ScrubStatus status;
  status.set_done_bytes(done_bytes_);
  status.set_total_bytes(pass_bytes_);
  status.set_read_bytes(read_bytes_);
  status.set_passes(passes_);
  if (const absl::Time last = last_pass(); last != absl::InfinitePast()) {
    status.set_last_pass_seconds(absl::ToDoubleSeconds(last - absl::UnixEpoch()));
  }
  status.set_mended(mended_);
  status.set_damaged(damage_.size());
  for (const auto& [place, line] : damage_) {
    if (!line.empty()) status.add_damage(line);
  }
  return status;
}

}  // namespace ballast::services
