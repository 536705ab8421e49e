// How class ChunkStore answers reads, of chunks as they are now and as pins keep them.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/storage/store/coded_values.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {
namespace {

// How many working parameters from `begin` on `bytes` have room for. Of a dtype with scales the last block is read
// whole, and may have fewer elements in the chunk.
absl::StatusOr<uint64_t> ElementsOf(const StoredChunk& chunk, uint64_t begin, uint64_t bytes) {
  const kernels::Dtype dtype = chunk.layout.optimizer().working;
  const uint64_t grain = kernels::GrainOf(dtype), width = kernels::BytesOf(dtype, grain);
  if (bytes % width != 0) {
    return Bad(model::kBadLength, absl::StrCat("room for ", bytes, " bytes, expected a multiple of ", width));
  }
  if (begin % grain != 0) {
    return Bad(model::kBadRange,
               absl::StrCat("elements from ", begin, " of chunk ", chunk.index,
                            ": working parameters have a scale for each ", grain, "; begin at a multiple of that"));
  }
  uint64_t count = bytes / width * grain;
  if (begin < chunk.elements && count - (chunk.elements - begin) < grain) count = chunk.elements - begin;
  BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, begin, count));
  return count;
}

// Takes bytes of the master, to round them to `to`.
auto RoundInto(kernels::Dtype dtype, std::byte* to) {
  return [dtype, to](uint64_t at, absl::Span<const std::byte> bytes) {
    const absl::Span<const float> master(reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float));
    kernels::FromF32(master, dtype, to + kernels::BytesOf(dtype, at / sizeof(float)));
  };
}

using RawRead = absl::FunctionRef<absl::Status(uint64_t begin, uint64_t count, ChunkReader::Sink sink)>;

auto CopyInto(std::byte* to) {
  return [to](uint64_t at, absl::Span<const std::byte> bytes) { std::memcpy(to + at, bytes.data(), bytes.size()); };
}

// Elements of a frozen chunk, in the working dtype or as fp32. Values in 8 bits are read whole, into memory of their
// own.
absl::Status ReadFrozenAs(const StoredChunk& chunk, uint64_t begin, uint64_t count, kernels::Dtype dtype, std::byte* to,
                          RawRead read) {
  const StateLayout& layout = chunk.layout;
  const uint64_t width = layout.working_element_bytes();
  if (layout.form() == StateForm::kWorking) {
    if (dtype == layout.optimizer().working) return read(begin * width, count * width, CopyInto(to));
    return read(begin * width, count * width, [&](uint64_t at, absl::Span<const std::byte> bytes) {
      auto* const floats = reinterpret_cast<float*>(to) + at / width;
      kernels::ToF32(layout.optimizer().working, bytes.data(), {floats, bytes.size() / width});
    });
  }
  std::vector<std::byte> array(layout.UsedBytes(StateArray::kMaster, chunk.elements));
  BALLAST_RETURN_IF_ERROR(read(0, array.size(), CopyInto(array.data())));
  ReadFrozen(chunk.View(array.data()), begin, count, dtype, to);
  return absl::OkStatus();
}

absl::Status MasterIsLent(const StoredChunk& chunk) {
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("chunk ", chunk.index, " has its master in the trainer's memory alone: read the ",
                                   "parameter there"));
}

// Elements of a chunk that has no working copy, in the working dtype.
absl::Status ReadAsWorking(const StoredChunk& chunk, uint64_t begin, uint64_t count, std::byte* to, RawRead read) {
  const kernels::Dtype dtype = chunk.layout.optimizer().working;
  if (chunk.layout.lends_master()) return MasterIsLent(chunk);
  if (IsFrozen(chunk.layout.form())) return ReadFrozenAs(chunk, begin, count, dtype, to, read);
  // Of the last block all elements of the chunk are in the scale. Reads come in multiples of 4096 bytes, but for the
  // last.
  const uint64_t grain = kernels::GrainOf(dtype);
  const uint64_t whole = std::min((count + grain - 1) / grain * grain, chunk.elements - begin);
  return read(begin * sizeof(float), whole * sizeof(float), RoundInto(dtype, to));
}

