#include "ballast/client/tensors.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {
namespace {

using kernels::Dtype;
using kernels::ElementBytes;

// Elements from one dtype to another, by way of `wide`.
void Convert(const std::byte* from, Dtype from_dtype, std::byte* to, Dtype to_dtype, uint64_t count,
             std::vector<float>* wide) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, count * ElementBytes(to_dtype));
  } else if (to_dtype == Dtype::kF32) {
    kernels::ToF32(from_dtype, from, absl::MakeSpan(reinterpret_cast<float*>(to), count));
  } else if (from_dtype == Dtype::kF32) {
    kernels::FromF32(absl::MakeConstSpan(reinterpret_cast<const float*>(from), count), to_dtype, to);
  } else {
    wide->resize(count);
    kernels::ToF32(from_dtype, from, absl::MakeSpan(*wide));
    kernels::FromF32(*wide, to_dtype, to);
  }
}

}  // namespace

absl::StatusOr<Tensors> Tensors::Make(Session* session, const std::vector<std::string>& names, Local local) {
  Tensors tensors(session, local);
  tensors.names_ = names;
  tensors.local_elements_.resize(names.size());
  tensors.local_begins_.resize(names.size());
  tensors.converted_.resize(names.size());
  tensors.tensor_count_ = session->tensor_count();
  std::map<uint32_t, std::vector<std::pair<Session::Location, size_t>>> by_unit;
  for (size_t i = 0; i < names.size(); ++i) {
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session->Locate(names[i]));
    by_unit[at.unit].emplace_back(at, i);
    BALLAST_ASSIGN_OR_RETURN(const uint32_t index, session->TensorIndex(names[i]));
    tensors.indices_.push_back(index);
  }
  const absl::flat_hash_set<uint32_t> named(tensors.indices_.begin(), tensors.indices_.end());
  for (const std::string& name : session->tensor_names()) {
    BALLAST_ASSIGN_OR_RETURN(const uint32_t index, session->TensorIndex(name));
    if (named.contains(index)) continue;
    return BadSpec(absl::StrCat("tensor '", name, "' of the job is not among the ", names.size(), " that were named"));
  }
  for (auto& [index, located] : by_unit) {
    std::sort(located.begin(), located.end(),
              [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
    Unit& unit = tensors.units_.emplace_back();
    unit.index = index;
    unit.elements = session->unit_elements(index);
    const auto twice = std::adjacent_find(located.begin(), located.end(), [](const auto& a, const auto& b) {
      return a.first.begin == b.first.begin && a.first.end > a.first.begin;
    });
    if (twice != located.end()) {
      return BadSpec(absl::StrCat("'", names[twice->second], "' and '", names[std::next(twice)->second],
                                  "' are one tensor of the job; name it once"));
    }
    for (const auto& [at, tensor] : located) {
      unit.tensors.push_back(tensor);
      const uint64_t count = at.end - at.begin;
      if (local == Local::kWhole) {
        tensors.local_elements_[tensor] = count;
        unit.whole.push_back({tensor, 0, at.begin, count});
      }
      uint64_t before = 0;  // owned elements of the unit in front of the range
      for (const UnitRange& range : session->owned(index)) {
        const uint64_t begin = std::max(range.begin, at.begin), end = std::min(range.end, at.end);
        if (begin < end) {
          const uint64_t first = local == Local::kWhole ? begin - at.begin : tensors.local_elements_[tensor];
          unit.owned.push_back({tensor, first, before + begin - range.begin, end - begin});
          if (local == Local::kRows) {
            if (first == 0) tensors.local_begins_[tensor] = begin - at.begin;
            tensors.local_elements_[tensor] += end - begin;
          }
        }
        before += range.end - range.begin;
      }
    }
  }
  return tensors;
}

absl::Status Tensors::Initialise(absl::Span<const TensorMemory> memory, const Source& source) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  return session_->takes_gradients() ? LendValues(memory) : PushValues(memory, source);
}

absl::Status Tensors::LendValues(absl::Span<const TensorMemory> memory) {
  static constexpr std::byte kNoElements{};
  std::vector<model::LentTensor> lent(session_->tensor_count());
  std::vector<std::vector<std::byte>> converted;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!session_->needs_values(indices_[i])) continue;
    model::LentTensor& to = lent[indices_[i]];
    to.value = local_elements_[i] == 0 ? &kNoElements : memory[i].parameter;
    to.value_dtype = memory[i].parameter_dtype;
    if (to.value_dtype == Dtype::kF32 || to.value_dtype == session_->optimizer().working) continue;
    std::vector<std::byte>& wide = converted.emplace_back(local_elements_[i] * sizeof(float));
    Convert(to.value, to.value_dtype, wide.data(), Dtype::kF32, local_elements_[i], &wide_);
    to.value = wide.data();
    to.value_dtype = Dtype::kF32;
  }
  absl::Status status = session_->Lend(std::move(lent));
  if (status.ok()) {
    status = session_->Initialise([](absl::string_view, uint64_t, absl::Span<float>) {});
    status.Update(status.ok() ? session_->AwaitApplied() : session_->Drop());
  }
  return status;
}

