#include "ballast/services/intake.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/seeded_bugs.h"
#include "ballast/storage/tier/dram_tier.h"

namespace ballast::services {
namespace {
constexpr std::align_val_t kAlign{storage::kIoAlignment};
constexpr uint64_t kPagesBytesMin = uint64_t{2} << 20;  // one huge page
}  // namespace

ProvisionalMemory::~ProvisionalMemory() {
  slabs_.Shrink(0);
  tiers_->Return(storage::TierKind::kDram, reserved_bytes_ + extra_bytes_);
}

absl::Status ProvisionalMemory::Reserve(uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, bytes, "slices of the step in flight"));
  if (tiers_->dram()->beside_gpu()) {
    absl::StatusOr<storage::Arena> slab = tiers_->dram()->Map(bytes);
    if (!slab.ok()) {
      tiers_->Return(storage::TierKind::kDram, bytes);
      return slab.status();
    }
    slabs_.Add(*std::move(slab));
  }
  absl::MutexLock lock(&mu_);
  reserved_bytes_ += bytes;
  return absl::OkStatus();
}

void ProvisionalMemory::Unreserve(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  reserved_bytes_ -= bytes;
  kept_.clear();
  kept_bytes_ = 0;
  slabs_.Shrink(reserved_bytes_);
  tiers_->Return(storage::TierKind::kDram, bytes);
}

uint64_t ProvisionalMemory::reserved_bytes() const {
  absl::MutexLock lock(&mu_);
  return reserved_bytes_;
}

bool ProvisionalMemory::Fits(uint64_t bytes) const {
  absl::MutexLock lock(&mu_);
  return used_bytes_ + bytes <= reserved_bytes_;
}

absl::Status ProvisionalMemory::Acquire(uint64_t bytes, storage::Arena* kept) {
  std::vector<storage::Arena> unfit;  // goes without the lock
  absl::MutexLock lock(&mu_);
  const uint64_t held = reserved_bytes_ + extra_bytes_;
  const uint64_t needed = used_bytes_ + bytes;
  const auto fits = std::find_if(kept_.begin(), kept_.end(),
                                 [&](const storage::Arena& pages) { return pages.bytes().size() == bytes; });
  if (fits != kept_.end()) {
    *kept = std::move(*fits);
    kept_.erase(fits);
    kept_bytes_ -= bytes;
  }
  while (!kept_.empty() && needed + kept_bytes_ > reserved_bytes_) {
    kept_bytes_ -= kept_.back().bytes().size();
    unfit.push_back(std::move(kept_.back()));
    kept_.pop_back();
  }
  if (needed > held) {
    BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, needed - held, "value slices beside gradients"));
    extra_bytes_ += needed - held;
  }
  used_bytes_ = needed;
  return absl::OkStatus();
}

void ProvisionalMemory::Release(uint64_t bytes, storage::Arena pages) {
  storage::Arena unfit;  // goes without the lock
  absl::MutexLock lock(&mu_);
  used_bytes_ -= bytes;
  if (pages.bytes().size() == bytes && !tiers_->dram()->beside_gpu() &&
      used_bytes_ + kept_bytes_ + bytes <= reserved_bytes_) {
    kept_bytes_ += bytes;
    kept_.push_back(std::move(pages));
  } else {
    unfit = std::move(pages);
  }
  const uint64_t needed_extra = used_bytes_ > reserved_bytes_ ? used_bytes_ - reserved_bytes_ : 0;
  if (needed_extra < extra_bytes_) {
    tiers_->Return(storage::TierKind::kDram, extra_bytes_ - needed_extra);
    extra_bytes_ = needed_extra;
  }
}

ProvisionalMemory::Buffer::Buffer(std::shared_ptr<ProvisionalMemory> memory, uint64_t bytes, absl::Span<std::byte> cut,
                                  storage::Arena pages)
    : memory_(std::move(memory)), bytes_(bytes), cut_(cut), pages_(std::move(pages)) {
  data_ = cut_.empty() ? pages_.bytes().data() : cut_.data();
  if (data_ == nullptr) data_ = static_cast<std::byte*>(::operator new(bytes, kAlign));
}

ProvisionalMemory::Buffer::~Buffer() {
  if (!cut_.empty()) {
    memory_->slabs_.Return(cut_);
  } else if (pages_.bytes().empty()) {
    ::operator delete(data_, kAlign);
  }
  memory_->Release(bytes_, std::move(pages_));
}

