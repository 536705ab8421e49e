#include "ballast/client/tensors.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
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

// The units ahead on their way, and the memory that they need: a pull into it, or into parameters.
struct Tensors::Fetching {
  const Unit* unit;
  std::vector<std::byte> memory;
  PendingPull pull;
};

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

absl::Status Tensors::Initialise(absl::Span<const TensorMemory> memory, const Source& source) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  return session_->takes_gradients() ? LendValues(memory) : PushValues(memory, source);
}

absl::Status Tensors::LendValues(absl::Span<const TensorMemory> memory) {
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
    status = session_->Initialise([](absl::string_view, uint64_t, absl::Span<float>) {});
    status.Update(status.ok() ? session_->AwaitApplied() : session_->Drop());
  }
  return status;
}

absl::Status Tensors::PushValues(absl::Span<const TensorMemory> memory, const Source& source) {
  std::map<uint32_t, size_t> by_index;
  for (size_t i = 0; i < names_.size(); ++i) by_index[parts_[i].index] = i;
  size_t given = names_.size();  // the tensor that `gives` is of
  TensorMemory gives;
  return session_->Initialise([&](absl::string_view name, uint64_t first, absl::Span<float> values) {
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
  });
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
  BALLAST_RETURN_IF_ERROR(CheckGradients(memory));
  if (!session_->takes_loans()) return Push(memory);
  const Dtype gradient = session_->optimizer().gradient, working = session_->optimizer().working;
  const bool gradients = session_->takes_gradients(), lends_masters = session_->lends_masters();
  if (!gradients) BALLAST_RETURN_IF_ERROR(Push(memory));
  std::vector<model::LentTensor> lent(session_->tensor_count());
  for (size_t i = 0; i < names_.size(); ++i) {
    const TensorMemory& from = memory[i];
    model::LentTensor& to = lent[parts_[i].index];
    Converted& own = converted_[i];
    if (gradients) to.gradient = from.gradient;
    const bool in_order = parts_[i].runs.size() <= 1;
    if (to.gradient != nullptr && (from.gradient_dtype != gradient || !in_order)) {
      own.gradient.resize(parts_[i].elements * ElementBytes(gradient));
      ToServers(parts_[i], from.gradient, from.gradient_dtype, own.gradient.data(), gradient);
      to.gradient = own.gradient.data();
    }
    to.working = from.parameter;
    own.lent = false;
    if (from.parameter_dtype == working && in_order) continue;
    // A parameter that is not updated is not written either, and stays unchanged in the trainer.
    own.lent = from.gradient != nullptr || session_->written(parts_[i].index);
    if (own.lent) own.parameter.resize(parts_[i].elements * ElementBytes(working));
    to.working = own.lent ? own.parameter.data() : nullptr;
    if (!own.lent || !lends_masters) continue;
    if (from.parameter_dtype != working) {
      return model::Error(
          absl::StatusCode::kInvalidArgument, model::kBadDtype,
          absl::StrCat("parameter '", names_[i], "' is its own master in this job, and is not fp32: it would be ",
                       "rounded at each step"));
    }
    ToServers(parts_[i], from.parameter, working, own.parameter.data(), working);
  }
  return session_->Lend(std::move(lent));
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
                                const std::shared_ptr<const void>& owner) {
  std::vector<TensorMemory> memory(names_.size());
  for (size_t i = 0; i < gradients.size(); ++i) memory[units_[unit].tensors[i]] = gradients[i];
  BALLAST_RETURN_IF_ERROR(CheckGradients(memory));
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
    return session_->PushBorrowed(unit.index, std::move(runs), absent, converts ? converted : owner);
  }
  buffer_.assign(owned * width, std::byte{0});
  ConvertGradients(unit, memory, absl::MakeSpan(buffer_));
  if (dtype == Dtype::kF32) {
    return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const float*>(buffer_.data()), owned),
                          absent);
  }
  return session_->Push(unit.index, absl::MakeConstSpan(reinterpret_cast<const bf16*>(buffer_.data()), owned), absent);
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

