// Pulls of tensors: of all into the trainer's parameters, and of single ones, for parameters that live on the servers
// alone.
#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/tensors.h"
#include "ballast/client/tensors/convert.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::client {
namespace {

using kernels::Dtype;
using kernels::ElementBytes;

}  // namespace

// The units ahead on their way, and the memory that they need: a pull into it, or into parameters.
struct Tensors::Fetching {
  const Unit* unit;
  std::vector<std::byte> memory;
  PendingPull pull;
};

absl::Status Tensors::Pull(absl::Span<const TensorMemory> memory, const Ready& ready) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  BALLAST_RETURN_IF_ERROR(CheckParameters(memory));
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
  std::vector<const Unit*> wanted;  // the same on all ranks, which have the same tensors
  for (const Unit& unit : units_) {
    const bool is_wanted = std::any_of(unit.tensors.begin(), unit.tensors.end(),
                                       [&](size_t tensor) { return memory[tensor].parameter != nullptr; });
    if (is_wanted) wanted.push_back(&unit);
  }
  size_t ahead = 0;
  uint64_t bytes = 0;  // of units in [i, ahead)
  for (size_t i = 0; i < wanted.size(); ++i) {
    while (ahead < wanted.size() &&
           (ahead <= i || bytes + wanted[ahead]->elements * width <= session_->inflight_bytes_max())) {
      bytes += wanted[ahead]->elements * width;
      session_->Prefetch(wanted[ahead++]->index);
    }
    BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session_->Acquire(wanted[i]->index));
    Scatter(wanted[i]->whole, lease.bytes(), memory);
    if (ready) ready(wanted[i]->tensors);
    bytes -= wanted[i]->elements * width;
  }
  return absl::OkStatus();
}

void Tensors::Scatter(const std::vector<Run>& runs, absl::Span<const std::byte> from,
                      absl::Span<const TensorMemory> memory) const {
  const Dtype dtype = session_->optimizer().working;
  std::vector<float> wide;
  for (const Run& run : runs) {
    const TensorMemory& tensor = memory[run.tensor];
    if (tensor.parameter == nullptr) continue;  // it lives on the servers alone
    Convert(from.data() + run.at * ElementBytes(dtype), dtype,
            tensor.parameter + run.local * ElementBytes(tensor.parameter_dtype), tensor.parameter_dtype, run.count,
            &wide);
  }
}

uint64_t Tensors::PullBytes(size_t index) const {
  const Dtype dtype = session_->optimizer().working;
  const Part& part = parts_[index];
  if (part.elements == 0) return 0;
  const uint64_t amid = part.runs[0].in_tensor % kernels::GrainOf(dtype);
  return kernels::BytesOf(dtype, amid + part.elements);
}

absl::Status Tensors::CheckParameters(absl::Span<const TensorMemory> memory) const {
  const Dtype dtype = session_->optimizer().working;
  if (kernels::GrainOf(dtype) == 1) return absl::OkStatus();
  for (size_t i = 0; i < memory.size(); ++i) {
    if (memory[i].parameter == nullptr || parts_[i].elements == 0) continue;
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("parameter '", names_[i], "' is in the trainer's memory, and this job's are ",
                                     model::NameOf(dtype), ", which nothing decodes there: keep parameters on the ",
                                     "servers, or take another working dtype"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PendingPull>> Tensors::StartPull(absl::Span<const size_t> which,
                                                            absl::Span<std::byte* const> to,
                                                            absl::Span<const model::Box> boxes) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  const Dtype dtype = session_->optimizer().working;
  const uint64_t grain = kernels::GrainOf(dtype);
  std::map<uint32_t, std::vector<PullRun>> runs;  // by unit of the session
  for (size_t i = 0; i < which.size(); ++i) {
    const Part& part = parts_[which[i]];
    if (boxes.empty() && part.elements == 0) continue;
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session_->Locate(names_[which[i]]));
    const std::vector<model::BoxRun> of_part = boxes.empty() ? part.runs : session_->RunsOf(part.index, boxes[i]);
    if (grain > 1 && of_part.size() > 1) {
      return model::Error(
          absl::StatusCode::kUnimplemented, model::kUnsupported,
          absl::StrCat("tensor '", names_[which[i]], "' is wanted in ", of_part.size(), " runs, and its ", "blocks of ",
                       grain, " elements have one scale: divide it by rows alone"));
    }
    for (const model::BoxRun& run : of_part) {
      const uint64_t begin = (part.begin + run.in_tensor) / grain * grain;  // tensors begin at blocks
      const uint64_t end = part.begin + run.in_tensor + run.count;
      std::byte* const place = to[i] + run.in_box * ElementBytes(dtype);
      runs[at.unit].push_back({{begin, end}, {place, kernels::BytesOf(dtype, end - begin)}});
    }
  }
  std::vector<PendingPull> pulls;
  pulls.reserve(runs.size());
  for (const auto& [unit, of_unit] : runs) {
    BALLAST_ASSIGN_OR_RETURN(PendingPull pull, session_->StartPull(unit, of_unit));
    pulls.push_back(std::move(pull));
  }
  return pulls;
}

}  // namespace ballast::client
