#include "ballast/proto/model/names.h"

#include <array>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/status.h"

namespace ballast::model {
namespace {

constexpr size_t kJobNameBytesMax = 128;

template <typename Value, size_t n>
absl::StatusOr<Value> Find(const char* what, const std::string& name,
                           const std::array<std::pair<const char*, Value>, n>& table) {
  std::vector<std::string> names;
  for (const auto& [known, value] : table) {
    if (name == known) return value;
    names.emplace_back(known);
  }
  return Error(absl::StatusCode::kInvalidArgument, kBadConfig,
               absl::StrCat(what, " '", name, "': expected one of ", absl::StrJoin(names, ", ")));
}

}  // namespace

absl::StatusOr<kernels::OptimizerKind> OptimizerNamed(const std::string& name) {
  using kernels::OptimizerKind;
  return Find("optimizer", name,
              std::array<std::pair<const char*, OptimizerKind>, 5>{{{"adamw", OptimizerKind::kAdamw},
                                                                    {"adam", OptimizerKind::kAdam},
                                                                    {"sgd", OptimizerKind::kSgd},
                                                                    {"adagrad", OptimizerKind::kAdagrad},
                                                                    {"lion", OptimizerKind::kLion}}});
}

absl::StatusOr<kernels::MomentFormat> MomentsNamed(const std::string& name) {
  using kernels::MomentFormat;
  return Find("moments", name,
              std::array<std::pair<const char*, MomentFormat>, 4>{{{"f32", MomentFormat::kF32},
                                                                   {"bf16", MomentFormat::kBf16},
                                                                   {"i8", MomentFormat::kI8},
                                                                   {"f8", MomentFormat::kF8}}});
}

absl::StatusOr<kernels::MasterFormat> MasterNamed(const std::string& name) {
  using kernels::MasterFormat;
  return Find(
      "master", name,
      std::array<std::pair<const char*, MasterFormat>, 3>{
          {{"f32", MasterFormat::kF32}, {"remainder", MasterFormat::kRemainder}, {"lent", MasterFormat::kLent}}});
}

absl::StatusOr<kernels::Dtype> DtypeNamed(const std::string& name) {
  using kernels::Dtype;
  return Find("dtype", name,
              std::array<std::pair<const char*, Dtype>, 3>{
                  {{"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}}});
}

absl::StatusOr<v1::Durability> DurabilityNamed(const std::string& name) {
  return Find("durability", name,
              std::array<std::pair<const char*, v1::Durability>, 3>{
                  {{"step", v1::DURABILITY_STEP}, {"every-K", v1::DURABILITY_EVERY_K}, {"none", v1::DURABILITY_NONE}}});
}

bool IsJobName(absl::string_view name) {
  bool good = !name.empty() && name.size() <= kJobNameBytesMax;
  for (const char c : name) good = good && (absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-');
  return good;
}

absl::Status CheckJobName(absl::string_view name) {
  if (IsJobName(name)) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, kBadSpec,
               absl::StrCat("a job's name has ", kJobNameRule, "; came ", name.size(), " bytes: '",
                            name.substr(0, kJobNameBytesMax), "'"));
}

}  // namespace ballast::model
