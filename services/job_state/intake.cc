#include "ballast/services/job_state/intake.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// The largest fp32 that is finite once it is rounded to `dtype`, to nearest even.
float LargestIn(kernels::Dtype dtype) {
  if (dtype == kernels::Dtype::kF16) return 65519.996f;
  if (dtype == kernels::Dtype::kBf16) return std::bit_cast<float>(0x7f7f7fffu);
  return std::numeric_limits<float>::max();
}

}  // namespace

Intake::Intake(std::shared_ptr<SliceMemory> memory, uint64_t elements, kernels::Dtype gradient, bool logged,
               kernels::Dtype values)
    : memory_(std::move(memory)),
      elements_(elements),
      dtype_(gradient),
      logged_(logged),
      value_max_(LargestIn(values)) {}

void Intake::Reset(const model::Chunk& chunk, const model::EpochPlan& plan) {
  ++generation_;
  chunk_ = chunk.index;
  segments_ = chunk.segments;
  norm_counts_ = chunk.assist != v1::ASSIST_UPDATE;
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
  const bool idle = busy_.empty() && norming_ == 0 && std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
                      return slot.gradient.attempt.has_value();
                    });
  if (idle) gradient_.reset();
}

bool Intake::Logs(v1::SliceKind kind) const { return logged_ && (kind == v1::SLICE_KIND_VALUE || HasOneSlice()); }

bool Intake::TakesLent(v1::SliceKind kind) const {
  return kind == v1::SLICE_KIND_GRADIENT && !logged_ && HasOneSlice();
}

std::vector<Intake::Slot>::const_iterator Intake::FindSlot(uint32_t slice) const {
  return std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.slice == slice; });
}

uint64_t Intake::BufferBytes(const Slot& slot, v1::SliceKind kind) const {
  const uint64_t elements = slot.range.size();
  if (kind == v1::SLICE_KIND_VALUE) return elements * sizeof(float);
  if (Logs(kind)) return elements * element_bytes();
  return gradient_ == nullptr ? elements_ * element_bytes() : 0;
}

bool Intake::Busy(model::Range range) const {
  return norming_ > 0 || std::any_of(busy_.begin(), busy_.end(),
                                     [&](model::Range other) { return model::Intersect(range, other).size() > 0; });
}

Intake::Outlook Intake::LookFor(uint32_t slice, v1::SliceKind kind) const {
  const Slot& slot = *FindSlot(slice);
  return {.busy = Busy(slot.range), .logged = Logs(kind), .buffer_bytes = BufferBytes(slot, kind)};
}

absl::StatusOr<Intake::Receipt> Intake::BeginReceive(uint32_t slice, v1::SliceKind kind, uint64_t attempt,
                                                     std::shared_ptr<SliceMemory::Buffer> lent) {
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
  held.place.reset();
  const uint64_t bytes = BufferBytes(*slot, kind);
  if (kind == v1::SLICE_KIND_GRADIENT) {
    for (size_t i = 0; i < segments_.size(); ++i) {
      if (model::Intersect(segments_[i].in_chunk, slot->range).size() > 0) norms_[i].reset();
    }
    if (lent != nullptr) {
      receipt.buffer = std::move(lent);
      receipt.buffer_begin = slot->range.begin;
    } else if (receipt.logged) {
      BALLAST_ASSIGN_OR_RETURN(receipt.buffer, SliceMemory::Allocate(memory_, bytes));
      receipt.buffer_begin = slot->range.begin;
    } else {
      if (gradient_ == nullptr) {
        BALLAST_ASSIGN_OR_RETURN(gradient_, SliceMemory::Allocate(memory_, bytes));
      }
      receipt.buffer = gradient_;
    }
    receipt.to = receipt.buffer->data() + (slot->range.begin - receipt.buffer_begin) * element_bytes();
  } else {
    BALLAST_ASSIGN_OR_RETURN(receipt.buffer, SliceMemory::Allocate(memory_, bytes));
    receipt.to = receipt.buffer->data();
    for (const model::Segment& segment : segments_) {
      const model::Range part = model::Intersect(segment.in_chunk, slot->range);
      if (part.size() > 0) receipt.tensors.push_back({part.begin - slot->range.begin, part.end - slot->range.begin});
    }
  }
  busy_.push_back(slot->range);
  return receipt;
}

void Intake::Free(const Receipt& receipt) { busy_.erase(std::find(busy_.begin(), busy_.end(), receipt.range)); }

std::vector<Intake::Completed> Intake::EndReceive(const Receipt& receipt, bool ok) {
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
  Free(receipt);
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
  const bool lent = receipt.buffer->lent() != nullptr;
  if (receipt.kind == v1::SLICE_KIND_VALUE || receipt.logged || lent) held.buffer = receipt.buffer;
}

