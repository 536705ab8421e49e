#include "ballast/services/tools/plan_command.h"

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/server/estimate.h"

namespace ballast::services {
namespace {

constexpr uint64_t kParametersMax = uint64_t{1} << 40;  // a million chunks

std::string Json(const Estimate& estimate) {
  std::string tiers, zero;
  for (const v1::PlannedTier& tier : estimate.server.tiers()) {
    absl::StrAppend(&tiers, tiers.empty() ? "" : ",", "{\"tier\":", Quote(tier.tier()),
                    ",\"state_bytes\":", tier.state_bytes(), ",\"working_bytes\":", tier.working_bytes(),
                    ",\"other_bytes\":", tier.other_bytes(), "}");
  }
  for (const TrainerBytes& stage : estimate.zero) absl::StrAppend(&zero, zero.empty() ? "" : ",", stage.all());
  std::string out = absl::StrCat(
      "{\"parameters\":", estimate.parameters, ",\"fits\":", estimate.fits.ok() ? "true" : "false",
      ",\"plan\":", Quote(estimate.fits.ok() ? estimate.server.plan() : std::string(estimate.fits.message())),
      ",\"server_tiers\":[", tiers, "],\"rank_bytes_whole\":", estimate.whole.all(),
      ",\"rank_bytes_sharded\":", estimate.sharded.all(), ",\"rank_bytes_zero\":[", zero, "]");
  if (estimate.server.has_prediction()) {
    const v1::StepPrediction& step = estimate.server.prediction();
    absl::StrAppend(&out, ",\"step_seconds\":", step.total_seconds(), ",\"binds\":", Quote(step.binds()),
                    ",\"bound_seconds\":", step.bound_seconds(), ",\"pull_seconds\":", step.pull_seconds());
  }
  return out + "}\n";
}

absl::StatusOr<v1::JobSpec> SpecOf(const PlanCommand& command, uint64_t parameters) {
  kernels::OptimizerSpec optimizer;
  v1::JobSpec spec;
  BALLAST_ASSIGN_OR_RETURN(optimizer.kind, model::OptimizerNamed(command.optimizer));
  BALLAST_ASSIGN_OR_RETURN(optimizer.moments, model::MomentsNamed(command.moments));
  BALLAST_ASSIGN_OR_RETURN(optimizer.master, model::MasterNamed(command.master));
  if (optimizer.master == kernels::MasterFormat::kLent) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec,
                        "--master lent: parameters are their own masters only with a trainer's own server, and this "
                        "is a plan for servers of their own: choose f32 or remainder");
  }
  BALLAST_ASSIGN_OR_RETURN(optimizer.gradient, model::DtypeNamed(command.gradient));
  BALLAST_ASSIGN_OR_RETURN(optimizer.working, model::DtypeNamed(command.working));
  BALLAST_ASSIGN_OR_RETURN(const v1::Durability durability, model::DurabilityNamed(command.durability));
  optimizer.amsgrad = command.amsgrad;
  optimizer.momentum = command.momentum;
  model::SetOptimizer(optimizer, &spec);
  spec.set_name("plan");
  spec.set_chunk_elements(uint64_t{1} << 20);
  spec.set_durability(durability);
  spec.set_pin_interval(command.pin_interval);
  spec.set_group_count(1);
  v1::Registration* registration = spec.add_registrations();
  registration->set_version(-1);
  const uint64_t units = std::min<uint64_t>(command.units, parameters);
  for (uint64_t i = 0; i < units; ++i) {
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name(absl::StrCat("layer", i));
    tensor->set_unit(tensor->name());
    tensor->add_shape(parameters / units + (i < parameters % units ? 1 : 0));
  }
  return spec;
}

}  // namespace

std::optional<uint64_t> ParseCount(const std::string& text) {
  static constexpr std::pair<char, double> kSuffixes[] = {{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}};
  std::string number = text;
  double unit = 1;
  for (const auto& [suffix, value] : kSuffixes) {
    if (number.empty() || number.back() != suffix) continue;
    unit = value;
    number.pop_back();
    break;
  }
  double value = 0;
  if (!absl::SimpleAtod(number, &value) || !std::isfinite(value)) return std::nullopt;
  value *= unit;
  const double whole = std::round(value);  // 8.03 x 1e9 is not
  if (whole < 1 || whole > static_cast<double>(kParametersMax) || std::abs(value - whole) > 1e-9 * value) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(whole);
}

int RunPlan(const PlanCommand& command) {
  const std::optional<uint64_t> parameters = ParseCount(command.parameters);
  if (!parameters.has_value()) {
    std::fprintf(stderr, "--params %s: expected a whole number from 1 to 2^40, such as 268435456, 7B or 1.5e9\n",
                 command.parameters.c_str());
    return 2;
  }
  EstimateRequest request;
  request.ranks = command.ranks;
  request.servers = command.servers;
  request.server.budget = command.budget;
  request.server.staging_bytes = command.staging_bytes;
  request.server.log_steps = command.log_steps;
  request.server.compute_threads = command.threads;
  request.server.machine_profile = command.machine_profile;
  if (command.machine_profile.empty() && std::filesystem::exists(kMachineProfile)) {
    request.server.machine_profile = kMachineProfile;
  }
  absl::StatusOr<v1::JobSpec> spec = SpecOf(command, *parameters);
  if (spec.ok()) request.spec = *spec;
  const absl::StatusOr<Estimate> estimate = spec.ok() ? EstimateJob(request) : absl::StatusOr<Estimate>(spec.status());
  if (!estimate.ok()) {
    std::fprintf(stderr, "%s\n", std::string(estimate.status().message()).c_str());
    return absl::IsInvalidArgument(estimate.status()) ? 2 : 1;
  }
  std::fputs((command.json ? Json(*estimate) : estimate->Explain(request)).c_str(), stdout);
  return estimate->fits.ok() ? 0 : 1;
}

}  // namespace ballast::services
