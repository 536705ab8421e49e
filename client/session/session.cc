#include "ballast/client/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/group/joining.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/session/core.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

const std::vector<UnitRange>& NoRanges() {
  static const auto* const none = new std::vector<UnitRange>;
  return *none;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Open(const SessionOptions& options,
                                                       const std::vector<TensorSpec>& tensors,
                                                       std::vector<std::unique_ptr<Transport>> servers,
                                                       Collective* collective) {
  if (servers.empty()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec, "a session needs at least one server");
  }
  auto core = std::make_unique<SessionCore>(options, std::move(servers), collective);
  OpenJob& job = core->job;
  BALLAST_RETURN_IF_ERROR(job.router()->made());
  BALLAST_ASSIGN_OR_RETURN(const auto open, Opening(job.router(), job.group(), options.split).Open(options, tensors));
  BALLAST_RETURN_IF_ERROR(core->Adopt(open));
  BALLAST_RETURN_IF_ERROR(core->StartKeeper());
  if (options.progress && options.says_whether_new && job.group()->rank() == 0) {
    options.progress(absl::StrCat("job '", options.job, "' ",
                                  open->base() < 0 ? "is new" : absl::StrCat("continues at version ", open->base())));
  }
  std::unique_ptr<Session> session(new Session(std::move(core)));
  session->Resume(*open);
  if (open->has_restores()) BALLAST_RETURN_IF_ERROR(session->GoBack(open->restores()));
  return session;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(const SessionOptions& options,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<std::string>& servers,
                                                          Collective* collective) {
  BALLAST_ASSIGN_OR_RETURN(auto transports, MakeGrpcTransports(servers, options.job, options.access,
                                                               options.open_timeout, options.interrupted));
  return Open(options, tensors, std::move(transports), collective);
}

Session::Session(std::unique_ptr<SessionCore> core)
    : Steps(core.get()), Reads(core.get()), Loans(core.get()), Versions(core.get()), core_(std::move(core)) {}

Session::~Session() {
  // Threads and connections belong to the parent: the child can only leave them alone.
  if (core_->job.forked()) (void)core_.release();
}

int64_t Session::version() const { return core_->job.seat().version; }
uint64_t Session::attempt() const { return core_->job.seat().attempt; }
const absl::Status& Session::ended() const { return core_->job.ended(); }
bool Session::needs_values() const { return !core_->job.without_values().empty(); }

bool Session::needs_values(uint32_t tensor) const {
  const std::vector<uint32_t>& without = core_->job.without_values();
  return std::binary_search(without.begin(), without.end(), tensor);
}

int Session::rank() const { return core_->job.group()->rank(); }
int Session::world_size() const { return core_->job.group()->world_size(); }
const kernels::OptimizerSpec& Session::optimizer() const { return core_->job.seat().optimizer; }
uint32_t Session::unit_count() const { return core_->job.seat().units->unit_count(); }

absl::StatusOr<uint32_t> Session::FindUnit(absl::string_view name) const { return core_->job.layout().FindUnit(name); }

uint64_t Session::unit_elements(uint32_t unit) const {
  return unit < unit_count() ? core_->job.seat().units->unit(unit).elements : 0;
}

uint32_t Session::tensor_count() const { return core_->job.tensor_count(); }

std::vector<std::string> Session::tensor_names() const {
  const model::Layout& layout = core_->job.layout();
  std::vector<std::string> names;
  for (uint32_t i = 0; i < layout.tensors().size(); ++i) {
    if (layout.live(i)) names.push_back(layout.tensors()[i].name);
  }
  return names;
}

absl::StatusOr<uint32_t> Session::TensorIndex(absl::string_view tensor) const {
  return core_->job.layout().FindTensor(tensor);
}

absl::StatusOr<v1::Frozen> Session::FrozenAs(absl::string_view tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, TensorIndex(tensor));
  return core_->job.layout().tensors()[index].frozen;
}

absl::StatusOr<Session::Location> Session::Locate(absl::string_view tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, core_->job.layout().FindTensor(tensor));
  const model::Tensor& found = core_->job.layout().tensors()[index];
  return Location{found.unit, found.range.begin, found.range.end};
}

const std::vector<UnitRange>& Session::owned(uint32_t unit) const { return RangesOf(rank(), unit); }

const std::vector<UnitRange>& Session::RangesOf(int rank, uint32_t unit) const {
  if (rank < 0 || rank >= world_size() || unit >= unit_count()) return NoRanges();
  return core_->job.seat().units->unit(unit).ranges[rank];
}

uint64_t Session::owned_elements(uint32_t unit) const {
  return unit < unit_count() ? core_->job.seat().units->unit(unit).owned_elements : 0;
}

const model::Box* Session::Held(uint32_t tensor) const {
  return tensor < tensor_count() ? core_->job.seat().units->Held(tensor) : nullptr;
}

Split Session::split() const { return core_->job.options().split; }

uint64_t Session::inflight_bytes_max() const { return core_->job.options().inflight_bytes_max; }

const std::vector<uint64_t>& Session::ShapeOf(uint32_t tensor) const {
  return core_->job.layout().tensors()[tensor].shape;
}

std::vector<model::BoxRun> Session::RunsOf(uint32_t tensor, const model::Box& box) const {
  const model::Tensor& found = core_->job.layout().tensors()[tensor];
  return model::RunsOf(found.shape, box, found.parts);
}

absl::Status Session::Register(const std::vector<TensorSpec>& tensors) {
  OpenJob& job = core_->job;
  BALLAST_RETURN_IF_ERROR(job.Usable());
  absl::Status mine;
  if (job.seat().version < 0) mine = Precondition("the job is new: pass all tensors to Open, or Initialise first");
  if (!core_->gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before Register");
  if (!core_->values.empty()) mine = Precondition("values were written; Step or CommitValues before Register");
  if (tensors.empty() && !job.places()) mine = Precondition("no tensors to register");
  (void)core_->transactions.AwaitCommits(job.seat().Deadline());
  return core_->Extend(tensors, mine);
}

SessionStats Session::stats() const {
  const Parameters& parameters = core_->parameters;
  return {.pull_seconds = parameters.pull_seconds(),
          .gather_seconds = parameters.gather_seconds(),
          .push_seconds = core_->transactions.push_seconds(),
          .seal_seconds = core_->transactions.seal_seconds(),
          .pulled_bytes = parameters.pulled_bytes(),
          .leased_bytes = parameters.leased_bytes(),
          .pushed_bytes = core_->gradients.pushed_bytes(),
          .gathered_bytes = parameters.gathered_bytes()};
}

GroupHyper DefaultHyper(kernels::OptimizerKind kind) {
  switch (kind) {
    case kernels::OptimizerKind::kAdamw:
      return {};
    case kernels::OptimizerKind::kAdam:
      return {.weight_decay = 0};
    case kernels::OptimizerKind::kSgd:
      return {.beta1 = 0, .weight_decay = 0};
    case kernels::OptimizerKind::kAdagrad:
      return {.learning_rate = 1e-2, .epsilon = 1e-10, .weight_decay = 0};
    case kernels::OptimizerKind::kLion:
      return {.learning_rate = 1e-4, .beta2 = 0.99, .weight_decay = 0};
    case kernels::OptimizerKind::kAdemamix:
      return {.beta3 = 0.9999, .alpha = 5};
    case kernels::OptimizerKind::kAdamwScheduleFree:
      return {.learning_rate = 2.5e-3, .weight_decay = 0, .average = 1};
  }
  return {};
}

}  // namespace ballast::client
