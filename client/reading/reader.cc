#include "ballast/client/reader.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/reading/hold.h"
#include "ballast/client/reading/job_view.h"
#include "ballast/client/reading/pulls.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/step_header.h"

namespace ballast::client {
namespace {

// The job's servers, and what the reader knows and has there.
struct Connection {
  Connection(const ReaderOptions& options, std::vector<std::unique_ptr<Transport>> servers)
      : router(std::move(servers), RouterOptions{.inflight_bytes_max = options.inflight_bytes_max,
                                                 .progress = options.progress,
                                                 .interrupted = options.interrupted}),
        view(&router, options.job),
        hold(&router, options.job, options.lease) {}

  Router router;
  JobView view;
  Hold hold;
};

absl::StatusOr<std::shared_ptr<Connection>> Connect(const ReaderOptions& options,
                                                    std::vector<std::unique_ptr<Transport>> servers,
                                                    absl::Time deadline) {
  auto made = std::make_shared<Connection>(options, std::move(servers));
  BALLAST_RETURN_IF_ERROR(made->router.made());
  BALLAST_RETURN_IF_ERROR(made->view.Meet(deadline));
  return made;
}

}  // namespace

struct ReaderCore {
  ReaderCore(const ReaderOptions& given, std::shared_ptr<Connection> connection)
      : options(given), at(std::move(connection)) {}

  absl::Time Deadline() const { return absl::Now() + options.timeout; }
  // FAILED_PRECONDITION (UNSUPPORTED): this is a forked child, and the threads and connections are the parent's.
  absl::Status Usable() const;
  // Makes the attempt again while the group is between two versions, or between two epochs, and with the servers that
  // the job has by then if one is lost.
  absl::Status Persist(absl::FunctionRef<absl::Status(absl::Time deadline)> attempt);
  absl::Status ConnectAnew(absl::Time deadline);
  absl::StatusOr<TakenVersion> Take(absl::Time deadline);
  absl::Status Read(absl::Span<const Reader::Place> places, bool masters);
  void LetGo();

  const ReaderOptions options;
  const pid_t pid = getpid();
  std::shared_ptr<Connection> at;
  // Of the version taken; servers may be others since.
  std::shared_ptr<Connection> taken;
  std::shared_ptr<const model::EpochPlan> plan;
  kernels::Dtype working = kernels::Dtype::kF32;
  std::vector<ReadableTensor> tensors;
  uint64_t life = 0;
};

namespace {

constexpr absl::Duration kPauseMin = absl::Milliseconds(1);
constexpr absl::Duration kPauseMax = absl::Milliseconds(50);
constexpr absl::Duration kAnewPauseMax = absl::Seconds(1);  // between connections to the servers that a job has by then
constexpr absl::Duration kPinPatience = absl::Seconds(10);  // for all servers to hold a version

// Another attempt may find what this one did not.
bool Passes(const absl::Status& status) {
  const std::string reason = model::ReasonOf(status);
  return IsAtWork(status) || reason == model::kBehind || reason == model::kVersionGone || reason == model::kNotOpen ||
         reason == model::kNotFilled || (reason == model::kBudget && absl::IsResourceExhausted(status));
}

// The job may be on other servers by now. `connected`: to those of its key, just before.
bool MayHaveMoved(const JobView& view, const absl::Status& status, bool connected) {
  const std::string reason = model::ReasonOf(status);
  return view.may_change() && ((IsSilence(status) && !IsAtWork(status)) || model::IsWithoutJob(status) ||
                               reason == model::kStaleEpoch || (reason == model::kJobMissing && !connected));
}

std::vector<ReadableTensor> TensorsOf(const model::Layout& layout) {
  std::vector<ReadableTensor> tensors;
  for (const model::Tensor& tensor : layout.tensors()) {
    const bool of_model = layout.live(tensor.index) && tensor.assist != v1::ASSIST_STATE;
    if (of_model) tensors.push_back({tensor.name, tensor.shape});
  }
  return tensors;
}

}  // namespace

absl::Status ReaderCore::Usable() const {
  if (getpid() == pid) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported,
                      "this process was forked from the one that made the reader; make a reader after the fork");
}

absl::Status ReaderCore::Persist(absl::FunctionRef<absl::Status(absl::Time deadline)> attempt) {
  BALLAST_RETURN_IF_ERROR(Usable());
  const absl::Time deadline = Deadline();
  const std::string what = absl::StrCat("a version of job '", options.job, "' that can be read");
  std::optional<Router::Watch> watch(std::in_place, &at->router, what);
  absl::Duration pause = kPauseMin;
  bool connected = false;
  for (;;) {
    const absl::Status status = attempt(deadline);
    const bool moved = MayHaveMoved(at->view, status, connected);
    if ((!moved && !Passes(status)) || absl::Now() + pause >= deadline) return status;
    absl::SleepFor(pause);
    pause = std::min(2 * pause, moved ? kAnewPauseMax : kPauseMax);
    if (!moved) continue;
    watch.reset();
    const absl::Status anew = ConnectAnew(deadline);
    watch.emplace(&at->router, what);
    connected = true;
    if (anew.ok() || IsSilence(anew)) continue;
    return model::ReasonOf(status) == model::kJobMissing ? status : anew;
  }
}

absl::Status ReaderCore::ConnectAnew(absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(auto servers, at->view.ConnectAnew(deadline));
  BALLAST_ASSIGN_OR_RETURN(at, Connect(options, std::move(servers), deadline));
  return absl::OkStatus();
}