void Intake::Unlogged(const Receipt& receipt, bool taken) {
  Free(receipt);
  if ((taken && !receipt.logged) || receipt.generation != generation_) return;
  Held& held = slots_[receipt.slice].held(receipt.kind);
  if (held.attempt == receipt.attempt) held = {};
}

void Intake::Written(const Receipt& receipt, const storage::PayloadPlace* place) {
  Free(receipt);
  if (!receipt.logged || place == nullptr || receipt.generation != generation_) return;
  Held& held = slots_[receipt.slice].held(receipt.kind);
  if (held.buffer != receipt.buffer) return;
  held.place = *place;
  held.buffer.reset();
}

void Intake::HoldPlace(uint32_t slice, v1::SliceKind kind, uint64_t attempt, const storage::PayloadPlace& place) {
  Held& held = slots_[static_cast<size_t>(FindSlot(slice) - slots_.begin())].held(kind);
  held = {.attempt = attempt, .buffer = nullptr, .place = place, .lent = false};
}

std::optional<uint64_t> Intake::FindNotFinite(const Receipt& receipt) const {
  const auto* values = reinterpret_cast<const float*>(receipt.to);
  for (const model::Range part : receipt.tensors) {
    const float* bad = std::find_if(values + part.begin, values + part.end,
                                    [this](float value) { return !(std::abs(value) <= value_max_); });
    if (bad != values + part.end) return static_cast<uint64_t>(bad - values);
  }
  return std::nullopt;
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
    if (!norms_[i]->finite) out.set_overflow(true);
    if (!norm_counts_) continue;
    v1::SegmentNorm* segment = out.add_segments();
    segment->set_tensor(segments_[i].tensor);
    if (norms_[i]->finite) segment->set_squared_norm(norms_[i]->squared_norm);
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

void Intake::HoldLent(uint32_t slice, v1::SliceKind kind, uint64_t attempt) {
  Slot& slot = slots_[static_cast<size_t>(FindSlot(slice) - slots_.begin())];
  slot.held(kind) = {.attempt = attempt, .buffer = nullptr, .place = std::nullopt, .lent = true};
  if (kind == v1::SLICE_KIND_VALUE) return;
  for (size_t i = 0; i < segments_.size(); ++i) {
    // A tensor without a gradient counts as if zeros had been pushed for it.
    if (model::Intersect(segments_[i].in_chunk, slot.range).size() > 0) norms_[i] = kernels::NormResult{0, true};
  }
}

void Intake::StoreLentNorm(size_t segment, uint64_t generation, const kernels::NormResult& norm) {
  if (generation == generation_) norms_[segment] = norm;
}

bool Intake::lent(v1::SliceKind kind) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.held(kind).lent; });
}

void Intake::VoidLent() {
  for (Slot& slot : slots_) {
    for (const v1::SliceKind kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) {
      if (slot.held(kind).lent) slot.held(kind) = {};
    }
  }
}

absl::Status Intake::CopyLent(const model::Chunk& chunk, const LentMemory& lent) {
  if (this->lent(v1::SLICE_KIND_GRADIENT)) {
    if (gradient_ == nullptr) {
      BALLAST_ASSIGN_OR_RETURN(gradient_, SliceMemory::Allocate(memory_, elements_ * element_bytes()));
    }
    for (const model::Segment& segment : segments_) {
      std::byte* const to = gradient_->data() + segment.in_chunk.begin * element_bytes();
      const std::byte* const from = lent.Gradient(chunk, segment.tensor, segment.in_chunk.begin);
      if (from != nullptr) std::memcpy(to, from, segment.in_chunk.size() * element_bytes());
    }
    for (Slot& slot : slots_) slot.gradient.lent = false;
  }
  for (Slot& slot : slots_) {
    if (!slot.value.lent) continue;
    BALLAST_ASSIGN_OR_RETURN(slot.value.buffer, SliceMemory::Allocate(memory_, slot.range.size() * sizeof(float)));
    auto* const values = reinterpret_cast<float*>(slot.value.buffer->data());
    for (const model::Segment& segment : segments_) {
      const model::Range part = model::Intersect(segment.in_chunk, slot.range);
      const std::byte* const from = part.size() > 0 ? lent.Value(chunk, segment.tensor, part.begin) : nullptr;
      if (from == nullptr) continue;
      kernels::ToF32(lent.value_dtype(segment.tensor), from,
                     absl::MakeSpan(values + (part.begin - slot.range.begin), part.size()));
    }
    slot.value.lent = false;
  }
  return absl::OkStatus();
}

}  // namespace ballast::services
