#include "ballast/client/tensors.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/tensors/convert.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using kernels::Dtype;
using kernels::ElementBytes;

}  // namespace

Tensors::Tensors(Session* session)
    : session_(session), gathers_(session->split() == Split::kEven && session->world_size() > 1) {}

absl::StatusOr<Tensors> Tensors::Make(Session* session, const std::vector<std::string>& names) {
  Tensors tensors(session);
  tensors.names_ = names;
  tensors.parts_.resize(names.size());
  tensors.converted_.resize(names.size());
  tensors.tensor_count_ = session->tensor_count();
  std::map<uint32_t, Unit> by_index;
  absl::flat_hash_map<uint32_t, size_t> named;
  for (size_t i = 0; i < names.size(); ++i) {
    Part& part = tensors.parts_[i];
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session->Locate(names[i]));
    BALLAST_ASSIGN_OR_RETURN(part.index, session->TensorIndex(names[i]));
    part.is_frozen = *session->FrozenAs(names[i]) != v1::FROZEN_UNSPECIFIED;
    const auto [other, is_new] = named.try_emplace(part.index, i);
    if (!is_new) {
      return BadSpec(
          absl::StrCat("'", names[other->second], "' and '", names[i], "' are one tensor of the job; name it once"));
    }
    part.begin = at.begin;
    if (const model::Box* box = session->Held(part.index); box != nullptr) {
      part.elements = model::ElementsOf(*box);
      part.runs = session->RunsOf(part.index, *box);
    }
    Unit& unit = by_index[at.unit];
    unit.index = at.unit;
    unit.tensors.push_back(i);
  }
  for (const std::string& name : session->tensor_names()) {
    BALLAST_ASSIGN_OR_RETURN(const uint32_t index, session->TensorIndex(name));
    if (named.contains(index)) continue;
    if (session->Held(index) != nullptr) {
      return BadSpec(
          absl::StrCat("tensor '", name, "' of the job is not among the ", names.size(), " that were named"));
    }
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session->Locate(name));
    if (const auto unit = by_index.find(at.unit); unit != by_index.end()) unit->second.lacking.push_back(name);
  }
  for (auto& [index, unit] : by_index) {
    tensors.Place(&unit);
    tensors.units_.push_back(std::move(unit));
  }
  return tensors;
}

void Tensors::Place(Unit* unit) {
  std::sort(unit->tensors.begin(), unit->tensors.end(),
            [this](size_t a, size_t b) { return parts_[a].begin < parts_[b].begin; });
  unit->elements = session_->unit_elements(unit->index);
  const std::vector<UnitRange>& owned = session_->owned(unit->index);
  size_t next = 0;
  uint64_t before = 0;  // owned elements of the unit in front of owned[next]
  for (const size_t tensor : unit->tensors) {
    const Part& part = parts_[tensor];
    for (const model::BoxRun& run : part.runs) {
      const uint64_t begin = part.begin + run.in_tensor, end = begin + run.count;
      while (next < owned.size() && owned[next].end <= begin) before += owned[next].end - owned[next].begin, ++next;
      uint64_t passed = before;
      for (size_t i = next; i < owned.size() && owned[i].begin < end; ++i) {
        const uint64_t from = std::max(owned[i].begin, begin), to = std::min(owned[i].end, end);
        unit->owned.push_back({tensor, run.in_box + (from - begin), passed + (from - owned[i].begin), to - from});
        passed += owned[i].end - owned[i].begin;
      }
      if (gathers_) unit->whole.push_back({tensor, run.in_box, begin, run.count});
    }
    if (gathers_) continue;
    for (const model::RunGroup& group : model::GroupRuns(part.runs, kGapElementsMax)) {
      Fetch& fetch = unit->fetches.emplace_back();
      fetch.range = {part.begin + group.range.begin, part.begin + group.range.end};
      for (size_t i = group.first; i < group.last; ++i) {
        const model::BoxRun& run = part.runs[i];
        fetch.runs.push_back({tensor, run.in_box, run.in_tensor - group.range.begin, run.count});
      }
      unit->fetched_bytes += group.range.size() * ElementBytes(session_->optimizer().working);
    }
  }
}

absl::Status Tensors::Initialise(absl::Span<const TensorMemory> memory, const Source& source, const std::string& blob) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  bool all_here = true;
  for (size_t i = 0; i < names_.size(); ++i) {
    all_here &= !session_->needs_values(parts_[i].index) || memory[i].parameter != nullptr || parts_[i].elements == 0;
  }
  return session_->takes_gradients() && all_here ? LendValues(memory, blob) : PushValues(memory, source, blob);
}

