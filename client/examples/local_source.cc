#include "ballast/client/examples/local_source.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {

LocalSource::LocalSource(model::Layout layout, const kernels::OptimizerSpec& optimizer, uint64_t seed)
    : layout_(std::move(layout)), optimizer_(optimizer), seed_(seed), tensor_steps_(layout_.tensors().size()) {
  for (const model::Unit& unit : layout_.units()) {
    UnitState& state = units_.emplace_back();
    state.master.resize(unit.elements);
    for (size_t k = 0; k < static_cast<size_t>(MomentCount(optimizer_)); ++k) {
      state.moments[k].resize(MomentBytes(optimizer_.moments, unit.elements));
      state.scales[k].resize(MomentScaleBytes(optimizer_.moments, unit.elements) / sizeof(float));
    }
    state.working.resize(kernels::BytesOf(optimizer_.working, unit.elements));
    state.gradient.resize(unit.elements * ElementBytes(optimizer_.gradient));
  }
}

absl::StatusOr<std::unique_ptr<LocalSource>> LocalSource::Create(const ModelShape& shape, uint64_t seed,
                                                                 uint64_t chunk_elements,
                                                                 const kernels::OptimizerSpec& optimizer) {
  const std::vector<ModelTensor> tensors = TensorsOf(shape);
  v1::JobSpec spec;
  spec.set_name("reference");
  spec.set_chunk_elements(chunk_elements);
  model::SetOptimizer(optimizer, &spec);
  BALLAST_RETURN_IF_ERROR(model::OptimizerOf(spec).status());
  spec.set_durability(v1::DURABILITY_NONE);
  spec.set_group_count(kGroupCount);
  v1::Registration& registration = *spec.add_registrations();
  for (const ModelTensor& tensor : tensors) {
    v1::TensorSpec& t = *registration.add_tensors();
    t.set_name(tensor.name);
    t.set_unit(tensor.unit);
    for (const uint64_t size : tensor.shape) t.add_shape(size);
    t.set_group(tensor.group);
  }
  BALLAST_ASSIGN_OR_RETURN(model::Layout layout, model::Layout::Make(spec));

  std::unique_ptr<LocalSource> source(new LocalSource(std::move(layout), optimizer, seed));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const model::Tensor& tensor = source->layout_.tensors()[i];
    absl::Span<float> master = absl::MakeSpan(source->units_[tensor.unit].master);
    FillInitialValues(shape, tensors[i], seed, 0, master.subspan(tensor.range.begin, tensor.range.size()));
  }
  for (UnitState& unit : source->units_) kernels::FromF32(unit.master, optimizer.working, unit.working.data());
  return source;
}

absl::StatusOr<uint64_t> LocalSource::Locate(const std::string& tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, layout_.FindTensor(tensor));
  return layout_.tensors()[index].range.begin;
}

std::vector<ParameterSource::Ranges> LocalSource::OwnedRanges(uint32_t unit) const {
  return {{{0, unit_elements(unit)}}};
}

absl::Status LocalSource::Acquire(uint32_t unit, absl::Span<float> parameters) {
  BALLAST_RETURN_IF_ERROR(CheckSize("parameters", unit, parameters.size()));
  kernels::ToF32(optimizer_.working, units_[unit].working.data(), parameters);
  return absl::OkStatus();
}

absl::Status LocalSource::Push(uint32_t unit, absl::Span<const float> gradient) {
  BALLAST_RETURN_IF_ERROR(CheckSize("gradient", unit, gradient.size()));
  kernels::FromF32(gradient, optimizer_.gradient, units_[unit].gradient.data());
  return absl::OkStatus();
}

absl::Status LocalSource::CheckSize(const char* what, uint32_t unit, size_t size) const {
  if (size == unit_elements(unit)) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadLength,
      absl::StrCat(what, " of unit ", unit, ": expected ", unit_elements(unit), " elements, got ", size));
}

v1::ChunkNorm LocalSource::NormOf(const model::Chunk& chunk) const {
  v1::ChunkNorm norm;
  norm.set_chunk(chunk.index);
  const std::byte* const gradient = units_[chunk.unit].gradient.data();
  for (const model::Segment& segment : chunk.segments) {
    const uint64_t begin = chunk.range.begin + segment.in_chunk.begin;
    const kernels::NormResult result = kernels::SquaredNorm(
        optimizer_.gradient, gradient + begin * ElementBytes(optimizer_.gradient), segment.in_chunk.size());
    v1::SegmentNorm& entry = *norm.add_segments();
    entry.set_tensor(segment.tensor);
    entry.set_squared_norm(result.squared_norm);
    if (!result.finite) norm.set_overflow(true);
  }
  return norm;
}

void LocalSource::Update(const model::Chunk& chunk, const v1::StepHeader& header, float factor) {
  UnitState& unit = units_[chunk.unit];
  for (const model::Segment& segment : chunk.segments) {
    const kernels::Hyper hyper = model::HyperOf(header.groups(static_cast<int>(segment.group)));
    const uint64_t begin = chunk.range.begin + segment.in_chunk.begin;
    kernels::UpdateSpan span{.n = segment.in_chunk.size(),
                             .gradient = unit.gradient.data() + begin * ElementBytes(optimizer_.gradient),
                             .master = unit.master.data() + begin,
                             .moments = {},
                             .working = unit.working.data() + kernels::BytesOf(optimizer_.working, begin)};
    for (size_t k = 0; k < static_cast<size_t>(MomentCount(optimizer_)); ++k) {
      span.moments[k] = {.values = unit.moments[k].data() + MomentBytes(optimizer_.moments, begin),
                         .scales = unit.scales[k].data() + MomentScaleBytes(optimizer_.moments, begin) / sizeof(float)};
    }
    const kernels::RandomKey key{
        .seed = seed_, .unit = chunk.unit, .step = static_cast<uint64_t>(version_), .first_element = begin};
    kernels::Update(optimizer_, MakeCoefficients(optimizer_, hyper, tensor_steps_[segment.tensor], factor), key, span);
  }
}

absl::StatusOr<v1::Verdict> LocalSource::FinishStep(const v1::StepHeader& header, const std::string& blob) {
  std::vector<v1::ChunkNorm> norms;
  bool overflow = false;
  for (const model::Chunk& chunk : layout_.chunks()) {
    norms.push_back(NormOf(chunk));
    overflow = overflow || norms.back().overflow();
  }
  std::vector<const v1::ChunkNorm*> pointers;
  for (const v1::ChunkNorm& norm : norms) pointers.push_back(&norm);
  BALLAST_ASSIGN_OR_RETURN(const double squared_norm, model::GlobalSquaredNorm(pointers));
  v1::Verdict verdict = model::MakeVerdict(header, squared_norm, overflow);
  ++version_;
  if (verdict.skip()) return verdict;
  for (uint64_t& t : tensor_steps_) ++t;
  for (const model::Chunk& chunk : layout_.chunks()) Update(chunk, header, std::bit_cast<float>(verdict.factor_bits()));
  return verdict;
}

absl::Status LocalSource::ReadMaster(const std::string& tensor, absl::Span<float> to) {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, layout_.FindTensor(tensor));
  const model::Tensor& t = layout_.tensors()[index];
  if (to.size() != t.range.size()) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadLength,
        absl::StrCat("tensor '", tensor, "': expected room for ", t.range.size(), " elements, got ", to.size()));
  }
  std::copy_n(units_[t.unit].master.begin() + static_cast<ptrdiff_t>(t.range.begin), t.range.size(), to.begin());
  return absl::OkStatus();
}

}  // namespace ballast::client