absl::StatusOr<TakenVersion> ReaderCore::Take(absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const int64_t version, at->view.Look(deadline));
  const model::Layout& layout = at->view.plan()->layout();
  if (const auto without = model::TensorsWithoutValues(*at->view.plan(), version); !without.empty()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen,
                        absl::StrCat("tensor '", layout.tensors()[without[0]].name, "' has no values yet at version ",
                                     version, "; its group gives them with its next step"));
  }
  // Where servers may change, one that died since the look is found out by the next look.
  const absl::Duration patience = at->view.may_change() ? std::min(options.lease, kPinPatience) : options.lease;
  BALLAST_ASSIGN_OR_RETURN(const v1::PinResponse pinned,
                           at->hold.Take(version, std::min(deadline, absl::Now() + patience)));
  taken = at;
  plan = at->view.plan();
  working = at->view.optimizer().working;
  tensors = TensorsOf(layout);
  life = at->view.life();
  const auto& steps = pinned.tensor_steps();
  return TakenVersion{version, steps.empty() ? 0 : *std::max_element(steps.begin(), steps.end())};
}

absl::Status ReaderCore::Read(absl::Span<const Reader::Place> places, bool masters) {
  const model::Layout& layout = plan->layout();
  if (!masters && kernels::GrainOf(working) > 1) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("job '", options.job, "' has ", model::NameOf(working), " working parameters, ",
                                     "which readers do not decode; read its masters"));
  }
  const uint64_t width = kernels::ElementBytes(masters ? kernels::Dtype::kF32 : working);
  WholePulls pulls(&taken->router, &taken->hold, plan, masters ? v1::CONTENT_MASTER : v1::CONTENT_WORKING,
                   options.timeout);
  for (const Reader::Place& place : places) {
    BALLAST_ASSIGN_OR_RETURN(const uint32_t index, layout.FindTensor(place.tensor));
    const model::Tensor& tensor = layout.tensors()[index];
    if (place.to.size() != tensor.range.size() * width) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                          absl::StrCat("tensor '", place.tensor, "' has ", tensor.range.size() * width,
                                       " bytes, got room for ", place.to.size()));
    }
    BALLAST_RETURN_IF_ERROR(pulls.Start(tensor, place.to));
  }
  const absl::Status pulled = pulls.Wait();
  if (!pulled.ok() && taken->view.HasMoved(Deadline())) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                        absl::StrCat("servers of job '", options.job, "' were lost or changed: ", pulled.message()));
  }
  BALLAST_RETURN_IF_ERROR(pulled);
  return taken->view.CheckLife(life, Deadline());
}

void ReaderCore::LetGo() {
  if (taken != nullptr) taken->hold.LetGo();
  taken = nullptr;
}

Reader::Reader(std::unique_ptr<ReaderCore> core) : core_(std::move(core)) {}

Reader::~Reader() {
  // Threads and connections belong to the parent.
  if (!core_->Usable().ok()) (void)core_.release();
}

absl::StatusOr<std::unique_ptr<Reader>> Reader::Open(const ReaderOptions& options,
                                                     std::vector<std::unique_ptr<Transport>> servers) {
  if (servers.empty()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec, "a reader needs at least one server");
  }
  BALLAST_RETURN_IF_ERROR(model::CheckJobName(options.job));
  BALLAST_ASSIGN_OR_RETURN(auto connection,
                           client::Connect(options, std::move(servers), absl::Now() + options.timeout));
  return std::unique_ptr<Reader>(new Reader(std::make_unique<ReaderCore>(options, std::move(connection))));
}

absl::StatusOr<std::unique_ptr<Reader>> Reader::Connect(const ReaderOptions& options,
                                                        const std::vector<std::string>& servers) {
  BALLAST_ASSIGN_OR_RETURN(auto transports, MakeGrpcTransports(servers, options.job, options.access, options.timeout,
                                                               options.interrupted, Spares::kPassOver));
  return Open(options, std::move(transports));
}

absl::StatusOr<int64_t> Reader::Newest() {
  int64_t newest = -1;
  BALLAST_RETURN_IF_ERROR(core_->Persist([&](absl::Time deadline) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(newest, core_->at->view.Look(deadline));
    return absl::OkStatus();
  }));
  return newest;
}

absl::StatusOr<TakenVersion> Reader::Take() {
  LetGo();
  TakenVersion taken;
  BALLAST_RETURN_IF_ERROR(core_->Persist([&](absl::Time deadline) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(taken, core_->Take(deadline));
    return absl::OkStatus();
  }));
  return taken;
}

const std::vector<ReadableTensor>& Reader::tensors() const { return core_->tensors; }
kernels::Dtype Reader::working() const { return core_->working; }

absl::Status Reader::Read(absl::Span<const Place> places, bool masters) {
  BALLAST_RETURN_IF_ERROR(core_->Usable());
  if (core_->taken == nullptr) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                        "no version is taken; Take one first");
  }
  const absl::Status read = core_->Read(places, masters);
  if (model::ReasonOf(read) != model::kVersionGone) return read;
  return model::Annotate(
      read, absl::StrCat("version ", core_->taken->hold.version(), " was lost while it was read, so take a newer one"));
}

void Reader::LetGo() {
  if (core_->Usable().ok()) core_->LetGo();
}

}  // namespace ballast::client