// Elements of an array as fp32, from its bytes. A coded moment is read whole, into memory of its own.
absl::Status ReadAsF32(const StoredChunk& chunk, StateArray array, uint64_t begin, absl::Span<float> to, RawRead read) {
  const StateLayout& layout = chunk.layout;
  if (static_cast<int>(array) >= layout.array_count()) {
    return Bad(model::kBadRequest, absl::StrCat("the job's optimizer keeps ", layout.array_count() - 1,
                                                " moment(s), asked for moment ", static_cast<int>(array)));
  }
  if (to.empty()) return absl::OkStatus();
  auto* const bytes = reinterpret_cast<std::byte*>(to.data());
  if (IsFrozen(layout.form())) {
    return ReadFrozenAs(chunk, begin, to.size(), kernels::Dtype::kF32, bytes, read);
  }
  if (array == StateArray::kMaster && layout.lends_master()) return MasterIsLent(chunk);
  const kernels::MomentFormat format = layout.optimizer().moments;
  if (array == StateArray::kMaster || format == kernels::MomentFormat::kF32) {
    return read(begin * sizeof(float), to.size() * sizeof(float), CopyInto(bytes));
  }
  std::vector<std::byte> coded(layout.UsedBytes(array, chunk.elements));
  BALLAST_RETURN_IF_ERROR(read(0, coded.size(), CopyInto(coded.data())));
  const uint64_t first = begin / kernels::kMomentBlock * kernels::kMomentBlock;
  const auto* scales = reinterpret_cast<float*>(coded.data() + layout.ScalesAt(array, chunk.elements));
  const kernels::MomentSpan moment{.values = coded.data() + kernels::MomentBytes(format, first),
                                   .scales = const_cast<float*>(scales) + first / kernels::kMomentBlock};
  std::vector<float> values(begin + to.size() - first);
  kernels::ReadMoment(layout.optimizer(), static_cast<int>(array) - 1, moment, absl::MakeSpan(values));
  std::copy(values.begin() + static_cast<std::ptrdiff_t>(begin - first), values.end(), to.begin());
  return absl::OkStatus();
}

}  // namespace

absl::Status StoreCore::ReadRounded(const StoredChunk& chunk, uint64_t begin, uint64_t count, std::byte* to) {
  absl::ReaderMutexLock reading(&chunk.reading);
  const auto read = [&](uint64_t at, uint64_t bytes, ChunkReader::Sink sink) {
    chunk.reading.AssertReaderHeld();
    return buffers.reader.Read(chunk, StateArray::kMaster, at, bytes, sink);
  };
  uint64_t updated_in = 0;
  bool on_disk = false;
  {
    absl::ReaderMutexLock lock(&chunk.mutex, chunk.unchanging());
    updated_in = chunk.history.updated_in();
    on_disk = chunk.memory.tier() == TierKind::kNvme && updated_in > 0 && chunk.on_disk.staged() == nullptr;
  }
  const StateLayout& layout = chunk.layout;
  const uint64_t bytes = layout.ParameterBytes(chunk.elements);
  if (!on_disk || bytes > buffers.pulled.slot_bytes() || IsFrozen(chunk.layout.form())) {
    return ReadAsWorking(chunk, begin, count, to, read);
  }
  return buffers.pulled.Read(
      chunk.index, updated_in, bytes, layout.ParameterBytes(begin), {to, layout.ParameterBytes(count)},
      [&](absl::Span<std::byte> copy) { return ReadAsWorking(chunk, 0, chunk.elements, copy.data(), read); });
}

absl::Status ChunkStore::ReadWorking(uint64_t index, uint64_t begin, absl::Span<std::byte> to, uint32_t* crc32c) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->chunks.Find(index));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t count, ElementsOf(*chunk, begin, to.size()));
  const auto checksum = [&](absl::Status read) {
    if (crc32c != nullptr && read.ok()) *crc32c = kernels::Crc32c(to);
    return read;
  };
  {
    absl::ReaderMutexLock lock(&chunk->mutex, chunk->unchanging());
    if (chunk->memory.working() != nullptr) {
      const TierKind tier = *chunk->memory.placement().working;
      core_->tiers->CountTraffic(tier, to.size(), 0);
      const std::byte* const from = chunk->memory.working() + core_->layout.ParameterBytes(begin);
      if (tier == TierKind::kHbm) return checksum(core_->tiers->hbm()->CopyOut(from, to));
      if (crc32c != nullptr) {
        *crc32c = kernels::CopyCrc32c({from, to.size()}, to.data());
      } else {
        std::copy_n(from, to.size(), to.data());
      }
      return absl::OkStatus();
    }
  }
  return checksum(core_->ReadRounded(*chunk, begin, count, to.data()));
}