absl::Status Tensors::PushValues(absl::Span<const TensorMemory> memory, const Source& source) {
  std::map<uint32_t, size_t> by_index;
  for (size_t i = 0; i < names_.size(); ++i) by_index[indices_[i]] = i;
  size_t given = names_.size();  // the tensor that `gives` is of
  TensorMemory gives;
  return session_->Initialise([&](absl::string_view name, uint64_t first, absl::Span<float> values) {
    const size_t i = by_index.at(*session_->TensorIndex(name));
    if (memory[i].parameter == nullptr && given != i) {
      gives = source(i);
      given = i;
    }
    const TensorMemory& tensor = memory[i].parameter == nullptr ? gives : memory[i];
    const uint64_t skipped = first - local_begins_[i];
    Convert(tensor.parameter + skipped * ElementBytes(tensor.parameter_dtype), tensor.parameter_dtype,
            reinterpret_cast<std::byte*>(values.data()), Dtype::kF32, values.size(), &wide_);
  });
}

absl::Status Tensors::CheckCurrent() const {
  if (session_->tensor_count() == tensor_count_) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                      "tensors were registered since these were made; Make them again, with all");
}

absl::StatusOr<TensorsReport> Tensors::Step(absl::Span<const TensorMemory> memory, const StepOptions& options,
                                            const Ready& ready) {
  absl::Time last = absl::Now();
  const auto lap = [&last] {
    const absl::Time now = absl::Now();
    return absl::ToDoubleSeconds(now - std::exchange(last, now));
  };
  const bool lends = session_->takes_loans();
  TensorsReport report;
  const absl::Status given = Give(memory);
  report.push_seconds = lap();
  const absl::StatusOr<StepReport> stepped =
      given.ok() ? session_->Step(options) : absl::StatusOr<StepReport>(session_->RefuseStep(given));
  if (!stepped.ok()) {
    session_->ReturnGradients();  // also where the session is finished, and drops nothing
    (void)Drop();
    return stepped.status();
  }
  report.step = *stepped;
  report.seal_seconds = lap();
  if (lends) {
    BALLAST_RETURN_IF_ERROR(TakeBack(memory, stepped->skipped, ready));
  } else if (!stepped->skipped) {
    BALLAST_RETURN_IF_ERROR(Pull(memory, ready));
  }
  report.pull_seconds = lap();
  return report;
}

absl::Status Tensors::Give(absl::Span<const TensorMemory> memory) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  if (!session_->takes_loans()) return Push(memory);
  const Dtype gradient = session_->optimizer().gradient, working = session_->optimizer().working;
  const bool gradients = session_->takes_gradients();
  if (!gradients) BALLAST_RETURN_IF_ERROR(Push(memory));
  std::vector<model::LentTensor> lent(session_->tensor_count());
  for (size_t i = 0; i < names_.size(); ++i) {
    const TensorMemory& from = memory[i];
    model::LentTensor& to = lent[indices_[i]];
    Converted& own = converted_[i];
    if (gradients) to.gradient = from.gradient;
    if (to.gradient != nullptr && from.gradient_dtype != gradient) {
      own.gradient.resize(local_elements_[i] * ElementBytes(gradient));
      Convert(from.gradient, from.gradient_dtype, own.gradient.data(), gradient, local_elements_[i], &wide_);
      to.gradient = own.gradient.data();
    }
    to.working = from.parameter;
    own.lent = false;
    if (from.parameter_dtype == working) continue;
    // A parameter that is not updated is not written either, and stays unchanged in the trainer.
    own.lent = from.gradient != nullptr || session_->written(indices_[i]);
    if (own.lent) own.parameter.resize(local_elements_[i] * ElementBytes(working));
    to.working = own.lent ? own.parameter.data() : nullptr;
  }
  return session_->Lend(std::move(lent));
}

absl::Status Tensors::TakeBack(absl::Span<const TensorMemory> memory, bool skipped, const Ready& ready) {
  absl::Status status;
  for (const Unit& unit : units_) {
    if (!ready || skipped) break;
    status = session_->AwaitUnit(unit.index);
    if (!status.ok()) break;
    Widen(unit, memory);
    ready(unit.tensors);
  }
  status.Update(session_->AwaitApplied());  // ends the loan, after an error too
  if (ready || skipped || !status.ok()) return status;
  for (const Unit& unit : units_) Widen(unit, memory);
  return absl::OkStatus();
}

void Tensors::Widen(const Unit& unit, absl::Span<const TensorMemory> memory) {
  for (const size_t i : unit.tensors) {
    if (!converted_[i].lent) continue;
    Convert(converted_[i].parameter.data(), session_->optimizer().working, memory[i].parameter,
            memory[i].parameter_dtype, local_elements_[i], &wide_);
  }
}

absl::Status Tensors::Push(absl::Span<const TensorMemory> memory) {
  absl::Status status;
  for (Unit& unit : units_) {
    if (!std::exchange(unit.pushed, false) && status.ok()) status = PushUnit(unit, memory);
  }
  return status;
}

