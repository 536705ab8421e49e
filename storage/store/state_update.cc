#include "ballast/storage/store/state_update.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/storage/store/coded_values.h"
#include "ballast/storage/store/remainder.h"

namespace ballast::storage {
namespace {

// A thread takes a piece at a time. After each of its pieces the job's thread looks after the disk: at memory speed
// every 50 microseconds; otherwise the disk would idle behind a long kernel.
constexpr uint64_t kPieceElements = uint64_t{1} << 16;
// A piece is digested, updated and digested again block by block: a block is 256 KiB of Adam's state, gradient and
// working copy, and fits in a second-level cache.
constexpr uint64_t kBlockElements = uint64_t{1} << 14;
static_assert(kBlockElements % kernels::kMomentBlock == 0 && kPieceElements % kBlockElements == 0);

absl::Span<const std::byte> Bytes(const std::byte* array, uint64_t begin, uint64_t end) {
  return {array + begin, end - begin};
}

// Byte offsets, from an array's start, of the values and scales of the array's elements.
class ArrayParts {
 public:
  ArrayParts(const StateView& state, int index)
      : layout_(*state.layout),
        array_(static_cast<StateArray>(index)),
        data_(state.array(array_)),
        scales_at_(layout_.ScalesAt(array_, state.elements)) {}

  const std::byte* data() const { return data_; }
  uint64_t ValuesEnd(uint64_t elements) const { return layout_.ValueBytes(array_, elements); }
  uint64_t ScalesEnd(uint64_t elements) const { return scales_at_ + layout_.ScaleBytes(array_, elements); }
  bool has_scales() const { return layout_.ScaleBytes(array_, 1) > 0; }
  uint64_t scales_at() const { return scales_at_; }

