#include "ballast/proto/model/optimizer.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/named.h"

namespace ballast::model {
namespace {

using kernels::Dtype;
using kernels::MasterFormat;
using kernels::MomentFormat;
using kernels::OptimizerKind;
using kernels::OptimizerSpec;

constexpr Named<v1::Optimizer, OptimizerKind> kKinds[] = {
    {v1::OPTIMIZER_ADAMW, OptimizerKind::kAdamw, "adamw"},
    {v1::OPTIMIZER_ADAM, OptimizerKind::kAdam, "adam"},
    {v1::OPTIMIZER_SGD, OptimizerKind::kSgd, "sgd"},
    {v1::OPTIMIZER_ADAGRAD, OptimizerKind::kAdagrad, "adagrad"},
    {v1::OPTIMIZER_LION, OptimizerKind::kLion, "lion"},
    {v1::OPTIMIZER_ADEMAMIX, OptimizerKind::kAdemamix, "ademamix"},
    {v1::OPTIMIZER_ADAMW_SCHEDULE_FREE, OptimizerKind::kAdamwScheduleFree, "adamw_schedule_free"}};
constexpr Named<v1::MomentFormat, MomentFormat> kFormats[] = {{v1::MOMENT_FORMAT_F32, MomentFormat::kF32, "f32"},
                                                              {v1::MOMENT_FORMAT_BF16, MomentFormat::kBf16, "bf16"},
                                                              {v1::MOMENT_FORMAT_I8, MomentFormat::kI8, "i8"},
                                                              {v1::MOMENT_FORMAT_F8, MomentFormat::kF8, "f8"}};
// What jobs had before there was a choice is the default, which digests of the spec leave out.
constexpr Named<v1::MasterFormat, MasterFormat> kMasters[] = {
    {v1::MASTER_FORMAT_UNSPECIFIED, MasterFormat::kF32, "f32"},
    {v1::MASTER_FORMAT_REMAINDER, MasterFormat::kRemainder, "remainder"},
    {v1::MASTER_FORMAT_LENT, MasterFormat::kLent, "lent"}};
constexpr Named<v1::Dtype, Dtype> kDtypes[] = {{v1::DTYPE_F32, Dtype::kF32, "f32"},
                                               {v1::DTYPE_BF16, Dtype::kBf16, "bf16"},
                                               {v1::DTYPE_F16, Dtype::kF16, "f16"},
                                               {v1::DTYPE_F8_E4M3, Dtype::kE4m3Blocks, "f8"}};

absl::StatusOr<Dtype> DtypeOf(v1::Dtype proto, const char* what) {
  if (const auto* const row = Find(kDtypes, proto)) return row->value;
  return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
               absl::StrCat(what, " must be DTYPE_F32, DTYPE_BF16, DTYPE_F16 or, working parameters alone, ",
                            "DTYPE_F8_E4M3, got ", static_cast<int>(proto)));
}

}  // namespace

absl::StatusOr<OptimizerKind> OptimizerNamed(const std::string& name) { return ByName(kKinds, "optimizer", name); }
absl::StatusOr<MomentFormat> MomentsNamed(const std::string& name) { return ByName(kFormats, "moments", name); }
absl::StatusOr<MasterFormat> MasterNamed(const std::string& name) { return ByName(kMasters, "master", name); }
absl::StatusOr<Dtype> DtypeNamed(const std::string& name) { return ByName(kDtypes, "dtype", name); }

absl::string_view NameOf(OptimizerKind kind) { return NameIn(kKinds, kind); }
absl::string_view NameOf(MomentFormat format) { return NameIn(kFormats, format); }
absl::string_view NameOf(MasterFormat format) { return NameIn(kMasters, format); }
absl::string_view NameOf(Dtype dtype) { return NameIn(kDtypes, dtype); }

