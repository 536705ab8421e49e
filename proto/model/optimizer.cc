#include "ballast/proto/model/optimizer.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::model {
namespace {

using kernels::Dtype;
using kernels::MasterFormat;
using kernels::MomentFormat;
using kernels::OptimizerKind;
using kernels::OptimizerSpec;

// One spelling of each name, for both directions and for people.
struct NamedKind {
  v1::Optimizer proto;
  OptimizerKind kind;
  const char* name;
};
constexpr NamedKind kKinds[] = {{v1::OPTIMIZER_ADAMW, OptimizerKind::kAdamw, "adamw"},
                                {v1::OPTIMIZER_ADAM, OptimizerKind::kAdam, "adam"},
                                {v1::OPTIMIZER_SGD, OptimizerKind::kSgd, "sgd"},
                                {v1::OPTIMIZER_ADAGRAD, OptimizerKind::kAdagrad, "adagrad"},
                                {v1::OPTIMIZER_LION, OptimizerKind::kLion, "lion"}};

struct NamedFormat {
  v1::MomentFormat proto;
  MomentFormat format;
  const char* name;
};
constexpr NamedFormat kFormats[] = {{v1::MOMENT_FORMAT_F32, MomentFormat::kF32, "f32"},
                                    {v1::MOMENT_FORMAT_BF16, MomentFormat::kBf16, "bf16"},
                                    {v1::MOMENT_FORMAT_I8, MomentFormat::kI8, "i8"},
                                    {v1::MOMENT_FORMAT_F8, MomentFormat::kF8, "f8"}};

// What jobs had before there was a choice is the default, which digests of the spec leave out.
struct NamedMaster {
  v1::MasterFormat proto;
  MasterFormat format;
};
constexpr NamedMaster kMasters[] = {{v1::MASTER_FORMAT_UNSPECIFIED, MasterFormat::kF32},
                                    {v1::MASTER_FORMAT_REMAINDER, MasterFormat::kRemainder},
                                    {v1::MASTER_FORMAT_LENT, MasterFormat::kLent}};

struct NamedDtype {
  v1::Dtype proto;
  Dtype dtype;
  const char* name;
};
constexpr NamedDtype kDtypes[] = {
    {v1::DTYPE_F32, Dtype::kF32, "f32"}, {v1::DTYPE_BF16, Dtype::kBf16, "bf16"}, {v1::DTYPE_F16, Dtype::kF16, "f16"}};

absl::StatusOr<Dtype> DtypeOf(v1::Dtype proto, const char* what) {
  for (const NamedDtype& named : kDtypes) {
    if (named.proto == proto) return named.dtype;
  }
  return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
               absl::StrCat(what, " must be DTYPE_F32, DTYPE_BF16 or DTYPE_F16, came ", static_cast<int>(proto)));
}

// A dtype that jobs cannot have stays unspecified, and OptimizerOf refuses it.
NamedDtype Find(Dtype dtype) {
  for (const NamedDtype& named : kDtypes) {
    if (named.dtype == dtype) return named;
  }
  return {v1::DTYPE_UNSPECIFIED, dtype, "unknown"};
}

}  // namespace

absl::StatusOr<OptimizerSpec> OptimizerOf(const v1::JobSpec& spec) {
  OptimizerSpec optimizer;
  const NamedKind* kind = nullptr;
  for (const NamedKind& named : kKinds) {
    if (named.proto == spec.optimizer()) kind = &named;
  }
  if (kind == nullptr) {
    return Error(
        absl::StatusCode::kUnimplemented, kUnsupported,
        absl::StrCat("optimizer ", static_cast<int>(spec.optimizer()),
                     " is unknown: servers run the elementwise optimizers AdamW, Adam, SGD, Adagrad and Lion"));
  }
  optimizer.kind = kind->kind;
  if (spec.moment_format() != v1::MOMENT_FORMAT_UNSPECIFIED) {
    const NamedFormat* format = nullptr;
    for (const NamedFormat& named : kFormats) {
      if (named.proto == spec.moment_format()) format = &named;
    }
    if (format == nullptr) {
      return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
                   absl::StrCat("moments may be kept as F32, BF16, I8 or F8, came moment_format ",
                                static_cast<int>(spec.moment_format())));
    }
    optimizer.moments = format->format;
  }
  const NamedMaster* master = nullptr;
  for (const NamedMaster& named : kMasters) {
    if (named.proto == spec.master_format()) master = &named;
  }
  if (master == nullptr) {
    return Error(absl::StatusCode::kInvalidArgument, kBadDtype,
                 absl::StrCat("masters may be kept as they are, as REMAINDER, or LENT, came master_format ",
                              static_cast<int>(spec.master_format())));
  }
  optimizer.master = master->format;
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
  for (const NamedKind& named : kKinds) {
    if (named.kind == optimizer.kind) spec->set_optimizer(named.proto);
  }
  for (const NamedFormat& named : kFormats) {
    if (named.format == optimizer.moments) spec->set_moment_format(named.proto);
  }
  for (const NamedMaster& named : kMasters) {
    if (named.format == optimizer.master) spec->set_master_format(named.proto);
  }
  spec->set_amsgrad(optimizer.amsgrad);
  spec->set_momentum(optimizer.momentum);
  spec->set_nesterov(optimizer.nesterov);
  spec->set_gradient_dtype(Find(optimizer.gradient).proto);
  spec->set_working_dtype(Find(optimizer.working).proto);
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
          .maximize = group.maximize()};
}

std::string Show(const OptimizerSpec& optimizer) {
  std::string text;
  for (const NamedKind& named : kKinds) {
    if (named.kind == optimizer.kind) text = named.name;
  }
  if (optimizer.amsgrad) text += " with amsgrad";
  if (optimizer.momentum) text += optimizer.nesterov ? " with Nesterov momentum" : " with momentum";
  for (const NamedFormat& named : kFormats) {
    if (named.format == optimizer.moments) absl::StrAppend(&text, ", ", named.name, " moments");
  }
  absl::StrAppend(&text, ", ", Find(optimizer.gradient).name, " gradients, ", Find(optimizer.working).name,
                  " working parameters");
  if (optimizer.master == MasterFormat::kRemainder) text += ", masters as remainder";
  if (optimizer.master == MasterFormat::kLent) text += ", parameters as their masters";
  return text;
}

}  // namespace ballast::model
