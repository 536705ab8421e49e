#include "ballast/storage/store/state_restore.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk_counters.h"
#include "ballast/storage/io/reads_ahead.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_reader.h"
#include "ballast/storage/store/read_pins.h"

namespace ballast::storage {
namespace {

// Slots for states on their way through extra memory: a state is checked while the next states come from the disk.
constexpr uint64_t kRestoreSlots = 3;

// REQUIRES: the chunk's moments are unread.
ReadAhead MomentsOf(const StoredChunk& chunk) ABSL_SHARED_LOCKS_REQUIRED(chunk.mutex) {
  const uint64_t begin = chunk.layout.ArrayAt(StateArray::kMoment1, chunk.elements);
  const uint64_t end = chunk.layout.LabelAt(chunk.elements);
  const NvmeExtent& extent = chunk.on_disk.extent();
  return {extent.offset() + begin, end - begin, chunk.memory.state() + begin, &extent.file()};
}

// Makes the working copy, where the chunk has one in host memory, from the state at `state`.
void RoundToWorking(const StoredChunk& chunk, std::byte* state, const Compute& with) {
  if (chunk.memory.working() != nullptr) RoundMaster(chunk.View(state), chunk.memory.working(), with);
}

absl::Status RoundOnDevice(const StoredChunk& chunk, HbmQueue& queue) {
  return queue.Round(chunk.View(chunk.memory.state()).master(), chunk.elements, chunk.layout.optimizer().working,
                     chunk.memory.WorkingOfDevice());
}

}  // namespace

absl::Status CheckFits(const StoredChunk& chunk, const DurableChunk& durable) {
  if (durable.elements == chunk.elements && durable.bytes == chunk.state_bytes() && durable.id == chunk.id) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                      absl::StrCat("the catalog's entry of chunk ", durable.id, " with ", durable.elements,
                                   " elements is for another chunk than ", chunk.id, " with ", chunk.elements));
}

absl::Status StateRestore::All(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks,
                               Interrupt interrupt, Dispensable dispensable) const {
  enum class Part { kLabel, kMaster, kWhole };
  std::vector<ReadAhead> reads;
  std::vector<std::pair<Part, size_t>> parts;  // of the state of which of `added`, by read
  BALLAST_ASSIGN_OR_RETURN(const Arena labels, Arena::Map(kReadsAheadMax * StateLayout::kLabelBytes));
  uint64_t slot_bytes = 0;  // of the largest read without a place of its own
  const auto add = [&](Part part, size_t i, ReadAhead read) {
    if (read.to == nullptr) slot_bytes = std::max(slot_bytes, read.bytes);
    reads.push_back(read);
    parts.emplace_back(part, i);
  };
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].durable.has_value()) continue;
    const DurableChunk& durable = *added[i].durable;
    const StoredChunk& chunk = *chunks[i];
    BALLAST_RETURN_IF_ERROR(CheckFits(chunk, durable));
    const TierKind tier = chunk.memory.tier();
    std::byte* const to = tier == TierKind::kDram ? chunk.memory.state() : nullptr;
    const BlockFile* const file = &tiers_->nvme()->file(durable.file);
    if (tier == TierKind::kHbm || chunk.layout.array_count() == 1) {
      add(Part::kWhole, i, {durable.offset, durable.bytes, to, file});
      continue;
    }
    // At most kReadsAheadMax reads are held, so a label's place is free again when its turn comes round.
    std::byte* const label = labels.bytes().data() + reads.size() % kReadsAheadMax * StateLayout::kLabelBytes;
    add(Part::kLabel, i,
        {durable.offset + chunk.layout.LabelAt(chunk.elements), StateLayout::kLabelBytes, label, file});
    add(Part::kMaster, i, {durable.offset, chunk.layout.ArrayBytes(StateArray::kMaster, chunk.elements), to, file});
  }
  if (reads.empty()) return absl::OkStatus();
  ReadSlots slots = {staging_->memory.bytes(), slot_bytes};
  Arena bounce;
  if (slot_bytes > slots.memory.size()) {
    BALLAST_ASSIGN_OR_RETURN(bounce, tiers_->dram()->Map(kRestoreSlots * slot_bytes));
    slots.memory = bounce.bytes();
  }
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, staging_->Queue(tiers_->disk()));
  std::optional<size_t> lost;  // its master comes right behind its label
  const auto take = [&](size_t i, std::byte* data, absl::FunctionRef<void()> poll) -> absl::Status {
    const auto [part, index] = parts[i];
    StoredChunk& chunk = *chunks[index];
    const DurableChunk& durable = *added[index].durable;
    const Compute with{.pool = compute_, .poll = poll};
    if (lost == index) return absl::OkStatus();
    if (part == Part::kLabel) {
      tiers_->CountTraffic(TierKind::kNvme, reads[i].bytes, 0);
      return CheckLabel(chunk, durable, data);
    }
    BALLAST_RETURN_IF_ERROR(interrupt());
    if (part == Part::kWhole) {
      BALLAST_RETURN_IF_ERROR(TakeRead(chunk, durable, data, with));
    } else {
      tiers_->CountTraffic(TierKind::kNvme, reads[i].bytes, 0);
      const WrittenState written = {reads[i].file, durable.offset, durable.digests};
      BALLAST_RETURN_IF_ERROR(CheckArray(written, chunk, StateArray::kMaster, data, with));
      RoundToWorking(chunk, data, with);
    }
    const bool unread = part == Part::kMaster && chunk.memory.tier() == TierKind::kDram;
    TakeDurable(chunk, durable, reads[i].bytes, unread);
    return absl::OkStatus();
  };
  const auto look = [&](size_t i, std::byte* data, absl::FunctionRef<void()> poll) -> absl::Status {
    const absl::Status status = take(i, data, poll);
    const size_t index = parts[i].second;
    if (!absl::IsDataLoss(status) || !dispensable(index, status)) return status;
    lost = index;
    tiers_->CountRestored(added[index].durable->bytes);
    return absl::OkStatus();
  };
  return ForEachRead(queue, reads, slots, look);
}