absl::StatusOr<OptimizerSpec> OptimizerOf(const v1::JobSpec& spec) {
  OptimizerSpec optimizer;
  const auto* const kind = Find(kKinds, spec.optimizer());
  if (kind == nullptr) {
    return Error(absl::StatusCode::kUnimplemented, kUnsupported,
                 absl::StrCat("optimizer ", static_cast<int>(spec.optimizer()),
                              " is unknown: servers run the elementwise optimizers AdamW, Adam, SGD, Adagrad, Lion, "
                              "AdEMAMix and schedule-free AdamW"));
  }
  optimizer.kind = kind->value;
  if (spec.moment_format() != v1::MOMENT_FORMAT_UNSPECIFIED) {
    const auto* const format = Find(kFormats, spec.moment_format());
    if (format == nullptr) {
      return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
                   absl::StrCat("moments may be kept as F32, BF16, I8 or F8, got moment_format ",
                                static_cast<int>(spec.moment_format())));
    }
    optimizer.moments = format->value;
  }
  const auto* const master = Find(kMasters, spec.master_format());
  if (master == nullptr) {
    return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
                 absl::StrCat("masters may be kept as they are, as REMAINDER, or LENT, got master_format ",
                              static_cast<int>(spec.master_format())));
  }
  optimizer.master = master->value;
  optimizer.amsgrad = spec.amsgrad();
  optimizer.momentum = spec.momentum();
  optimizer.nesterov = spec.nesterov();
  BALLAST_ASSIGN_OR_RETURN(optimizer.gradient, DtypeOf(spec.gradient_dtype(), "gradients"));
  BALLAST_ASSIGN_OR_RETURN(optimizer.working, DtypeOf(spec.working_dtype(), "working parameters"));
  if (const std::string why = kernels::Unsupported(optimizer); !why.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, kBadSpec, absl::StrCat("optimizer ", kind->name, ": ", why));
  }
  return optimizer;
}

void SetOptimizer(const OptimizerSpec& optimizer, v1::JobSpec* spec) {
  if (const auto* const row = Find(kKinds, optimizer.kind)) spec->set_optimizer(row->proto);
  if (const auto* const row = Find(kFormats, optimizer.moments)) spec->set_moment_format(row->proto);
  if (const auto* const row = Find(kMasters, optimizer.master)) spec->set_master_format(row->proto);
  spec->set_amsgrad(optimizer.amsgrad);
  spec->set_momentum(optimizer.momentum);
  spec->set_nesterov(optimizer.nesterov);
  // A dtype that jobs cannot have stays unspecified, and OptimizerOf refuses it.
  const auto* const gradient = Find(kDtypes, optimizer.gradient);
  const auto* const working = Find(kDtypes, optimizer.working);
  spec->set_gradient_dtype(gradient == nullptr ? v1::DTYPE_UNSPECIFIED : gradient->proto);
  spec->set_working_dtype(working == nullptr ? v1::DTYPE_UNSPECIFIED : working->proto);
}

kernels::Hyper HyperOf(const v1::GroupHyper& group) {
  return {.learning_rate = group.learning_rate(),
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
          .average = group.average()};
}

std::string Show(const OptimizerSpec& optimizer) {
  std::string text;
  if (const auto* const row = Find(kKinds, optimizer.kind)) text = row->name;
  if (optimizer.amsgrad) text += " with amsgrad";
  if (optimizer.momentum) text += optimizer.nesterov ? " with Nesterov momentum" : " with momentum";
  if (const auto* const row = Find(kFormats, optimizer.moments)) absl::StrAppend(&text, ", ", row->name, " moments");
  absl::StrAppend(&text, ", ", NameOf(optimizer.gradient), " gradients, ", NameOf(optimizer.working),
                  " working parameters");
  if (optimizer.master == MasterFormat::kRemainder) text += ", masters as remainder";
  if (optimizer.master == MasterFormat::kLent) text += ", parameters as their masters";
  return text;
}

}  // namespace ballast::model
