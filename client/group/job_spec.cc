#include "ballast/client/group/job_spec.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::client {
namespace {

std::string Some(const std::vector<std::string>& tensors) {
  return absl::StrCat("tensor '", tensors.front(), "'",
                      tensors.size() > 1 ? absl::StrCat(" and ", tensors.size() - 1, " more") : "");
}

std::string DurabilityOf(const v1::JobSpec& spec) {
  if (spec.durability() == v1::DURABILITY_EVERY_K) {
    return absl::StrCat("every-K with pin_interval ", spec.pin_interval());
  }
  return spec.durability() == v1::DURABILITY_STEP ? "step" : "none";
}

// `missing`: the job has them, and the session does not name them. `unknown`: the other way round.
absl::Status CheckSameNames(const std::vector<std::string>& missing, const std::vector<std::string>& unknown) {
  if (missing.empty() && unknown.empty()) return absl::OkStatus();
  std::vector<std::string> what;
  if (!missing.empty()) {
    what.push_back(absl::StrCat("the job has ", Some(missing),
                                ", which this session does not name; a session names all of a job's tensors"));
  }
  if (!unknown.empty()) {
    what.push_back(absl::StrCat("the job does not have ", Some(unknown),
                                "; open the session with the job's tensors only, and register others later"));
  }
  absl::Status status =
      model::Error(absl::StatusCode::kInvalidArgument, model::kTensorsDiffer, absl::StrJoin(what, ". And "));
  constexpr absl::string_view kBetween("\0", 1);
  if (!missing.empty()) model::SetDetail(model::kMissing, absl::StrJoin(missing, kBetween), &status);
  if (!unknown.empty()) model::SetDetail(model::kUnknown, absl::StrJoin(unknown, kBetween), &status);
  return status;
}

// What to do if only the tensors' units differ, as those of experts do in jobs of earlier versions; "" if more differs.
std::string WayOut(const v1::TensorSpec& given, const v1::TensorSpec& job) {
  v1::TensorSpec same = given;
  same.set_unit(job.unit());
  if (Show(same) != Show(job) || !absl::StartsWith(given.unit(), absl::StrCat(job.unit(), "."))) return "";
  return absl::StrCat(
      ". A job keeps its units, and an earlier version of Ballast had experts in the units of their layers: export the "
      "job's state and the model's by the version that made it (export_state, state_dict), and load both into a new "
      "job "
      "(load_state_dict, import_state)");
}

}  // namespace

std::string Show(const v1::TensorSpec& tensor) {
  return absl::StrCat("unit '", tensor.unit(), "', shape [", absl::StrJoin(tensor.shape(), ", "), "], group ",
                      tensor.group(), ", aliases [", absl::StrJoin(tensor.aliases(), ", "), "]");
}

absl::Status BadSpec(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec, message);
}

v1::TensorSpec ToProto(const TensorSpec& tensor) {
  v1::TensorSpec proto;
  proto.set_name(tensor.name);
  proto.set_unit(tensor.unit);
  for (const uint64_t extent : tensor.shape) proto.add_shape(extent);
  proto.set_group(tensor.group);
  for (const std::string& alias : tensor.aliases) proto.add_aliases(alias);
  proto.set_dtype(tensor.dtype);
  proto.set_frozen(tensor.frozen);
  proto.set_assist(tensor.assist);
  if (tensor.parts.count > 1) {
    proto.set_part_dimension(tensor.parts.dimension);
    proto.set_parts(tensor.parts.count);
  }
  return proto;
}

v1::JobSpec MakeSpec(const SessionOptions& options, const std::vector<TensorSpec>& tensors) {
  v1::JobSpec spec;
  spec.set_name(options.job);
  spec.set_chunk_elements(options.chunk_elements);
  model::SetOptimizer(options.optimizer, &spec);
  spec.set_seed(options.seed);
  spec.set_durability(options.durability);
  spec.set_pin_interval(options.pin_interval);
  spec.set_group_count(options.group_count);
  v1::Registration* registration = spec.add_registrations();
  registration->set_version(-1);
  for (const TensorSpec& tensor : tensors) *registration->add_tensors() = ToProto(tensor);
  return spec;
}

const char* Who(v1::Assist assist) {
  if (assist == v1::ASSIST_UPDATE) return "updated by the trainer (as Muon's matrices)";
  return assist == v1::ASSIST_STATE ? "a state of the trainer's optimizer" : "updated by the job's optimizer";
}

absl::Status CheckSameSpec(const v1::JobSpec& given, const v1::JobSpec& job) {
  if (DurabilityOf(given) != DurabilityOf(job)) {
    return BadSpec(absl::StrCat("the job has durability ", DurabilityOf(job), ", this session asks for ",
                                DurabilityOf(given), "; a job's durability cannot change, so ask for the job's own"));
  }
  BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec wanted, model::OptimizerOf(given));
  BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec has, model::OptimizerOf(job));
  if (!(wanted == has)) {
    return BadSpec(absl::StrCat("the job has ", model::Show(has), ", this session asks for ", model::Show(wanted),
                                "; a job's optimizer and formats cannot change"));
  }
  // Later registrations replace earlier ones of the same name.
  absl::flat_hash_map<std::string, const v1::TensorSpec*> live;
  for (const auto& registration : job.registrations()) {
    for (const v1::TensorSpec& tensor : registration.tensors()) live[tensor.name()] = &tensor;
  }
  std::vector<std::string> unknown;
  for (const auto& registration : given.registrations()) {
    for (const v1::TensorSpec& tensor : registration.tensors()) {
      const auto it = live.find(tensor.name());
      if (it == live.end()) {
        unknown.push_back(tensor.name());
        continue;
      }
      // Who freezes a tensor, or thaws it, hears of that.
      const bool trained = tensor.frozen() == v1::FROZEN_UNSPECIFIED && it->second->frozen() == v1::FROZEN_UNSPECIFIED;
      if (trained && tensor.assist() != it->second->assist()) {
        return BadSpec(absl::StrCat("tensor '", tensor.name(), "' is ", Who(it->second->assist()),
                                    " in the job, and is to be ", Who(tensor.assist()),
                                    "; that cannot change: open the job with the optimizer that it was made with"));
      }
      if (Show(tensor) != Show(*it->second)) {
        return BadSpec(absl::StrCat("tensor '", tensor.name(), "' differs: the job has ", Show(*it->second),
                                    ", this session gives ", Show(tensor), WayOut(tensor, *it->second)));
      }
      live.erase(it);
    }
  }
  if (given.group_count() != job.group_count()) {
    return BadSpec(absl::StrCat("the job has room for ", job.group_count(),
                                " parameter groups (group_count), this session asks for ", given.group_count(),
                                "; this number cannot change, so make a new job for more groups"));
  }
  std::vector<std::string> missing;
  for (const auto& [name, tensor] : live) missing.push_back(name);
  std::sort(missing.begin(), missing.end());
  return CheckSameNames(missing, unknown);
}

}  // namespace ballast::client