absl::Status Tensors::LendValues(absl::Span<const TensorMemory> memory, const std::string& blob) {
  static constexpr std::byte kNoElements{};
  std::vector<model::LentTensor> lent(session_->tensor_count());
  std::vector<std::vector<std::byte>> converted;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!session_->needs_values(parts_[i].index)) continue;
    model::LentTensor& to = lent[parts_[i].index];
    to.value = parts_[i].elements == 0 ? &kNoElements : memory[i].parameter;
    to.value_dtype = memory[i].parameter_dtype;
    const bool as_is = to.value_dtype == Dtype::kF32 || to.value_dtype == session_->optimizer().working;
    if (as_is && parts_[i].runs.size() <= 1) continue;
    std::vector<std::byte>& wide = converted.emplace_back(parts_[i].elements * sizeof(float));
    ToServers(parts_[i], to.value, to.value_dtype, wide.data(), Dtype::kF32);
    to.value = wide.data();
    to.value_dtype = Dtype::kF32;
  }
  absl::Status status = session_->Lend(std::move(lent));
  if (status.ok()) {
    status = session_->Initialise([](absl::string_view, uint64_t, absl::Span<float>) {}, blob);
    status.Update(status.ok() ? session_->AwaitApplied() : session_->Drop());
  }
  return status;
}

absl::Status Tensors::PushValues(absl::Span<const TensorMemory> memory, const Source& source, const std::string& blob) {
  std::map<uint32_t, size_t> by_index;
  for (size_t i = 0; i < names_.size(); ++i) by_index[parts_[i].index] = i;
  size_t given = names_.size();  // the tensor that `gives` is of
  TensorMemory gives;
  const auto fill = [&](absl::string_view name, uint64_t first, absl::Span<float> values) {
    const size_t i = by_index.at(*session_->TensorIndex(name));
    if (memory[i].parameter == nullptr && given != i) {
      gives = source(i);
      given = i;
    }
    const TensorMemory& tensor = memory[i].parameter == nullptr ? gives : memory[i];
    model::VisitRuns(parts_[i].runs, first, values.size(), [&](uint64_t in_box, uint64_t offset, uint64_t count) {
      Convert(tensor.parameter + in_box * ElementBytes(tensor.parameter_dtype), tensor.parameter_dtype,
              reinterpret_cast<std::byte*>(values.data() + offset), Dtype::kF32, count, &wide_);
    });
  };
  return session_->Initialise(fill, blob);
}

void Tensors::ToServers(const Part& part, const std::byte* from, Dtype from_dtype, std::byte* to, Dtype to_dtype) {
  for (const model::BoxRun& run : part.runs) {
    Convert(from + run.in_box * ElementBytes(from_dtype), from_dtype, to + run.in_tensor * ElementBytes(to_dtype),
            to_dtype, run.count, &wide_);
  }
}

absl::Status Tensors::CheckCurrent() const {
  if (session_->tensor_count() == tensor_count_) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                      "tensors were registered since these were made; Make them again, with all");
}

absl::Status Tensors::CheckGradients(absl::Span<const TensorMemory> memory) const {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!parts_[i].is_frozen || memory[i].gradient == nullptr) continue;
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadRequest,
        absl::StrCat("tensor '", names_[i], "' is frozen in the job, and a gradient of it was given; to ",
                     "train it, make a job in which it is not frozen"));
  }
  return absl::OkStatus();
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
    // The loan is over. The step may have been applied all the same, and then its buffers alone have the masters.
    for (const Unit& unit : units_) {
      if (given.ok() && session_->lends_masters()) Widen(unit, memory);
    }
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
  BALLAST_RETURN_IF_ERROR(CheckParameters(memory));
  BALLAST_RETURN_IF_ERROR(CheckGradients(memory));
  if (!session_->takes_loans() || !session_->takes_gradients()) BALLAST_RETURN_IF_ERROR(Push(memory));
  if (!session_->takes_loans()) return absl::OkStatus();
  std::vector<model::LentTensor> lent(session_->tensor_count());
  for (size_t i = 0; i < names_.size(); ++i) {
    model::LentTensor& to = lent[parts_[i].index];
    if (session_->takes_gradients()) to.gradient = LentGradient(i, memory[i]);
    BALLAST_ASSIGN_OR_RETURN(to.working, LentParameter(i, memory[i]));
  }
  return session_->Lend(std::move(lent));
}

const std::byte* Tensors::LentGradient(size_t i, const TensorMemory& from) {
  const Dtype gradient = session_->optimizer().gradient;
  if (from.gradient == nullptr || (from.gradient_dtype == gradient && parts_[i].in_order())) return from.gradient;
  std::vector<std::byte>& own = converted_[i].gradient;
  own.resize(parts_[i].elements * ElementBytes(gradient));
  ToServers(parts_[i], from.gradient, from.gradient_dtype, own.data(), gradient);
  return own.data();
}

absl::StatusOr<std::byte*> Tensors::LentParameter(size_t i, const TensorMemory& from) {
  const Dtype working = session_->optimizer().working;
  Converted& own = converted_[i];
  own.lent = false;
  if (from.parameter == nullptr) return nullptr;  // it lives on the servers alone
  if (from.parameter_dtype == working && parts_[i].in_order()) return from.parameter;
  // A parameter that is not updated is not written either, and stays unchanged in the trainer.
  if (from.gradient == nullptr && !session_->written(parts_[i].index)) return nullptr;
  own.lent = true;
  own.parameter.resize(parts_[i].elements * ElementBytes(working));
  if (!session_->lends_masters()) return own.parameter.data();
  if (from.parameter_dtype != working) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadDtype,
        absl::StrCat("parameter '", names_[i], "' is its own master in this job, and is not fp32: it would be ",
                     "rounded at each step"));
  }
  ToServers(parts_[i], from.parameter, working, own.parameter.data(), working);
  return own.parameter.data();
}