 private:
  const StateLayout& layout_;
  const StateArray array_;
  const std::byte* data_;
  uint64_t scales_at_;
};

void DigestBlock(const StateView& state, uint64_t at, uint64_t end, PieceDigest* digest) {
  for (int i = 0; i < state.layout->array_count(); ++i) {
    const ArrayParts parts(state, i);
    const auto k = static_cast<size_t>(i);
    digest->values[k] =
        kernels::Crc32c(Bytes(parts.data(), parts.ValuesEnd(at), parts.ValuesEnd(end)), digest->values[k]);
    if (!parts.has_scales()) continue;
    digest->scales[k] =
        kernels::Crc32c(Bytes(parts.data(), parts.ScalesEnd(at), parts.ScalesEnd(end)), digest->scales[k]);
  }
}

// Combines the digests of pieces into digests of whole arrays; the padding between and behind is digested here.
ArrayDigests Fold(const StateView& state, absl::Span<const PieceDigest> pieces) {
  ArrayDigests digests = {};
  for (int i = 0; i < state.layout->array_count(); ++i) {
    const ArrayParts parts(state, i);
    const auto k = static_cast<size_t>(i);
    uint32_t digest = 0;
    const auto append = [&](auto end_of, auto digest_of) {
      for (size_t piece = 0; piece < pieces.size(); ++piece) {
        const uint64_t at = piece * kPieceElements, end = std::min(at + kPieceElements, state.elements);
        digest = kernels::Crc32cConcat(digest, digest_of(pieces[piece]), end_of(end) - end_of(at));
      }
    };
    append([&](uint64_t n) { return parts.ValuesEnd(n); }, [&](const PieceDigest& p) { return p.values[k]; });
    uint64_t behind = parts.ValuesEnd(state.elements);
    if (parts.has_scales()) {
      digest = kernels::Crc32c(Bytes(parts.data(), behind, parts.scales_at()), digest);
      append([&](uint64_t n) { return parts.ScalesEnd(n); }, [&](const PieceDigest& p) { return p.scales[k]; });
      behind = parts.ScalesEnd(state.elements);
    }
    const uint64_t whole = state.layout->ArrayBytes(static_cast<StateArray>(i), state.elements);
    digests[k] = kernels::Crc32c(Bytes(parts.data(), behind, whole), digest);
  }
  return digests;
}

constexpr uint64_t kPieceBytes = uint64_t{256} << 10;

uint64_t PieceCount(const StateView& state) { return (state.elements + kPieceElements - 1) / kPieceElements; }

void ForPieces(uint64_t count, const Compute& compute, absl::FunctionRef<void(uint64_t)> piece) {
  if (compute.pool != nullptr) return compute.pool->ParallelFor(count, piece, compute.poll);
  for (uint64_t i = 0; i < count; ++i) {
    piece(i);
    compute.poll();
  }
}

// Kernels always write working parameters; unwanted parameters go to a small buffer that stays in the cache. Kernels
// store past the caches where working parameters begin at a multiple of 64 bytes, as a job's own working copies do: the
// buffer begins between two such multiples, or each block would go to main memory, 2 bytes a parameter.
constexpr uint64_t kOffStreaming = 32;
template <typename Function>
[[gnu::noinline]] void WithoutWorking(Function run) {
  alignas(64) std::byte unwanted[kOffStreaming + kBlockElements * sizeof(float)];
  run(unwanted + kOffStreaming);
}

// Runs `change` on the fp32 master of elements [at, end), in memory of its own, and keeps the remainder of the result.
// REQUIRES: the layout keeps a remainder; at most kBlockElements, which begin at a multiple of 8 and end at one or at
// the chunk's end.
template <typename Function>  // (absl::Span<float> master)
[[gnu::noinline]] void ChangeMaster(const StateView& state, const std::byte* working, uint64_t at, uint64_t end,
                                    Function change) {
  alignas(64) float memory[kBlockElements];
  const absl::Span<float> master(memory, end - at);
  JoinMaster(state, working, at, master);
  change(master);
  SetRemainder(master, at, state);
}

// Rounds the working copy's blocks that have elements of [begin, end): their other elements are in the scale too.
void RoundWhole(const StateView& state, uint64_t begin, uint64_t end, std::byte* working) {
  const kernels::Dtype dtype = state.layout->optimizer().working;
  const uint64_t grain = kernels::GrainOf(dtype), from = begin / grain * grain;
  const uint64_t to = std::min(state.elements, (end + grain - 1) / grain * grain);
  kernels::FromF32({state.master() + from, to - from}, dtype, working + state.layout->ParameterBytes(from));
}

// Overwrites master and working copy.
void WriteMaster(const ChunkUpdate::Values& values, const StateView& state, std::byte* working) {
  const kernels::Dtype dtype = state.layout->optimizer().working;
  const uint64_t width = kernels::ElementBytes(dtype), begin = values.begin, end = begin + values.count(width);
  const auto take = [&](uint64_t from, absl::Span<float> to) {  // elements from `from` of the chunk on
    if (values.narrow.empty()) {
      std::copy_n(values.values.data() + (from - begin), to.size(), to.data());
    } else {
      kernels::ToF32(dtype, values.narrow.data() + (from - begin) * width, to);
    }
  };
  if (state.layout->lends_master()) {
    auto* const to = reinterpret_cast<float*>(values.working);
    if (to != nullptr && to != values.values.data()) take(begin, {to, end - begin});
    return;
  }
  if (!state.layout->keeps_remainder()) {
    const absl::Span<float> master(state.master() + begin, end - begin);
    take(begin, master);
    std::byte* const to = values.working != nullptr ? values.working : working;
    if (to == nullptr || to == values.narrow.data()) return;
    if (values.working != nullptr) return kernels::FromF32(master, dtype, to);
    return RoundWhole(state, begin, end, working);
  }
  for (uint64_t at = begin / kBlockElements * kBlockElements; at < end; at += kBlockElements) {
    const uint64_t from = std::max(at, begin), to = std::min(at + kBlockElements, end);
    ChangeMaster(state, working, at, std::min(at + kBlockElements, state.elements), [&](absl::Span<float> master) {
      const absl::Span<float> changed = master.subspan(from - at, to - from);
      take(from, changed);
      kernels::FromF32(changed, dtype, working + from * width);
    });
  }
}

}  // namespace

kernels::UpdateSpan SpanOf(const ChunkUpdate& update, const ChunkUpdate::SegmentUpdate& segment, const StateView& state,
                           float* master, std::byte* working, uint64_t at, uint64_t n) {
  const bool own = segment.gradient != nullptr;
  const std::byte* const gradient = own ? segment.gradient : update.gradient.data();
  const uint64_t first = own ? segment.begin : update.gradient_begin;
  kernels::UpdateSpan span{.n = n,
                           .gradient = gradient + (at - first) * state.layout->gradient_element_bytes(),
                           .master = master,
                           .moments = {},
                           .working = working};
  for (int k = 0; k + 1 < state.layout->array_count(); ++k) {
    span.moments[static_cast<size_t>(k)] = state.moment(k, at);
  }
  return span;
}

kernels::RandomKey RandomAt(const ChunkUpdate& update, uint64_t at) {
  kernels::RandomKey random = update.random;
  random.first_element += at;
  return random;
}

ArrayDigests DigestState(const StateView& state, const Compute& compute) {
  std::vector<PieceDigest> pieces(PieceCount(state));
  ForPieces(pieces.size(), compute, [&](uint64_t i) {
    const uint64_t at = i * kPieceElements;
    DigestBlock(state, at, std::min(at + kPieceElements, state.elements), &pieces[i]);
  });
  return Fold(state, pieces);
}

uint32_t DigestBytes(absl::Span<const std::byte> bytes, const Compute& compute) {
  std::vector<uint32_t> pieces((bytes.size() + kPieceBytes - 1) / kPieceBytes);
  ForPieces(pieces.size(), compute,
            [&](uint64_t i) { pieces[i] = kernels::Crc32c(bytes.subspan(i * kPieceBytes, kPieceBytes)); });
  uint32_t digest = 0;
  for (uint64_t i = 0; i < pieces.size(); ++i) {
    digest = kernels::Crc32cConcat(digest, pieces[i], std::min(kPieceBytes, bytes.size() - i * kPieceBytes));
  }
  return digest;
}

void RoundMaster(const StateView& state, std::byte* working, const Compute& compute) {
  ForPieces(PieceCount(state), compute, [&](uint64_t i) {
    const uint64_t at = i * kPieceElements, n = std::min(kPieceElements, state.elements - at);
    kernels::FromF32({state.master() + at, n}, state.layout->optimizer().working,
                     working + state.layout->ParameterBytes(at));
  });
}

StateUpdate::Segments::Segments(const ChunkUpdate& update) {
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    if (segment.begin < segment.end) sorted_.push_back(&segment);
  }
  std::sort(sorted_.begin(), sorted_.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
}

// The first segment that ends behind the element.
std::vector<const ChunkUpdate::SegmentUpdate*>::const_iterator StateUpdate::Segments::From(uint64_t at) const {
  return std::upper_bound(sorted_.begin(), sorted_.end(), at,
                          [](uint64_t element, auto* segment) { return element < segment->end; });
}

bool StateUpdate::Segments::Any(uint64_t at, uint64_t end) const {
  const auto next = From(at);
  return next != sorted_.end() && (*next)->begin < end;
}

void StateUpdate::Segments::Meet(
    uint64_t at, uint64_t end,
    absl::FunctionRef<void(const ChunkUpdate::SegmentUpdate&, uint64_t, uint64_t)> function) const {
  for (auto next = From(at); next != sorted_.end() && (*next)->begin < end; ++next) {
    function(**next, std::max(at, (*next)->begin), std::min(end, (*next)->end));
  }
}

bool StateUpdate::DoneWhole(const Compute& compute) {
  if (digests_.of_old && (!update_.values.empty() || update_.segments.empty())) {
    digests_.old_state = DigestState(state_, compute);
    digests_.of_old = false;
    if (update_.values.empty()) {
      digests_.new_state = digests_.old_state;
      return true;
    }
  }
  if (!IsFrozen(state_.layout->form())) return false;
  WriteFrozen(update_, state_);
  if (digests_.of_new) digests_.new_state = DigestState(state_, compute);
  return true;
}

StateUpdate::StateUpdate(const ChunkUpdate& update, const StateView& state, std::byte* working, const Compute& compute,
                         UpdateDigests wanted)
    : update_(update), state_(state), working_(working), digests_(wanted), segments_(update) {
  if (DoneWhole(compute)) {
    digests_.of_new = false;
    return;
  }
  if (update.values_of != StateArray::kMaster) WriteMoments(update, state);
  for (const ChunkUpdate::Values& values : update.values) {
    if (update.values_of == StateArray::kMaster) WriteMaster(values, state, working);
  }
  if (update.segments.empty() && !digests_.of_old && !digests_.of_new) return;
  pieces_ = PieceCount(state);
  if (digests_.of_old) old_pieces_.resize(pieces_);
  if (digests_.of_new) new_pieces_.resize(pieces_);
}

void StateUpdate::UpdateBlock(uint64_t at, uint64_t end, absl::Span<float> master) const {
  const StateLayout& layout = *state_.layout;
  const bool lends = state_.layout->lends_master();
  segments_.Meet(at, end, [&](const ChunkUpdate::SegmentUpdate& segment, uint64_t from, uint64_t to) {
    auto* const lent = reinterpret_cast<float*>(segment.working) + (from - segment.begin);
    const auto run = [&](std::byte* target) {
      kernels::Update(state_.layout->optimizer(), segment.coefficients, RandomAt(update_, from),
                      SpanOf(update_, segment, state_, lends ? lent : &master[from - at], target, from, to - from));
    };
    if (lends) return run(nullptr);
    if (segment.working != nullptr) return run(segment.working + layout.ParameterBytes(from - segment.begin));
    working_ != nullptr ? run(working_ + layout.ParameterBytes(from)) : WithoutWorking(run);
  });
}

void StateUpdate::Run(uint64_t piece) {
  const uint64_t piece_end = std::min((piece + 1) * kPieceElements, state_.elements);
  for (uint64_t at = piece * kPieceElements; at < piece_end; at += kBlockElements) {
    const uint64_t end = std::min(at + kBlockElements, piece_end);
    if (digests_.of_old) DigestBlock(state_, at, end, &old_pieces_[piece]);
    if (state_.layout->lends_master()) {
      UpdateBlock(at, end, {});
    } else if (!state_.layout->keeps_remainder()) {
      UpdateBlock(at, end, {state_.master() + at, end - at});
    } else if (segments_.Any(at, end)) {
      ChangeMaster(state_, working_, at, end, [&](absl::Span<float> master) { UpdateBlock(at, end, master); });
    }
    if (digests_.of_new) DigestBlock(state_, at, end, &new_pieces_[piece]);
  }
}

const UpdateDigests& StateUpdate::Digests() {
  if (digests_.of_old) digests_.old_state = Fold(state_, old_pieces_);
  if (digests_.of_new) digests_.new_state = Fold(state_, new_pieces_);
  return digests_;
}

void UpdateState(const ChunkUpdate& update, const StateView& state, std::byte* working, const Compute& compute,
                 UpdateDigests* digests) {
  StateUpdate work(update, state, working, compute, *digests);
  ForPieces(work.pieces(), compute, [&work](uint64_t piece) { work.Run(piece); });
  *digests = work.Digests();
}

}  // namespace ballast::storage
