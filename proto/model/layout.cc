#include "ballast/proto/model/layout.h"

#include <algorithm>
#include <limits>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"

namespace ballast::model {
namespace {

// Bounds on the layout that a client may ask of a server: far above any real model, far below an overflow.
constexpr uint64_t kUnitElementsMax = uint64_t{1} << 42;
constexpr int kTensorsMax = 1 << 20;
constexpr uint64_t kPinIntervalMax = uint64_t{1} << 32;
// About 100 bytes of memory each, on every client and server; 2^40 parameters at the largest chunk size.
constexpr uint64_t kChunksMax = uint64_t{1} << 20;
constexpr size_t kNameBytesMax = 512;

absl::Status BadSpec(absl::string_view message) { return Error(absl::StatusCode::kInvalidArgument, kBadSpec, message); }

uint64_t RoundUp(uint64_t n, uint64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

absl::StatusOr<uint64_t> Elements(absl::string_view name, absl::Span<const uint64_t> shape) {
  uint64_t elements = 1;
  for (const uint64_t extent : shape) {
    if (extent == 0) return BadSpec(absl::StrCat("tensor '", name, "' has an extent of 0; leave empty tensors out"));
    if (extent > kUnitElementsMax / elements) {
      return BadSpec(absl::StrCat("tensor '", name, "' has more than 2^42 elements"));
    }
    elements *= extent;
  }
  return elements;
}

absl::Status CheckDurability(const v1::JobSpec& spec) {
  const bool every_k = spec.durability() == v1::DURABILITY_EVERY_K;
  if (every_k ? spec.pin_interval() < 1 || spec.pin_interval() > kPinIntervalMax : spec.pin_interval() != 0) {
    return BadSpec(absl::StrCat("pin_interval is the K of durability every-K, from 1 to ", kPinIntervalMax,
                                ", and 0 with any other durability; got ", spec.pin_interval(), " with ",
                                v1::Durability_Name(spec.durability())));
  }
  if (spec.master_format() == v1::MASTER_FORMAT_REMAINDER && spec.durability() != v1::DURABILITY_NONE) {
    return BadSpec(absl::StrCat("a master kept as remainder needs its working copy, and a version on the disk ",
                                "must be whole; expected durability none, got ", v1::Durability_Name(spec.durability()),
                                ": take that, or an fp32 master"));
  }
  return absl::OkStatus();
}

absl::Status CheckSpec(const v1::JobSpec& spec) {
  const uint64_t chunk = spec.chunk_elements();
  if (chunk < kChunkElementsMin || chunk > kChunkElementsMax || (chunk & (chunk - 1)) != 0) {
    return BadSpec(absl::StrCat("chunk_elements must be a power of two from ", kChunkElementsMin, " to ",
                                kChunkElementsMax, ", got ", chunk));
  }
  BALLAST_RETURN_IF_ERROR(CheckJobName(spec.name()));
  if (spec.group_count() == 0 || spec.group_count() > kGroupsMax) {
    return BadSpec(absl::StrCat("group_count must be from 1 to ", kGroupsMax, ", got ", spec.group_count(),
                                "; tensors with the same hyper-parameters belong in one group"));
  }
  BALLAST_RETURN_IF_ERROR(CheckDurability(spec));
  int64_t tensors = 0;
  for (const auto& registration : spec.registrations()) tensors += registration.tensors_size();
  if (tensors == 0) return BadSpec("the job has no tensors; register at least one");
  if (tensors > kTensorsMax) return BadSpec(absl::StrCat("at most ", kTensorsMax, " tensors, got ", tensors));
  return absl::OkStatus();
}

absl::Status CheckShape(const v1::TensorSpec& spec) {
  if (spec.shape_size() > kDimensionsMax) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' has ", spec.shape_size(), " dimensions; at most ",
                                kDimensionsMax, " are accepted"));
  }
  if (spec.parts() > kPartsMax) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is to lie in ", spec.parts(), " parts; at most ", kPartsMax,
                                " are accepted"));
  }
  if (spec.parts() > 1 && (spec.part_dimension() >= static_cast<uint32_t>(spec.shape_size()) ||
                           spec.shape(static_cast<int>(spec.part_dimension())) % spec.parts() != 0)) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is to lie in ", spec.parts(), " parts along dimension ",
                                spec.part_dimension(), ", which must be one of its ", spec.shape_size(),
                                " dimensions and divide into as many"));
  }
  return absl::OkStatus();
}

