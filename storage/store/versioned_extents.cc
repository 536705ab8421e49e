#include "ballast/storage/store/versioned_extents.h"

#include <algorithm>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::storage {

VersionedExtents::~VersionedExtents() {
  // The new versions are not recorded, so a restart will look for the old versions.
  for (NvmeExtent& extent : old_) extent.Leave();
  room_.Leave();
}

void VersionedExtents::Discard() {
  old_.clear();
  room_ = NvmeRoom();
}

uint64_t VersionedExtents::SpareBytes(uint64_t chunks, uint64_t largest_bytes) const {
  const uint64_t files = nvme_ == nullptr ? 1 : nvme_->file_count();
  return (files == 1 ? Spares(chunks) : std::max(Spares(chunks), files)) * largest_bytes;
}

uint64_t VersionedExtents::SpareBytesMissing(uint64_t chunks, uint64_t largest_bytes) const {
  const uint64_t wanted = SpareBytes(chunks, largest_bytes);
  return wanted - std::min(wanted, spare_bytes_);
}

void VersionedExtents::Forget(uint64_t id) {
  std::erase_if(written_, [id](const DurableChunk& chunk) { return chunk.id == id; });
  written_bytes_ = 0;
  for (const DurableChunk& chunk : written_) written_bytes_ += chunk.bytes;
  before_run_ = std::min(before_run_, written_bytes_);
}

void VersionedExtents::GiveBack(uint64_t bytes, uint64_t chunks, uint64_t largest_bytes) {
  const uint64_t spare_bytes = std::min(spare_bytes_, SpareBytes(chunks, largest_bytes));
  bytes += std::exchange(spare_bytes_, spare_bytes) - spare_bytes;
  room_.Split(std::min(bytes, room_.bytes()));
}

void VersionedExtents::AddRoom(NvmeRoom room, uint64_t spare_bytes) {
  room.Mark(TierPart::kSpare);
  room_.Join(std::move(room));
  spare_bytes_ += spare_bytes;
}

absl::StatusOr<NvmeExtent> VersionedExtents::Take(uint64_t bytes) {
  return nvme_->AllocateFrom(&room_, bytes, "a chunk's new version");
}

absl::Status VersionedExtents::Gather(uint64_t bytes) {
  return room_.bytes() >= bytes ? nvme_->Gather(&room_, bytes, "a chunk's new version") : absl::OkStatus();
}

void VersionedExtents::Written(const DurableChunk& chunk, NvmeExtent old) {
  written_.push_back(chunk);
  written_bytes_ += chunk.bytes;
  if (old.bytes() > 0) old_.push_back(std::move(old));
}

bool VersionedExtents::EndRun() {
  if (written_.empty()) return false;
  if (!records()) return true;
  const uint64_t run_bytes = written_bytes_ - std::exchange(before_run_, written_bytes_);
  return ++runs_ == kRunsMax || written_bytes_ + run_bytes > spare_bytes_;
}

absl::Status VersionedExtents::Record() {
  std::vector<NvmeFileId> files;
  for (const DurableChunk& chunk : written_) files.push_back(chunk.file);
  failed_ = nvme_->Sync(std::move(files));
  if (failed_.ok()) failed_ = options_.record(written_);
  return failed_;
}

absl::Status VersionedExtents::Harden() {
  if ((written_.empty() && old_.empty()) || !failed_.ok()) return failed_;
  if (records() && !written_.empty()) BALLAST_RETURN_IF_ERROR(Record());
  for (NvmeExtent& extent : old_) room_.Join(extent.TakeRoom());
  old_.clear();
  written_.clear();
  written_bytes_ = before_run_ = 0;
  runs_ = 0;
  return absl::OkStatus();
}

}  // namespace ballast::storage