absl::StatusOr<std::shared_ptr<ProvisionalMemory::Buffer>> ProvisionalMemory::Allocate(
    const std::shared_ptr<ProvisionalMemory>& memory, uint64_t bytes) {
  storage::Arena pages;
  BALLAST_RETURN_IF_ERROR(memory->Acquire(bytes, &pages));
  const absl::Span<std::byte> cut = memory->slabs_.Take(bytes);
  if (bytes >= kPagesBytesMin && pages.bytes().empty() && cut.empty()) {
    absl::StatusOr<storage::Arena> mapped = storage::Arena::Map(bytes);
    if (!mapped.ok()) {
      memory->Release(bytes, {});
      return mapped.status();
    }
    pages = *std::move(mapped);
  }
  return std::make_shared<Buffer>(memory, bytes, cut, std::move(pages));
}

void Intake::Reset(const model::Chunk& chunk, const model::EpochPlan& plan) {
  ++generation_;
  chunk_ = chunk.index;
  segments_ = chunk.segments;
  norms_.assign(segments_.size(), std::nullopt);
  slots_.clear();
  for (const uint32_t index : plan.slices_of_chunk(chunk.index)) {
    const model::Range range = plan.slices()[index].range;
    slots_.push_back({index, {range.begin - chunk.range.begin, range.end - chunk.range.begin}, {}, {}});
  }
  // A running update keeps the buffer.
  if (Logs(v1::SLICE_KIND_GRADIENT)) gradient_.reset();
}

void Intake::Clear() {
  ++generation_;
  norms_.assign(segments_.size(), std::nullopt);
  for (Slot& slot : slots_) {
    slot.gradient = {};
    slot.value = {};
  }
}

void Intake::ReleaseIdle() {
  const bool idle =
      receiving_.empty() && norming_ == 0 &&
      std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.gradient.attempt.has_value(); });
  if (idle) gradient_.reset();
}

bool Intake::Logs(v1::SliceKind kind) const { return logged_ && (kind == v1::SLICE_KIND_VALUE || HasOneSlice()); }

std::vector<Intake::Slot>::const_iterator Intake::FindSlot(uint32_t slice) const {
  return std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.slice == slice; });
}

uint64_t Intake::BufferBytes(uint32_t slice, v1::SliceKind kind) const {
  const uint64_t elements = FindSlot(slice)->range.size();
  if (kind == v1::SLICE_KIND_VALUE) return elements * sizeof(float);
  if (Logs(kind)) return elements * element_bytes();
  return gradient_ == nullptr ? elements_ * element_bytes() : 0;
}

bool Intake::Busy(model::Range range) const {
  if (norming_ > 0) return true;
  const auto touches = [&](model::Range other) { return model::Intersect(range, other).size() > 0; };
  const bool logging = !Seeded(storage::StorageBug::kPayloadLeaseDropped);
  return std::any_of(receiving_.begin(), receiving_.end(), touches) ||
         (logging && std::any_of(logging_.begin(), logging_.end(), touches));
}

absl::StatusOr<Intake::Receipt> Intake::BeginReceive(uint32_t slice, v1::SliceKind kind, uint64_t attempt) {
  Receipt receipt;
  receipt.slice = static_cast<size_t>(FindSlot(slice) - slots_.begin());
  Slot* const slot = &slots_[receipt.slice];
  receipt.range = slot->range;
  receipt.kind = kind;
  receipt.attempt = attempt;
  receipt.generation = generation_;
  receipt.logged = Logs(kind);
  Held& held = slot->held(kind);
  held.attempt.reset();
  held.buffer.reset();
  held.lent = false;
  if (!Seeded(storage::StorageBug::kOldPlaceReadBack)) held.place.reset();
  const uint64_t bytes = BufferBytes(slice, kind);
  if (kind == v1::SLICE_KIND_GRADIENT) {
    for (size_t i = 0; i < segments_.size(); ++i) {
      if (model::Intersect(segments_[i].in_chunk, slot->range).size() > 0) norms_[i].reset();
    }
    if (receipt.logged) {
      BALLAST_ASSIGN_OR_RETURN(receipt.buffer, ProvisionalMemory::Allocate(memory_, bytes));
      receipt.buffer_begin = slot->range.begin;
    } else {
      if (gradient_ == nullptr) {
        BALLAST_ASSIGN_OR_RETURN(gradient_, ProvisionalMemory::Allocate(memory_, bytes));
      }
      receipt.buffer = gradient_;
    }
    receipt.to = receipt.buffer->data() + (slot->range.begin - receipt.buffer_begin) * element_bytes();
  } else {
    BALLAST_ASSIGN_OR_RETURN(receipt.buffer, ProvisionalMemory::Allocate(memory_, bytes));
    receipt.to = receipt.buffer->data();
    for (const model::Segment& segment : segments_) {
      const model::Range part = model::Intersect(segment.in_chunk, slot->range);
      if (part.size() > 0) receipt.tensors.push_back({part.begin - slot->range.begin, part.end - slot->range.begin});
    }
  }
  receiving_.push_back(slot->range);
  return receipt;
}

