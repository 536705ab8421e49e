// Where each tensor of a job lies: unit, offset, chunk. This is a pure function of the job spec, so clients and servers
// need not ask each other.
//
// A unit is one flat space of elements. Each registration batch appends its tensors to their units, at the next chunk
// boundary, sorted by parameter group (stable), each at a multiple of 256 elements. From the start of the batch a chunk
// ends every `chunk_elements`; the last chunk of a batch may be shorter. So an existing chunk never changes, and no
// chunk has the elements between a short chunk and the next batch. Tensors that the optimizer updates, each kind of
// assisted and each kind of frozen ones are a batch of their own, in this order: so the tensors of a chunk are kept
// alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// Alignment of tensors: a block of 8-bit moments; 512 bytes of bf16, a disk sector or more.
inline constexpr uint64_t kAlignElements = 256;
// Parameter groups of a job: each step's header has an entry for each, and answers about the job repeat the header.
inline constexpr uint32_t kGroupsMax = 1 << 14;
inline constexpr uint64_t kChunkElementsMin = uint64_t{1} << 16;
// 4 MiB of fp32: no slice of a message is larger.
inline constexpr uint64_t kChunkElementsMax = uint64_t{1} << 20;

inline constexpr uint32_t kPartsMax = 1 << 16;
inline constexpr int kDimensionsMax = 64;  // as torch's

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t size() const { return end > begin ? end - begin : 0; }
  bool operator==(const Range&) const = default;
};

inline Range Intersect(Range a, Range b) {
  const Range r{a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  return r.end > r.begin ? r : Range{};
}

// The order of a tensor's elements: `count` equal blocks along dimension `dimension`, one behind the other, each
// row-major.
struct Parts {
  uint32_t dimension = 0;
  uint32_t count = 1;
};

// A tensor in its unit. `range` excludes the padding behind.
struct Tensor {
  std::string name;
  uint32_t index = 0;  // registration order, over the whole job
  uint32_t unit = 0;
  uint32_t group = 0;
  v1::Frozen frozen = v1::FROZEN_UNSPECIFIED;
  v1::Assist assist = v1::ASSIST_UNSPECIFIED;
  Range range;
  std::vector<uint64_t> shape;
  Parts parts;
};

// The part of a tensor within a chunk. Offsets count from the chunk's start.
struct Segment {
  uint32_t tensor = 0;
  uint32_t group = 0;
  Range in_chunk;
};

struct Chunk {
  uint64_t index = 0;  // over the whole job, in registration order: the order in which norms are summed
  uint32_t unit = 0;
  Range range;                                 // in the unit
  v1::Frozen frozen = v1::FROZEN_UNSPECIFIED;  // of all its tensors, as the next
  v1::Assist assist = v1::ASSIST_UNSPECIFIED;
  std::vector<Segment> segments;  // by offset
};

struct Unit {
  std::string name;
  uint64_t elements = 0;          // end of the last tensor's padding
  std::vector<uint32_t> tensors;  // by offset
  std::vector<uint64_t> chunks;   // by offset
};

class Layout {
 public:
  // INVALID_ARGUMENT (BAD_SPEC) for empty or doubled names, empty shapes, overflow, group out of range, bad chunk size.
  // A tensor registered again under its name (resized) replaces the older tensor; the old elements stay and are never
  // touched.
  static absl::StatusOr<Layout> Make(const v1::JobSpec& spec);

  const std::vector<Unit>& units() const { return units_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Whether this tensor is the newest of its name. A replaced tensor keeps its place and takes part in no step.
  bool live(uint32_t tensor) const { return tensor_by_name_.at(tensors_[tensor].name) == tensor; }
  // Elements of live tensors, without padding, and without states of a trainer's optimizer.
  uint64_t parameters() const { return parameters_; }
  uint64_t chunk_elements() const { return chunk_elements_; }

  // NOT_FOUND (UNKNOWN_UNIT / UNKNOWN_TENSOR). Tensor names include aliases.
  absl::StatusOr<uint32_t> FindUnit(absl::string_view name) const;
  absl::StatusOr<uint32_t> FindTensor(absl::string_view name) const;

  // The chunks that [range) of `unit` touches, with the part touched (in the unit's elements), by offset.
  struct Piece {
    uint64_t chunk = 0;
    Range range;
  };
  // INVALID_ARGUMENT (BAD_RANGE) if `range` is empty or leaves the unit; NOT_FOUND for an unknown unit.
  absl::StatusOr<std::vector<Piece>> Cut(uint32_t unit, Range range) const;

 private:
  absl::Status Append(const v1::Registration& registration, const v1::JobSpec& spec);
  // Gives the tensor its name and aliases, which it may take over from the tensor that it replaces. `names`: those that
  // its registration has given away so far.
  absl::Status TakeNames(const v1::TensorSpec& tensor, uint32_t index, absl::flat_hash_set<absl::string_view>* names);
  // Places tensors that are kept alike behind the others of their unit, at the next chunk boundary.
  absl::Status Place(uint32_t unit, absl::Span<const uint32_t> tensors);
  void CutChunks(uint32_t unit, Range batch, size_t first_tensor);

  std::vector<Unit> units_;
  std::vector<Tensor> tensors_;
  std::vector<Chunk> chunks_;
  absl::flat_hash_map<std::string, uint32_t> unit_by_name_;
  absl::flat_hash_map<std::string, uint32_t> tensor_by_name_;
  uint64_t parameters_ = 0;
  uint64_t chunk_elements_ = 0;
};

// Bitmaps over tensors, LSB first, as in StepHeader.
bool HasBit(absl::string_view bitmap, uint32_t index);
std::string MakeBitmap(uint32_t size, absl::Span<const uint32_t> set);

}  // namespace ballast::model