absl::Status Tensors::TakeBack(absl::Span<const TensorMemory> memory, bool skipped, const Ready& ready) {
  absl::Status status;
  size_t done = 0;
  for (; ready && !skipped && done < units_.size(); ++done) {
    const Unit& unit = units_[done];
    status = session_->AwaitUnit(unit.index);
    if (!status.ok()) break;
    Widen(unit, memory);
    ready(unit.tensors);
  }
  status.Update(session_->AwaitApplied());  // ends the loan, after an error too
  // A master that was lent by way of a buffer is nowhere else, whatever went wrong; other buffers may be unwritten.
  if (skipped || (!status.ok() && !session_->lends_masters())) return status;
  for (; done < units_.size(); ++done) Widen(units_[done], memory);
  return status;
}

void Tensors::Widen(const Unit& unit, absl::Span<const TensorMemory> memory) {
  for (const size_t i : unit.tensors) {
    if (!converted_[i].lent) continue;
    const Dtype working = session_->optimizer().working;
    for (const model::BoxRun& run : parts_[i].runs) {
      Convert(converted_[i].parameter.data() + run.in_tensor * ElementBytes(working), working,
              memory[i].parameter + run.in_box * ElementBytes(memory[i].parameter_dtype), memory[i].parameter_dtype,
              run.count, &wide_);
    }
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
                                const std::shared_ptr<const void>& owner, Waiter* admitted) {
  std::vector<TensorMemory> memory(names_.size());
  for (size_t i = 0; i < gradients.size(); ++i) memory[units_[unit].tensors[i]] = gradients[i];
  BALLAST_RETURN_IF_ERROR(CheckGradients(memory));
  BALLAST_RETURN_IF_ERROR(PushUnit(units_[unit], memory, owner, admitted));
  units_[unit].pushed = true;
  return absl::OkStatus();
}

absl::Status Tensors::Drop() {
  for (Unit& unit : units_) unit.pushed = false;
  return session_->Drop();
}

absl::Status Tensors::PushUnit(const Unit& unit, absl::Span<const TensorMemory> memory,
                               const std::shared_ptr<const void>& owner, Waiter* admitted) {
  std::vector<std::string> absent;
  for (const size_t tensor : unit.tensors) {
    if (memory[tensor].gradient == nullptr) absent.push_back(names_[tensor]);
  }
  if (absent.size() == unit.tensors.size()) return absl::OkStatus();
  absent.insert(absent.end(), unit.lacking.begin(), unit.lacking.end());
  const Dtype dtype = session_->optimizer().gradient;
  const uint64_t width = ElementBytes(dtype), owned = session_->owned_elements(unit.index);
  // Elements of the owned ranges that no run covers are padding.
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
    return session_->PushBorrowed(unit.index, std::move(runs), absent, converts ? converted : owner, Keep::kUntilCopied,
                                  admitted);
  }
  buffer_.assign(owned * width, std::byte{0});
  ConvertGradients(unit, memory, absl::MakeSpan(buffer_));
  if (dtype == Dtype::kF32) {
    return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const float*>(buffer_.data()), owned),
                          absent, admitted);
  }
  return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const bf16*>(buffer_.data()), owned), absent,
                        admitted);
}

void Tensors::ConvertGradients(const Unit& unit, absl::Span<const TensorMemory> memory, absl::Span<std::byte> to) {
  const Dtype dtype = session_->optimizer().gradient;
  for (const Run& run : unit.owned) {
    const TensorMemory& tensor = memory[run.tensor];
    if (tensor.gradient == nullptr) continue;
    Convert(tensor.gradient + run.local * ElementBytes(tensor.gradient_dtype), tensor.gradient_dtype,
            to.data() + run.at * ElementBytes(dtype), dtype, run.count, &wide_);
  }
}

absl::Status Tensors::Read(size_t index, Content content, absl::Span<float> to) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  if (parts_[index].elements == 0) return absl::OkStatus();
  return session_->Read(names_[index], content, session_->version(), to, parts_[index].runs);
}

absl::Status Tensors::Write(size_t index, absl::Span<const float> values) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  if (parts_[index].elements == 0) return absl::OkStatus();
  return session_->Write(names_[index], values, parts_[index].runs);
}

absl::StatusOr<StepReport> Tensors::CommitState(Content array, absl::Span<const size_t> which,
                                                absl::Span<const float* const> values, absl::Span<const uint64_t> steps,
                                                const std::string& blob) {
  std::vector<TensorState> states;
  for (size_t i = 0; i < which.size(); ++i) {
    const size_t tensor = which[i];
    states.push_back({.tensor = names_[tensor],
                      .values = {values[i], parts_[tensor].elements},
                      .runs = parts_[tensor].runs,
                      .steps = steps[i]});
  }
  return session_->CommitState(array, states, blob);
}

}  // namespace ballast::client