void StateRestore::TakeDurable(StoredChunk& chunk, const DurableChunk& durable, uint64_t read_bytes,
                               bool moments_unread) const {
  absl::MutexLock lock(&chunk.mutex);
  chunk.history.Update(ReadPins::kRestart);
  chunk.on_disk.SetDigests(durable.digests);
  if (moments_unread) chunk.on_disk.LeaveMoments();
  tiers_->CountRestored(durable.bytes);
  tiers_->CountMove(TierKind::kNvme, chunk.memory.tier(), MoveReason::kRecovery, read_bytes);
}

absl::Status StateRestore::Moments(absl::Span<StoredChunk* const> chunks, Interrupt interrupt,
                                   Dispensable dispensable) const {
  std::vector<ReadAhead> reads;
  std::vector<size_t> unread;  // of `chunks`
  for (size_t i = 0; i < chunks.size(); ++i) {
    absl::ReaderMutexLock lock(&chunks[i]->mutex);
    if (!chunks[i]->on_disk.moments_unread()) continue;
    reads.push_back(MomentsOf(*chunks[i]));
    unread.push_back(i);
  }
  if (reads.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, staging_->Queue(tiers_->disk()));
  const auto take = [&](size_t i, std::byte*, absl::FunctionRef<void()> poll) {
    BALLAST_RETURN_IF_ERROR(interrupt());
    const absl::Status taken = TakeMoments(*chunks[unread[i]], reads[i].bytes, {.pool = compute_, .poll = poll});
    return absl::IsDataLoss(taken) && dispensable(unread[i], taken) ? absl::OkStatus() : taken;
  };
  return ForEachRead(queue, reads, {}, take);
}

absl::Status StateRestore::Moments(StoredChunk& chunk) const {
  ReadAhead moments;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    if (!chunk.on_disk.moments_unread()) return absl::OkStatus();
    moments = MomentsOf(chunk);
  }
  BALLAST_RETURN_IF_ERROR(moments.file->Read(moments.offset, {moments.to, moments.bytes}));
  const auto no_poll = [] {};
  return TakeMoments(chunk, moments.bytes, {.pool = compute_, .poll = no_poll});
}

absl::Status StateRestore::TakeMoments(StoredChunk& chunk, uint64_t read_bytes, const Compute& with) const {
  WrittenState written;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    written = chunk.on_disk.written();
  }
  for (int moment = 1; moment < chunk.layout.array_count(); ++moment) {
    const auto array = static_cast<StateArray>(moment);
    const std::byte* const bytes = chunk.View(chunk.memory.state()).array(array);
    BALLAST_RETURN_IF_ERROR(CheckArray(written, chunk, array, bytes, with));
  }
  tiers_->CountTraffic(TierKind::kNvme, read_bytes, 0);
  tiers_->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kRecovery, read_bytes);
  // Readers of moments that wait for the disk have them from the extent.
  absl::MutexLock reading(&chunk.reading);
  absl::MutexLock lock(&chunk.mutex);
  chunk.on_disk.EndMoments();
  return absl::OkStatus();
}

