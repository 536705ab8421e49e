#include "ballast/services/intake.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/seeded_bugs.h"

namespace ballast::services {
namespace {
constexpr std::align_val_t kAlign{storage::kIoAlignment};
constexpr uint64_t kPagesBytesMin = uint64_t{2} << 20;  // one huge page
}  // namespace

ProvisionalMemory::~ProvisionalMemory() { tiers_->Return(storage::TierKind::kDram, reserved_bytes_ + extra_bytes_); }

absl::Status ProvisionalMemory::Reserve(uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, bytes, "slices of the step in flight"));
  absl::MutexLock lock(&mu_);
  reserved_bytes_ += bytes;
  return absl::OkStatus();
}

void ProvisionalMemory::Unreserve(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  reserved_bytes_ -= bytes;
  tiers_->Return(storage::TierKind::kDram, bytes);
}

absl::Status ProvisionalMemory::Acquire(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  const uint64_t held = reserved_bytes_ + extra_bytes_;
  const uint64_t needed = used_bytes_ + bytes;
  if (needed > held) {
    BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, needed - held, "value slices beside gradients"));
    extra_bytes_ += needed - held;
  }
  used_bytes_ = needed;
  return absl::OkStatus();
}

void ProvisionalMemory::Release(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  used_bytes_ -= bytes;
  const uint64_t needed_extra = used_bytes_ > reserved_bytes_ ? used_bytes_ - reserved_bytes_ : 0;
  if (needed_extra < extra_bytes_) {
    tiers_->Return(storage::TierKind::kDram, extra_bytes_ - needed_extra);
    extra_bytes_ = needed_extra;
  }
}

ProvisionalMemory::Buffer::Buffer(std::shared_ptr<ProvisionalMemory> memory, uint64_t bytes, storage::Arena pages)
    : memory_(std::move(memory)),
      bytes_(bytes),
      pages_(std::move(pages)),
      data_(pages_.bytes().empty() ? static_cast<std::byte*>(::operator new(bytes, kAlign)) : pages_.bytes().data()) {}

ProvisionalMemory::Buffer::~Buffer() {
  if (pages_.bytes().empty()) ::operator delete(data_, kAlign);
  pages_ = storage::Arena();
  memory_->Release(bytes_);
}

absl::StatusOr<std::shared_ptr<ProvisionalMemory::Buffer>> ProvisionalMemory::Allocate(
    const std::shared_ptr<ProvisionalMemory>& memory, uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(memory->Acquire(bytes));
  storage::Arena pages;
  if (bytes >= kPagesBytesMin) {
    absl::StatusOr<storage::Arena> mapped = storage::Arena::Map(bytes, /*pin=*/false);
    if (!mapped.ok()) {
      memory->Release(bytes);
      return mapped.status();
    }
    pages = *std::move(mapped);
  }
  return std::make_shared<Buffer>(memory, bytes, std::move(pages));
}

void Intake::Reset(const model::Chunk& chunk, const model::EpochPlan& plan) {
  ++generation_;
  chunk_ = chunk.index;
  segments_ = chunk.segments;
  norms_.assign(segments_.size(), std::nullopt);
  slots_.clear();
  for (const uint32_t index : plan.slices_of_chunk(chunk.index)) {
    const model::Range range = plan.slices()[index].range;
    slots_.push_back({index, {range.begin - chunk.range.begin, range.end - chunk.range.begin}, {}, {}, nullptr});
  }
}

void Intake::Clear() {
  ++generation_;
  norms_.assign(segments_.size(), std::nullopt);
  for (Slot& slot : slots_) {
    slot.gradient_attempt.reset();
    slot.value_attempt.reset();
    slot.values.reset();
  }
}

void Intake::ReleaseIdle() {
  const bool idle =
      receiving_.empty() && norming_ == 0 &&
      std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.gradient_attempt.has_value(); });
  if (idle) gradient_.reset();
}

bool Intake::Busy(model::Range range) const {
  if (norming_ > 0) return true;
  const auto touches = [&](model::Range other) { return model::Intersect(range, other).size() > 0; };
  const bool logging = !Seeded(storage::StorageBug::kPayloadLeaseDropped);
  return std::any_of(receiving_.begin(), receiving_.end(), touches) ||
         (logging && std::any_of(logging_.begin(), logging_.end(), touches));
}

