#include "ballast/client/tensors.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {
namespace {

using kernels::Dtype;
using kernels::ElementBytes;

absl::Status BadSpec(absl::string_view what) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec, what);
}

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
  std::map<uint32_t, std::vector<std::pair<Session::Location, size_t>>> by_unit;
  for (size_t i = 0; i < names.size(); ++i) {
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session->Locate(names[i]));
    by_unit[at.unit].emplace_back(at, i);
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
          if (local == Local::kRows) tensors.local_elements_[tensor] += end - begin;
        }
        before += range.end - range.begin;
      }
    }
  }
  return tensors;
}

absl::Status Tensors::Initialise(absl::Span<const TensorMemory> memory) {
  std::map<absl::string_view, size_t> index;
  for (size_t i = 0; i < names_.size(); ++i) index[names_[i]] = i;
  absl::Status missing;
  const absl::Status initialised =
      session_->Initialise([&](absl::string_view name, uint64_t first, absl::Span<float> values) {
        const auto found = index.find(name);
        if (found == index.end()) {
          missing.Update(BadSpec(absl::StrCat("tensor '", name, "' of the job has no values in this trainer")));
          return;
        }
        const TensorMemory& tensor = memory[found->second];
        // Of rows, the part that is owned begins where the local elements do.
        const uint64_t skipped = local_ == Local::kWhole ? first : 0;
        Convert(tensor.parameter + skipped * ElementBytes(tensor.parameter_dtype), tensor.parameter_dtype,
                reinterpret_cast<std::byte*>(values.data()), Dtype::kF32, values.size(), &wide_);
      });
  return missing.ok() ? initialised : missing;
}

absl::Status Tensors::Push(absl::Span<const TensorMemory> memory) {
  for (const Unit& unit : units_) BALLAST_RETURN_IF_ERROR(PushUnit(unit, memory));
  return absl::OkStatus();
}

absl::Status Tensors::PushUnit(const Unit& unit, absl::Span<const TensorMemory> memory) {
  std::vector<std::string> absent;
  for (const size_t tensor : unit.tensors) {
    if (memory[tensor].gradient == nullptr) absent.push_back(names_[tensor]);
  }
  if (absent.size() == unit.tensors.size()) return absl::OkStatus();
  const Dtype dtype = session_->optimizer().gradient;
  const uint64_t width = ElementBytes(dtype), owned = session_->owned_elements(unit.index);
  buffer_.resize(owned * width);
  for (const Run& run : unit.owned) {
    const TensorMemory& tensor = memory[run.tensor];
    std::byte* const to = buffer_.data() + run.at * width;
    if (tensor.gradient == nullptr) {
      std::memset(to, 0, run.count * width);
    } else {
      Convert(tensor.gradient + run.local * ElementBytes(tensor.gradient_dtype), tensor.gradient_dtype, to, dtype,
              run.count, &wide_);
    }
  }
  if (dtype == Dtype::kF32) {
    return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const float*>(buffer_.data()), owned),
                          absent);
  }
  return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const bf16*>(buffer_.data()), owned), absent);
}

absl::Status Tensors::Pull(absl::Span<const TensorMemory> memory) {
  for (const Unit& unit : units_) session_->Prefetch(unit.index);
  const Dtype dtype = session_->optimizer().working;
  for (const Unit& unit : units_) {
    if (local_ == Local::kWhole) {
      BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session_->Acquire(unit.index));
      Scatter(unit.whole, lease.bytes(), memory);
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
  }
  return absl::OkStatus();
}

void Tensors::Scatter(const std::vector<Run>& runs, absl::Span<const std::byte> from,
                      absl::Span<const TensorMemory> memory) const {
  const Dtype dtype = session_->optimizer().working;
  std::vector<float> wide;
  for (const Run& run : runs) {
    const TensorMemory& tensor = memory[run.tensor];
    Convert(from.data() + run.at * ElementBytes(dtype), dtype,
            tensor.parameter + run.local * ElementBytes(tensor.parameter_dtype), tensor.parameter_dtype, run.count,
            &wide);
  }
}

}  // namespace ballast::client