absl::Status ChunkStore::ReadState(uint64_t index, StateArray array, uint64_t begin, absl::Span<float> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->chunks.Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, to.size()));
  return ReadAsF32(*chunk, array, begin, to, [&](uint64_t at, uint64_t count, ChunkReader::Sink sink) {
    absl::ReaderMutexLock reading(&chunk->reading);
    return core_->buffers.reader.Read(*chunk, array, at, count, sink);
  });
}

absl::Status ChunkStore::Pin(int64_t pin) {
  core_->pins.Pin(pin, core_->chunks.count());
  return absl::OkStatus();
}

void ChunkStore::Unpin(int64_t pin) {
  // The chunk's record may name a copy's extent. After an error all copies stay until the store's end.
  if (!Harden().ok()) return;
  const std::optional<std::vector<uint64_t>> kept = core_->pins.Unpin(pin);
  if (!kept.has_value()) return;
  for (StoredChunk* chunk : core_->chunks.All()) {
    absl::MutexLock reading(&chunk->reading);
    absl::MutexLock lock(&chunk->mutex);
    chunk->history.DropUnused(*kept);
  }
}

std::vector<int64_t> StoreCore::PinsOf(const StoredChunk& chunk) const {
  uint64_t updated_in = 0;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    updated_in = chunk.history.updated_in();
  }
  return pins.Of(chunk.index, updated_in);
}

uint64_t ChunkStore::CopyBytes(absl::Span<const ChunkUpdate> updates) const {
  if (!core_->versions.has_value() || core_->pins.empty()) return 0;
  uint64_t bytes = 0;
  for (const ChunkUpdate& update : updates) {
    const absl::StatusOr<StoredChunk*> chunk = core_->chunks.Find(update.chunk);
    // Of a chunk that was never updated a copy is zero, and takes nothing. Pins lose a chunk that is imported.
    if (!chunk.ok() || update.imported != nullptr || !core_->versions->Of(**chunk).has_state() ||
        core_->PinsOf(**chunk).empty())
      continue;
    bytes += (*chunk)->layout.Whole().StateBytes((*chunk)->elements);
  }
  return bytes;
}

absl::Status StoreCore::ReadPinned(int64_t pin, const StoredChunk& chunk, StateArray array, uint64_t begin,
                                   uint64_t count, ChunkReader::Sink sink) {
  const absl::Status gone = model::Error(
      absl::StatusCode::kFailedPrecondition, model::kVersionGone,
      absl::StrCat("version ", pin, " of chunk ", chunk.index, " is not pinned; pin it while it is current"));
  const std::optional<uint64_t> runs_before = pins.RunsBefore(pin, chunk.index);
  if (!runs_before.has_value()) return gone;
  absl::ReaderMutexLock reading(&chunk.reading);
  bool updated = false;
  const PinnedCopy* pinned = nullptr;
  {
    absl::ReaderMutexLock lock(&chunk.mutex, chunk.unchanging());
    if (!chunk.history.Exists(*runs_before)) return gone;
    updated = chunk.history.updated_in() > *runs_before;
    pinned = chunk.history.Find(*runs_before);
  }
  if (!updated) return buffers.reader.Read(chunk, array, begin, count, sink);
  if (pinned == nullptr) return gone;  // unpinned since
  return buffers.reader.ReadCopy(chunk, *pinned, array, begin, count, sink);
}

absl::Status ChunkStore::ReadPinnedState(int64_t pin, uint64_t index, StateArray array, uint64_t begin,
                                         absl::Span<float> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->chunks.Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, to.size()));
  return ReadAsF32(*chunk, array, begin, to, [&](uint64_t at, uint64_t count, ChunkReader::Sink sink) {
    return core_->ReadPinned(pin, *chunk, array, at, count, sink);
  });
}

// The working copy is the rounded master at all times, so a pin need not keep it.
absl::Status ChunkStore::ReadPinnedWorking(int64_t pin, uint64_t index, uint64_t begin,
                                           absl::Span<std::byte> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->chunks.Find(index));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t count, ElementsOf(*chunk, begin, to.size()));
  return ReadAsWorking(*chunk, begin, count, to.data(), [&](uint64_t at, uint64_t bytes, ChunkReader::Sink sink) {
    return core_->ReadPinned(pin, *chunk, StateArray::kMaster, at, bytes, sink);
  });
}

}  // namespace ballast::storage