absl::StatusOr<Intake::Receipt> Intake::BeginReceive(uint32_t slice, v1::SliceKind kind, uint64_t attempt) {
  const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.slice == slice; });
  Receipt receipt{
      static_cast<size_t>(slot - slots_.begin()), slot->range, kind, attempt, generation_, nullptr, nullptr};
  if (kind == v1::SLICE_KIND_GRADIENT) {
    if (gradient_ == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(gradient_, ProvisionalMemory::Allocate(memory_, elements_ * element_bytes()));
    }
    receipt.buffer = gradient_;
    receipt.to = gradient_->data() + slot->range.begin * element_bytes();
    slot->gradient_attempt.reset();
    for (size_t i = 0; i < segments_.size(); ++i) {
      if (model::Intersect(segments_[i].in_chunk, slot->range).size() > 0) norms_[i].reset();
    }
  } else {
    slot->value_attempt.reset();
    slot->values.reset();
    BALLAST_ASSIGN_OR_RETURN(receipt.buffer, ProvisionalMemory::Allocate(memory_, slot->range.size() * sizeof(float)));
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
  if (receipt.kind == v1::SLICE_KIND_VALUE) return {};
  const Slot& slot = slots_[receipt.slice];
  std::vector<Completed> completed;
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (model::Intersect(segments_[i].in_chunk, slot.range).size() > 0 && Complete(segments_[i], receipt.attempt)) {
      completed.push_back({i, segments_[i].in_chunk, {}});
    }
  }
  if (!completed.empty()) ++norming_;
  return completed;
}

void Intake::EndRestore(const Receipt& receipt) {
  receiving_.erase(std::find(receiving_.begin(), receiving_.end(), receipt.range));
  Hold(receipt);
}

void Intake::Hold(const Receipt& receipt) {
  Slot& slot = slots_[receipt.slice];
  if (receipt.kind == v1::SLICE_KIND_VALUE) {
    slot.value_attempt = receipt.attempt;
    slot.values = receipt.buffer;
  } else {
    slot.gradient_attempt = receipt.attempt;
  }
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
    return model::Intersect(segment.in_chunk, slot.range).size() == 0 || slot.gradient_attempt == attempt;
  });
}

bool Intake::Holds(const v1::StepHeader& header, uint64_t attempt) const {
  for (const model::Segment& segment : segments_) {
    const bool gradient = model::HasBit(header.gradient_presence(), segment.tensor);
    const bool value = model::HasBit(header.value_presence(), segment.tensor);
    for (const Slot& slot : slots_) {
      if (model::Intersect(segment.in_chunk, slot.range).size() == 0) continue;
      if (gradient && slot.gradient_attempt != attempt) return false;
      if (value && slot.value_attempt != attempt) return false;
    }
  }
  return true;
}

kernels::NormResult Intake::NormOf(const std::byte* gradient, model::Range range) const {
  return kernels::SquaredNorm(dtype_, gradient + range.begin * element_bytes(), range.size());
}

void Intake::ComputeNorms(const Receipt& receipt, std::vector<Completed>* completed) const {
  for (Completed& one : *completed) one.norm = NormOf(receipt.buffer->data(), one.range);
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
    // After a restart: a chunk that was ahead of the log has no gradient for a step that it already holds.
    if (!norms_[i].has_value() && gradient_ == nullptr) continue;
    if (!norms_[i].has_value()) norms_[i] = NormOf(gradient().data(), segments_[i].in_chunk);
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

std::vector<storage::ChunkUpdate::Values> Intake::Values(
    absl::string_view presence, uint64_t attempt, std::vector<std::shared_ptr<ProvisionalMemory::Buffer>>* keep) const {
  std::vector<storage::ChunkUpdate::Values> out;
  for (const Slot& slot : slots_) {
    if (slot.value_attempt != attempt) continue;
    const auto* values = reinterpret_cast<const float*>(slot.values->data());
    bool used = false;
    for (const model::Segment& segment : segments_) {
      if (!model::HasBit(presence, segment.tensor)) continue;
      const model::Range part = model::Intersect(segment.in_chunk, slot.range);
      if (part.size() == 0) continue;
      out.push_back({part.begin, absl::MakeConstSpan(values + (part.begin - slot.range.begin), part.size())});
      used = true;
    }
    if (used) keep->push_back(slot.values);
  }
  return out;
}

absl::Span<const std::byte> Intake::gradient() const {
  if (gradient_ == nullptr) return {};
  return {gradient_->data(), elements_ * element_bytes()};
}

}  // namespace ballast::services
