#include "ballast/client/examples/server_source.h"

#include "absl/container/flat_hash_map.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

std::vector<TensorSpec> SessionTensors(const ModelShape& shape) {
  std::vector<TensorSpec> specs;
  for (const ModelTensor& tensor : TensorsOf(shape)) {
    TensorSpec& spec = specs.emplace_back();
    spec.name = tensor.name;
    spec.unit = tensor.unit;
    spec.shape = tensor.shape;
    spec.group = tensor.group;
  }
  return specs;
}

absl::StatusOr<std::unique_ptr<ServerSource>> ServerSource::Create(std::unique_ptr<Session> session,
                                                                   const ModelShape& shape, uint64_t seed) {
  std::unique_ptr<ServerSource> source(new ServerSource(std::move(session)));
  absl::flat_hash_map<std::string, ModelTensor> tensors;
  std::string last_unit;
  for (const ModelTensor& tensor : TensorsOf(shape)) {
    if (tensor.unit != last_unit) {
      BALLAST_ASSIGN_OR_RETURN(const uint32_t unit, source->session_->FindUnit(tensor.unit));
      source->units_.push_back(unit);
    }
    last_unit = tensor.unit;
    tensors[tensor.name] = tensor;
  }
  if (source->session_->version() < 0) {
    BALLAST_RETURN_IF_ERROR(
        source->session_->Initialise([&](absl::string_view tensor, uint64_t first, absl::Span<float> values) {
          FillInitialValues(shape, tensors.at(tensor), seed, first, values);
        }));
  }
  return source;
}

absl::StatusOr<uint64_t> ServerSource::Locate(const std::string& tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const Session::Location location, session_->Locate(tensor));
  return location.begin;
}

std::vector<ParameterSource::Ranges> ServerSource::OwnedRanges(uint32_t unit) const {
  std::vector<Ranges> all(session_->world_size());
  for (int rank = 0; rank < session_->world_size(); ++rank) {
    for (const UnitRange& range : session_->RangesOf(rank, units_[unit])) all[rank].push_back({range.begin, range.end});
  }
  return all;
}

absl::Status ServerSource::Acquire(uint32_t unit, absl::Span<float> parameters) {
  BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session_->Acquire(units_[unit]));
  kernels::ToF32(session_->optimizer().working, lease.bytes().data(), parameters);
  return absl::OkStatus();
}

absl::Status ServerSource::Push(uint32_t unit, absl::Span<const float> gradient) {
  const kernels::Dtype dtype = session_->optimizer().gradient;
  if (dtype == kernels::Dtype::kF32) return session_->Push(units_[unit], gradient);
  rounded_.resize(gradient.size());
  kernels::FromF32(gradient, dtype, reinterpret_cast<std::byte*>(rounded_.data()));
  return session_->Push(units_[unit], rounded_);
}

absl::StatusOr<v1::Verdict> ServerSource::FinishStep(const v1::StepHeader& header, const std::string& blob) {
  StepOptions options;
  for (const v1::GroupHyper& group : header.groups()) {
    options.groups.push_back({.learning_rate = group.learning_rate(),
                              .beta1 = group.beta1(),
                              .beta2 = group.beta2(),
                              .epsilon = group.epsilon(),
                              .weight_decay = group.weight_decay(),
                              .dampening = group.dampening(),
                              .learning_rate_decay = group.learning_rate_decay(),
                              .initial_accumulator = group.initial_accumulator(),
                              .maximize = group.maximize(),
                              .beta3 = group.beta3(),
                              .alpha = group.alpha(),
                              .average = group.average()});
  }
  options.gradient_scale = header.gradient_scale();
  options.max_norm = header.max_norm();
  options.blob = blob;
  BALLAST_ASSIGN_OR_RETURN(const StepReport report, session_->Step(options));
  v1::Verdict verdict;
  verdict.set_skip(report.skipped);
  verdict.set_norm(report.norm);
  return verdict;
}

absl::Status ServerSource::ReadMaster(const std::string& tensor, absl::Span<float> to) {
  return session_->Read(tensor, Content::kMaster, session_->version(), to);
}

}  // namespace ballast::client