absl::Status StateRestore::CheckLabel(const StoredChunk& chunk, const DurableChunk& durable,
                                      const std::byte* label) const {
  DurableChunk found;
  std::string job;
  uint64_t layout_bits = 0;
  if (DecodeLabel({label, StateLayout::kLabelBytes}, &found, &job, &layout_bits) && job == job_ &&
      layout_bits == LayoutBits(chunk.layout) && found.Encode() == durable.Encode()) {
    return absl::OkStatus();
  }
  ++ProcessDiskCounters().wrong_extents;
  return model::Error(
      absl::StatusCode::kDataLoss, model::kChecksum,
      absl::StrCat("the state of chunk ", chunk.id, " at version ", durable.version, " is not at offset ",
                   durable.offset, " of ", tiers_->nvme()->file(durable.file).path(),
                   ", where the catalog says: its label is damaged, or belongs to another extent. Run `ballastctl "
                   "verify`"));
}

absl::Status StateRestore::CheckArray(const WrittenState& written, const StoredChunk& chunk, StateArray array,
                                      const std::byte* bytes, const Compute& with) const {
  const uint32_t found = DigestBytes({bytes, chunk.layout.ArrayBytes(array, chunk.elements)}, with);
  return CompareDigest(written, chunk, chunk.layout, array, found);
}

absl::Status StateRestore::CheckState(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state,
                                      const Compute& with) const {
  BALLAST_RETURN_IF_ERROR(CheckLabel(chunk, durable, state + chunk.layout.LabelAt(chunk.elements)));
  const ArrayDigests digests = DigestState(chunk.View(const_cast<std::byte*>(state)), with);
  return CompareDigests({&tiers_->nvme()->file(durable.file), durable.offset, durable.digests}, chunk, digests);
}

absl::Status StateRestore::Version(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                                   const Compute& with) const {
  Arena bounce;
  if (chunk.memory.tier() == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(durable.bytes));
    state = bounce.bytes().data();
  }
  BALLAST_RETURN_IF_ERROR(tiers_->nvme()->file(durable.file).Read(durable.offset, {state, durable.bytes}));
  tiers_->CountMove(TierKind::kNvme, chunk.memory.tier(), MoveReason::kRestore, durable.bytes);
  return TakeRead(chunk, durable, state, with);
}

absl::Status StateRestore::TakeRead(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                                    const Compute& with) const {
  tiers_->CountTraffic(TierKind::kNvme, chunk.state_bytes(), 0);
  BALLAST_RETURN_IF_ERROR(CheckState(chunk, durable, state, with));
  return TakeState(chunk, state, with);
}

absl::Status StateRestore::Zero(const StoredChunk& chunk, std::byte* state, const Compute& with) const {
  Arena bounce;
  if (chunk.memory.tier() == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(chunk.state_bytes()));
    state = bounce.bytes().data();
  }
  std::memset(state, 0, chunk.state_bytes());
  return TakeState(chunk, state, with);
}

absl::Status StateRestore::Imported(const StoredChunk& chunk, const WholeState& imported, std::byte* state,
                                    const Compute& with) const {
  const bool on_device = chunk.memory.tier() == TierKind::kHbm;
  const StateView view = chunk.View(on_device ? chunk.memory.state() : state);
  tiers_->CountTraffic(on_device ? TierKind::kHbm : TierKind::kDram, 0, chunk.state_bytes());
  const auto put = [&](absl::FunctionRef<absl::Status(absl::Span<const std::byte>, std::byte*)> copy) {
    for (size_t i = 0; i < imported.arrays.size(); ++i) {
      BALLAST_RETURN_IF_ERROR(copy(imported.arrays[i].bytes, view.array(static_cast<StateArray>(i))));
    }
    return absl::OkStatus();
  };
  if (on_device) {
    return tiers_->hbm()->Run([&](HbmQueue& queue) -> absl::Status {
      BALLAST_RETURN_IF_ERROR(
          put([&](absl::Span<const std::byte> from, std::byte* to) { return queue.CopyIn(from, to); }));
      return RoundOnDevice(chunk, queue);
    });
  }
  const absl::Status copied = put([](absl::Span<const std::byte> from, std::byte* to) {
    std::memcpy(to, from.data(), from.size());
    return absl::OkStatus();
  });
  RoundToWorking(chunk, state, with);
  return copied;
}

absl::Status StateRestore::TakeState(const StoredChunk& chunk, std::byte* state, const Compute& with) const {
  if (chunk.memory.tier() == TierKind::kHbm) {
    return tiers_->hbm()->Run([&](HbmQueue& queue) -> absl::Status {
      BALLAST_RETURN_IF_ERROR(queue.CopyIn({state, chunk.state_bytes()}, chunk.memory.state()));
      return RoundOnDevice(chunk, queue);
    });
  }
  RoundToWorking(chunk, state, with);
  return absl::OkStatus();
}

}  // namespace ballast::storage