absl::Status Tensors::Pull(absl::Span<const TensorMemory> memory, const Ready& ready) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  if (session_->lends_masters()) return session_->AwaitApplied();
  if (gathers_) return Gather(memory, ready);
  std::deque<Fetching> under_way;  // each ends its pull before its memory goes
  uint64_t bytes = 0;
  for (size_t next = 0; next < units_.size() || !under_way.empty();) {
    const uint64_t more = next < units_.size() ? units_[next].fetched_bytes : 0;
    if (next < units_.size() && (under_way.empty() || bytes + more <= session_->inflight_bytes_max())) {
      BALLAST_ASSIGN_OR_RETURN(Fetching fetching, StartFetching(units_[next++], memory));
      under_way.push_back(std::move(fetching));
      bytes += more;
      continue;
    }
    Fetching& oldest = under_way.front();
    BALLAST_RETURN_IF_ERROR(Finish(&oldest, memory));
    if (ready) ready(oldest.unit->tensors);
    bytes -= oldest.unit->fetched_bytes;
    under_way.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensors::Fetching> Tensors::StartFetching(const Unit& unit, absl::Span<const TensorMemory> memory) {
  const Dtype dtype = session_->optimizer().working;
  const auto wanted = [&](const Fetch& fetch) { return memory[fetch.runs[0].tensor].parameter != nullptr; };
  const auto direct = [&](const Fetch& fetch) {
    return fetch.runs.size() == 1 && memory[fetch.runs[0].tensor].parameter_dtype == dtype;
  };
  uint64_t indirect = 0;  // bytes
  for (const Fetch& fetch : unit.fetches) {
    if (wanted(fetch) && !direct(fetch)) indirect += (fetch.range.end - fetch.range.begin) * ElementBytes(dtype);
  }
  std::vector<std::byte> own(indirect);
  std::vector<PullRun> runs;
  uint64_t used = 0;
  for (const Fetch& fetch : unit.fetches) {
    if (!wanted(fetch)) continue;
    const uint64_t size = (fetch.range.end - fetch.range.begin) * ElementBytes(dtype);
    std::byte* to = own.data() + used;
    if (direct(fetch)) {
      to = memory[fetch.runs[0].tensor].parameter + fetch.runs[0].local * ElementBytes(dtype);
    } else {
      used += size;
    }
    runs.push_back({fetch.range, {to, size}});
  }
  BALLAST_ASSIGN_OR_RETURN(PendingPull pull, session_->StartPull(unit.index, runs));
  return Fetching{&unit, std::move(own), std::move(pull)};
}

absl::Status Tensors::Finish(Fetching* fetching, absl::Span<const TensorMemory> memory) {
  BALLAST_RETURN_IF_ERROR(fetching->pull.Await());
  const Dtype dtype = session_->optimizer().working;
  absl::Span<const std::byte> rest = fetching->memory;
  for (const Fetch& fetch : fetching->unit->fetches) {
    if (memory[fetch.runs[0].tensor].parameter == nullptr) continue;
    if (fetch.runs.size() == 1 && memory[fetch.runs[0].tensor].parameter_dtype == dtype) continue;
    Scatter(fetch.runs, rest, memory);
    rest.remove_prefix((fetch.range.end - fetch.range.begin) * ElementBytes(dtype));
  }
  return absl::OkStatus();
}

absl::Status Tensors::Gather(absl::Span<const TensorMemory> memory, const Ready& ready) {
  const uint64_t width = ElementBytes(session_->optimizer().working);
  size_t ahead = 0;
  uint64_t bytes = 0;  // of units in [i, ahead)
  for (size_t i = 0; i < units_.size(); ++i) {
    while (ahead < units_.size() &&
           (ahead <= i || bytes + units_[ahead].elements * width <= session_->inflight_bytes_max())) {
      bytes += units_[ahead].elements * width;
      session_->Prefetch(units_[ahead++].index);
    }
    BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session_->Acquire(units_[i].index));
    Scatter(units_[i].whole, lease.bytes(), memory);
    if (ready) ready(units_[i].tensors);
    bytes -= units_[i].elements * width;
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