absl::Status Tensors::PushEarly(size_t unit, absl::Span<const TensorMemory> gradients,
                                const std::shared_ptr<const void>& owner) {
  std::vector<TensorMemory> memory(names_.size());
  for (size_t i = 0; i < gradients.size(); ++i) memory[units_[unit].tensors[i]] = gradients[i];
  BALLAST_RETURN_IF_ERROR(PushUnit(units_[unit], memory, owner));
  units_[unit].pushed = true;
  return absl::OkStatus();
}

absl::Status Tensors::Drop() {
  for (Unit& unit : units_) unit.pushed = false;
  return session_->Drop();
}

absl::Status Tensors::PushUnit(const Unit& unit, absl::Span<const TensorMemory> memory,
                               const std::shared_ptr<const void>& owner) {
  std::vector<std::string> absent;
  for (const size_t tensor : unit.tensors) {
    if (memory[tensor].gradient == nullptr) absent.push_back(names_[tensor]);
  }
  if (absent.size() == unit.tensors.size()) return absl::OkStatus();
  const Dtype dtype = session_->optimizer().gradient;
  const uint64_t width = ElementBytes(dtype), owned = session_->owned_elements(unit.index);
  const bool converts = std::any_of(unit.tensors.begin(), unit.tensors.end(), [&](size_t tensor) {
    return memory[tensor].gradient != nullptr && memory[tensor].gradient_dtype != dtype;
  });
  if (!converts || owner != nullptr) {
    const auto converted = std::make_shared<std::vector<std::byte>>(converts ? owned * width : 0);
    if (converts) ConvertGradients(unit, memory, absl::MakeSpan(*converted));
    std::vector<GradientRun> runs;
    for (const Run& run : unit.owned) {
      const std::byte* const gradient = memory[run.tensor].gradient;
      if (gradient == nullptr) continue;
      const std::byte* const from = converts ? converted->data() + run.at * width : gradient + run.local * width;
      runs.push_back({run.at, {from, run.count * width}});
    }
    return session_->PushBorrowed(unit.index, std::move(runs), absent, converts ? converted : owner);
  }
  buffer_.resize(owned * width);
  ConvertGradients(unit, memory, absl::MakeSpan(buffer_));
  if (dtype == Dtype::kF32) {
    return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const float*>(buffer_.data()), owned),
                          absent);
  }
  return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const bf16*>(buffer_.data()), owned), absent);
}

void Tensors::ConvertGradients(const Unit& unit, absl::Span<const TensorMemory> memory, absl::Span<std::byte> to) {
  const Dtype dtype = session_->optimizer().gradient;
  const uint64_t width = ElementBytes(dtype);
  for (const Run& run : unit.owned) {
    const TensorMemory& tensor = memory[run.tensor];
    std::byte* const place = to.data() + run.at * width;
    if (tensor.gradient == nullptr) {
      std::memset(place, 0, run.count * width);
    } else {
      Convert(tensor.gradient + run.local * ElementBytes(tensor.gradient_dtype), tensor.gradient_dtype, place, dtype,
              run.count, &wide_);
    }
  }
}

absl::Status Tensors::Pull(absl::Span<const TensorMemory> memory, const Ready& ready) {
  const auto is_wanted = [&memory](const Unit& unit) {
    return std::any_of(unit.tensors.begin(), unit.tensors.end(),
                       [&memory](size_t tensor) { return memory[tensor].parameter != nullptr; });
  };
  for (const Unit& unit : units_) {
    if (is_wanted(unit)) session_->Prefetch(unit.index);
  }
  const Dtype dtype = session_->optimizer().working;
  for (const Unit& unit : units_) {
    if (!is_wanted(unit)) continue;
    if (local_ == Local::kWhole) {
      BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session_->Acquire(unit.index));
      Scatter(unit.whole, lease.bytes(), memory);
      if (ready) ready(unit.tensors);
      continue;
    }
    const uint64_t owned = session_->owned_elements(unit.index);
    buffer_.resize(owned * ElementBytes(dtype));
    if (dtype == Dtype::kF32) {
      BALLAST_RETURN_IF_ERROR(
          session_->PullOwned(unit.index, absl::MakeSpan(reinterpret_cast<float*>(buffer_.data()), owned)));
    } else {
      BALLAST_RETURN_IF_ERROR(
          session_->PullOwned(unit.index, absl::MakeSpan(reinterpret_cast<bf16*>(buffer_.data()), owned)));
    }
    Scatter(unit.owned, buffer_, memory);
    if (ready) ready(unit.tensors);
  }
  return absl::OkStatus();
}

void Tensors::Scatter(const std::vector<Run>& runs, absl::Span<const std::byte> from,
                      absl::Span<const TensorMemory> memory) const {
  const Dtype dtype = session_->optimizer().working;
  std::vector<float> wide;
  for (const Run& run : runs) {
    const TensorMemory& tensor = memory[run.tensor];
    if (tensor.parameter == nullptr) continue;
    Convert(from.data() + run.at * ElementBytes(dtype), dtype,
            tensor.parameter + run.local * ElementBytes(tensor.parameter_dtype), tensor.parameter_dtype, run.count,
            &wide);
  }
}

}  // namespace ballast::client