std::vector<Intake::Completed> Intake::EndReceive(const Receipt& receipt, bool ok) {
  receiving_.erase(std::find(receiving_.begin(), receiving_.end(), receipt.range));
  if (!ok || receipt.generation != generation_) return {};
  Hold(receipt);
  std::vector<Completed> completed = CompletedBy(receipt);
  if (!completed.empty()) ++norming_;
  return completed;
}

std::vector<Intake::Completed> Intake::CompletedBy(const Receipt& receipt) const {
  std::vector<Completed> completed;
  if (receipt.kind == v1::SLICE_KIND_VALUE) return completed;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const bool touched = model::Intersect(segments_[i].in_chunk, receipt.range).size() > 0;
    if (touched && Complete(segments_[i], receipt.attempt)) completed.push_back({i, segments_[i].in_chunk, {}});
  }
  return completed;
}

void Intake::EndRestore(const Receipt& receipt, const storage::PayloadPlace& place) {
  receiving_.erase(std::find(receiving_.begin(), receiving_.end(), receipt.range));
  Hold(receipt);
  if (!receipt.logged) return;
  std::vector<Completed> completed = CompletedBy(receipt);
  ComputeNorms(receipt, &completed);
  for (const Completed& one : completed) norms_[one.segment] = one.norm;
  Held& held = slots_[receipt.slice].held(receipt.kind);
  held.place = place;
  held.buffer.reset();
}

void Intake::Hold(const Receipt& receipt) {
  Held& held = slots_[receipt.slice].held(receipt.kind);
  held.attempt = receipt.attempt;
  if (receipt.kind == v1::SLICE_KIND_VALUE || receipt.logged) held.buffer = receipt.buffer;
}

void Intake::Void(const Receipt& receipt) {
  if (receipt.generation != generation_) return;
  Held& held = slots_[receipt.slice].held(receipt.kind);
  if (held.attempt == receipt.attempt) held = {};
}

void Intake::BeginLogging(const Receipt& receipt) {
  if (receipt.kind == v1::SLICE_KIND_GRADIENT) logging_.push_back(receipt.range);
}

void Intake::Written(const Receipt& receipt, const storage::PayloadPlace* place) {
  if (receipt.kind == v1::SLICE_KIND_GRADIENT) {
    logging_.erase(std::find(logging_.begin(), logging_.end(), receipt.range));
  }
  if (!receipt.logged || place == nullptr || receipt.generation != generation_) return;
  Held& held = slots_[receipt.slice].held(receipt.kind);
  if (held.buffer != receipt.buffer) return;
  if (!Seeded(storage::StorageBug::kOldPlaceReadBack) || !held.place.has_value()) held.place = *place;
  held.buffer.reset();
}

void Intake::HoldPlace(uint32_t slice, v1::SliceKind kind, uint64_t attempt, const storage::PayloadPlace& place) {
  Held& held = slots_[static_cast<size_t>(FindSlot(slice) - slots_.begin())].held(kind);
  held = {.attempt = attempt, .buffer = nullptr, .place = place, .lent = false};
}

absl::Status Intake::CheckFinite(const Receipt& receipt, uint32_t unit, uint64_t begin) {
  const auto* values = reinterpret_cast<const float*>(receipt.to);
  for (const model::Range part : receipt.tensors) {
    const float* bad =
        std::find_if(values + part.begin, values + part.end, [](float value) { return !std::isfinite(value); });
    if (bad == values + part.end) continue;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("element ", begin + static_cast<uint64_t>(bad - values), " of unit ", unit, " is ",
                                     *bad, "; initial values and edits must be finite"));
  }
  return absl::OkStatus();
}