absl::Status CheckAssist(const v1::TensorSpec& spec, const v1::JobSpec& job) {
  if (spec.assist() == v1::ASSIST_UNSPECIFIED) return absl::OkStatus();
  if (!v1::Assist_IsValid(spec.assist())) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is to be assisted as ", static_cast<int>(spec.assist()),
                                ": expected nothing, ASSIST_UPDATE or ASSIST_STATE"));
  }
  if (spec.frozen() != v1::FROZEN_UNSPECIFIED) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is ", v1::Frozen_Name(spec.frozen()), " and ",
                                v1::Assist_Name(spec.assist()), ": a frozen tensor has no updates; leave one out"));
  }
  if (job.master_format() == v1::MASTER_FORMAT_LENT) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is ", v1::Assist_Name(spec.assist()),
                                ", which needs a master on the servers; this job's masters are the trainer's (LENT)"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(const v1::TensorSpec& spec, const v1::JobSpec& job) {
  const uint32_t group_count = job.group_count();
  if (spec.name().empty() || spec.unit().empty() || spec.name().size() > kNameBytesMax ||
      spec.unit().size() > kNameBytesMax) {
    return BadSpec(absl::StrCat("tensor '", spec.name().substr(0, 64), "' of unit '", spec.unit().substr(0, 64),
                                "': names must have 1 to ", kNameBytesMax, " bytes"));
  }
  if (spec.group() >= group_count) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is in parameter group ", spec.group(), " but the job has ",
                                group_count, " group(s)"));
  }
  BALLAST_RETURN_IF_ERROR(CheckShape(spec));
  if (!v1::Frozen_IsValid(spec.frozen())) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is to be frozen as ", static_cast<int>(spec.frozen()),
                                ": expected nothing, FROZEN_WORKING or FROZEN_Q8"));
  }
  if (spec.frozen() != v1::FROZEN_UNSPECIFIED && job.working_dtype() == v1::DTYPE_F8_E4M3) {
    return BadSpec(absl::StrCat("tensor '", spec.name(), "' is ", v1::Frozen_Name(spec.frozen()), " in a job whose ",
                                "working parameters are DTYPE_F8_E4M3, which frozen values cannot be: keep its state ",
                                "(no `frozen`), or take a 16-bit working dtype"));
  }
  BALLAST_RETURN_IF_ERROR(CheckAssist(spec, job));
  if (spec.dtype() != v1::DTYPE_UNSPECIFIED && spec.dtype() != job.working_dtype()) {
    return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
                 absl::StrCat("tensor '", spec.name(), "' is to be ", v1::Dtype_Name(spec.dtype()), " (",
                              static_cast<int>(spec.dtype()), "); all working parameters of this job are ",
                              v1::Dtype_Name(job.working_dtype()), ": say that, or leave the dtype unspecified"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Layout> Layout::Make(const v1::JobSpec& spec) {
  BALLAST_RETURN_IF_ERROR(CheckSpec(spec));
  Layout layout;
  layout.chunk_elements_ = spec.chunk_elements();
  for (const auto& registration : spec.registrations()) {
    BALLAST_RETURN_IF_ERROR(layout.Append(registration, spec));
  }
  for (const auto& [name, index] : layout.tensor_by_name_) {
    const Tensor& tensor = layout.tensors_[index];
    if (tensor.name == name && tensor.assist != v1::ASSIST_STATE) layout.parameters_ += tensor.range.size();
  }
  return layout;
}

absl::Status Layout::Append(const v1::Registration& registration, const v1::JobSpec& spec) {
  absl::flat_hash_set<absl::string_view> names;
  std::vector<uint32_t> touched;                               // units, in order of first mention
  absl::flat_hash_map<uint32_t, std::vector<uint32_t>> added;  // by unit
  for (const v1::TensorSpec& tensor : registration.tensors()) {
    BALLAST_RETURN_IF_ERROR(CheckTensor(tensor, spec));
    const uint32_t index = tensors_.size();
    BALLAST_RETURN_IF_ERROR(TakeNames(tensor, index, &names));
    const uint32_t unit = unit_by_name_.try_emplace(tensor.unit(), units_.size()).first->second;
    if (unit == units_.size()) units_.push_back(Unit{.name = tensor.unit()});
    auto& list = added[unit];
    if (list.empty()) touched.push_back(unit);
    list.push_back(index);
    tensors_.push_back(Tensor{.name = tensor.name(),
                              .index = index,
                              .unit = unit,
                              .group = tensor.group(),
                              .frozen = tensor.frozen(),
                              .assist = tensor.assist(),
                              .shape = {tensor.shape().begin(), tensor.shape().end()},
                              .parts = {tensor.part_dimension(), std::max(tensor.parts(), 1u)}});
  }
  for (const uint32_t unit : touched) {
    auto& list = added[unit];
    const auto kept = [&](uint32_t tensor) { return std::pair(tensors_[tensor].frozen, tensors_[tensor].assist); };
    std::stable_sort(list.begin(), list.end(), [&](uint32_t a, uint32_t b) {
      return std::pair(kept(a), tensors_[a].group) < std::pair(kept(b), tensors_[b].group);
    });
    for (size_t first = 0, last = 0; first < list.size(); first = last) {
      while (last < list.size() && kept(list[last]) == kept(list[first])) ++last;
      BALLAST_RETURN_IF_ERROR(Place(unit, absl::MakeConstSpan(list).subspan(first, last - first)));
    }
  }
  return absl::OkStatus();
}

absl::Status Layout::TakeNames(const v1::TensorSpec& tensor, uint32_t index,
                               absl::flat_hash_set<absl::string_view>* names) {
  std::optional<uint32_t> replaced;
  if (const auto found = tensor_by_name_.find(tensor.name()); found != tensor_by_name_.end()) {
    replaced = found->second;
    if (tensors_[*replaced].name != tensor.name()) {
      return BadSpec(absl::StrCat("the name '", tensor.name(), "' is an alias of tensor '", tensors_[*replaced].name,
                                  "'; register under that name to replace it, or choose another one"));
    }
  }
  std::vector<absl::string_view> all = {tensor.name()};
  all.insert(all.end(), tensor.aliases().begin(), tensor.aliases().end());
  for (const absl::string_view name : all) {
    if (!names->insert(name).second) {
      return BadSpec(absl::StrCat("the name '", name,
                                  "' is given to two tensors; a tensor with two names is one tensor with an alias"));
    }
    const auto taken = tensor_by_name_.find(name);
    if (taken != tensor_by_name_.end() && taken->second != replaced) {
      return BadSpec(absl::StrCat("the name '", name, "' of tensor '", tensor.name(), "' belongs to tensor '",
                                  tensors_[taken->second].name, "' already"));
    }
  }
  // The new tensor takes the old tensor's names; names that it no longer has become free.
  if (replaced.has_value()) {
    absl::erase_if(tensor_by_name_, [replaced](const auto& entry) { return entry.second == replaced; });
  }
  for (const absl::string_view name : all) tensor_by_name_[name] = index;
  return absl::OkStatus();
}

absl::Status Layout::Place(uint32_t unit, absl::Span<const uint32_t> tensors) {
  const uint64_t begin = RoundUp(units_[unit].elements, chunk_elements_);
  uint64_t end = begin;
  for (const uint32_t index : tensors) {
    Tensor& placed = tensors_[index];
    BALLAST_ASSIGN_OR_RETURN(const uint64_t elements, Elements(placed.name, placed.shape));
    placed.range = {end, end + elements};
    units_[unit].tensors.push_back(index);
    end += RoundUp(elements, kAlignElements);
    if (end > kUnitElementsMax)
      return BadSpec(absl::StrCat("unit '", units_[unit].name, "' has more than 2^42 elements"));
  }
  if (chunks_.size() + (end - begin) / chunk_elements_ >= kChunksMax) {
    return BadSpec(absl::StrCat("unit '", units_[unit].name, "' brings the job to more than ", kChunksMax,
                                " chunks; raise chunk_elements (now ", chunk_elements_, ", at most ", kChunkElementsMax,
                                ")"));
  }
  units_[unit].elements = end;
  CutChunks(unit, {begin, end}, units_[unit].tensors.size() - tensors.size());
  return absl::OkStatus();
}

void Layout::CutChunks(uint32_t unit, Range batch, size_t first_tensor) {
  size_t next = first_tensor;
  const std::vector<uint32_t>& order = units_[unit].tensors;
  for (uint64_t begin = batch.begin; begin < batch.end; begin += chunk_elements_) {
    Chunk chunk{.index = chunks_.size(),
                .unit = unit,
                .range = {begin, std::min(begin + chunk_elements_, batch.end)},
                .frozen = tensors_[order[first_tensor]].frozen,
                .assist = tensors_[order[first_tensor]].assist};
    for (size_t i = next; i < order.size() && tensors_[order[i]].range.begin < chunk.range.end; ++i) {
      const Tensor& tensor = tensors_[order[i]];
      const Range part = Intersect(tensor.range, chunk.range);
      if (part.size() > 0) {
        chunk.segments.push_back({tensor.index, tensor.group, {part.begin - begin, part.end - begin}});
      }
      if (tensor.range.end <= chunk.range.end) next = i + 1;
    }
    units_[unit].chunks.push_back(chunk.index);
    chunks_.push_back(std::move(chunk));
  }
}

absl::StatusOr<uint32_t> Layout::FindUnit(absl::string_view name) const {
  const auto it = unit_by_name_.find(name);
  if (it != unit_by_name_.end()) return it->second;
  return Error(absl::StatusCode::kNotFound, kUnknownUnit,
               absl::StrCat("no unit is called '", name, "'; the job has ", units_.size(), " unit(s), the first is '",
                            units_.front().name, "'"));
}

absl::StatusOr<uint32_t> Layout::FindTensor(absl::string_view name) const {
  const auto it = tensor_by_name_.find(name);
  if (it != tensor_by_name_.end()) return it->second;
  return Error(absl::StatusCode::kNotFound, kUnknownTensor,
               absl::StrCat("no tensor is called '", name, "'; the job has ", tensor_by_name_.size(),
                            " name(s), for example '", tensors_.front().name, "'"));
}

absl::StatusOr<std::vector<Layout::Piece>> Layout::Cut(uint32_t unit, Range range) const {
  if (unit >= units_.size()) {
    return Error(absl::StatusCode::kNotFound, kUnknownUnit,
                 absl::StrCat("unit ", unit, " does not exist; the job has ", units_.size(), " unit(s)"));
  }
  const Unit& u = units_[unit];
  if (range.begin >= range.end || range.end > u.elements) {
    return Error(absl::StatusCode::kInvalidArgument, kBadRange,
                 absl::StrCat("range [", range.begin, ", ", range.end, ") must be non-empty and lie in unit '", u.name,
                              "', which has ", u.elements, " elements"));
  }
  std::vector<Piece> pieces;
  auto it = std::partition_point(u.chunks.begin(), u.chunks.end(),
                                 [&](uint64_t chunk) { return chunks_[chunk].range.end <= range.begin; });
  for (; it != u.chunks.end() && chunks_[*it].range.begin < range.end; ++it) {
    const Range part = Intersect(range, chunks_[*it].range);
    if (part.size() > 0) pieces.push_back({*it, part});
  }
  return pieces;
}

bool HasBit(absl::string_view bitmap, uint32_t index) {
  const size_t byte = index / 8;
  return byte < bitmap.size() && ((static_cast<uint8_t>(bitmap[byte]) >> (index % 8)) & 1) != 0;
}

std::string MakeBitmap(uint32_t size, absl::Span<const uint32_t> set) {
  std::string bitmap((size + 7) / 8, '\0');
  for (const uint32_t index : set) bitmap[index / 8] = static_cast<char>(bitmap[index / 8] | (1 << (index % 8)));
  return bitmap;
}

}  // namespace ballast::model