bool Intake::Complete(const model::Segment& segment, uint64_t attempt) const {
  return std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return model::Intersect(segment.in_chunk, slot.range).size() == 0 || slot.gradient.attempt == attempt;
  });
}

bool Intake::Holds(const v1::StepHeader& header, uint64_t attempt) const {
  for (const model::Segment& segment : segments_) {
    const bool gradient = model::HasBit(header.gradient_presence(), segment.tensor);
    const bool value = model::HasBit(header.value_presence(), segment.tensor);
    for (const Slot& slot : slots_) {
      if (model::Intersect(segment.in_chunk, slot.range).size() == 0) continue;
      if (gradient && slot.gradient.attempt != attempt) return false;
      if (value && slot.value.attempt != attempt) return false;
    }
  }
  return true;
}

kernels::NormResult Intake::NormOf(const std::byte* gradient, uint64_t begin, model::Range range) const {
  return kernels::SquaredNorm(dtype_, gradient + (range.begin - begin) * element_bytes(), range.size());
}

void Intake::ComputeNorms(const Receipt& receipt, std::vector<Completed>* completed) const {
  for (Completed& one : *completed) one.norm = NormOf(receipt.buffer->data(), receipt.buffer_begin, one.range);
}

void Intake::StoreNorms(const Receipt& receipt, const std::vector<Completed>& completed) {
  --norming_;
  if (receipt.generation != generation_) return;
  for (const Completed& one : completed) norms_[one.segment] = one.norm;
}

v1::ChunkNorm Intake::Norm(absl::string_view gradient_presence) {
  v1::ChunkNorm out;
  out.set_chunk(chunk_);
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (!model::HasBit(gradient_presence, segments_[i].tensor)) continue;
    // After a restart: a chunk ahead of the log has no gradient for a step that its state already contains.
    if (!norms_[i].has_value() && gradient_ == nullptr) continue;
    if (!norms_[i].has_value()) norms_[i] = NormOf(gradient_->data(), 0, segments_[i].in_chunk);
    v1::SegmentNorm* segment = out.add_segments();
    segment->set_tensor(segments_[i].tensor);
    if (norms_[i]->finite) {
      segment->set_squared_norm(norms_[i]->squared_norm);
    } else {
      out.set_overflow(true);
    }
  }
  return out;
}

void Intake::TakeValues(absl::string_view presence, uint64_t attempt, storage::ChunkUpdate* update,
                        Buffers* keep) const {
  for (const Slot& slot : slots_) {
    if (slot.value.attempt != attempt || slot.value.lent) continue;
    storage::ChunkUpdate::LoggedValues logged{.place = {}, .begin = slot.range.begin, .parts = {}};
    for (const model::Segment& segment : segments_) {
      const model::Range part = model::Intersect(segment.in_chunk, slot.range);
      if (model::HasBit(presence, segment.tensor) && part.size() > 0) logged.parts.push_back({part.begin, part.end});
    }
    if (logged.parts.empty()) continue;
    if (slot.value.place.has_value()) {
      logged.place = *slot.value.place;
      update->logged_values.push_back(std::move(logged));
      continue;
    }
    const auto* values = reinterpret_cast<const float*>(slot.value.buffer->data());
    for (const storage::ChunkUpdate::LoggedValues::Part& part : logged.parts) {
      update->values.push_back(
          {part.begin, absl::MakeConstSpan(values + (part.begin - slot.range.begin), part.end - part.begin)});
    }
    keep->push_back(slot.value.buffer);
  }
}

void Intake::TakeGradient(storage::ChunkUpdate* update, Buffers* keep) const {
  const Held* const held = HasOneSlice() ? &slots_[0].gradient : nullptr;
  if (held != nullptr && held->place.has_value()) {
    update->logged_gradient = held->place;
    update->gradient_begin = slots_[0].range.begin;
  } else if (held != nullptr && held->buffer != nullptr) {
    update->gradient = {held->buffer->data(), slots_[0].range.size() * element_bytes()};
    update->gradient_begin = slots_[0].range.begin;
    keep->push_back(held->buffer);
  } else if (gradient_ != nullptr) {
    update->gradient = {gradient_->data(), elements_ * element_bytes()};
    keep->push_back(gradient_);
  }
}

}  // namespace ballast::services
