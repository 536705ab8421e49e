#include "ballast/client/session.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/session/session_impl.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// How long an ending session waits for servers to take the last decision. Without the wait no step is lost (the next
// fence settles it), but a clean end leaves nothing to settle.
constexpr absl::Duration kFarewell = absl::Seconds(10);

std::atomic<uint64_t> fork_count{0};

uint64_t ForkCount() {
  static const int registered = pthread_atfork(
      nullptr, nullptr, +[] { fork_count.fetch_add(1); });
  (void)registered;
  return fork_count.load();
}

v1::Content ToProto(Content content) {
  switch (content) {
    case Content::kWorking:
      return v1::CONTENT_WORKING;
    case Content::kMaster:
      return v1::CONTENT_MASTER;
    case Content::kMoment1:
      return v1::CONTENT_MOMENT1;
    case Content::kMoment2:
      return v1::CONTENT_MOMENT2;
    case Content::kMoment3:
      return v1::CONTENT_MOMENT3;
  }
  return v1::CONTENT_UNSPECIFIED;
}

template <typename T>
absl::Span<std::byte> WritableBytes(absl::Span<T> values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

const std::vector<UnitRange>& NoRanges() {
  static const auto* const none = new std::vector<UnitRange>;
  return *none;
}

}  // namespace

Session::Impl::Impl(const SessionOptions& session_options, std::vector<std::unique_ptr<Transport>> servers,
                    Collective* collective)
    : options(session_options),
      forks(ForkCount()),
      router(
          std::make_unique<Router>(std::move(servers), RouterOptions{.inflight_bytes_max = options.inflight_bytes_max,
                                                                     .progress = options.progress,
                                                                     .interrupted = options.interrupted})),
      group(collective, router.get()),
      gradients(&seat),
      values(&seat),
      parameters(&seat, &group),
      transaction(&seat) {
  seat.job = options.job;
  seat.router = router.get();
  seat.step_timeout = options.step_timeout;
}

// The router goes first: it cancels calls under way, so that no further member waits for servers.
Session::Impl::~Impl() {
  if (finished.ok()) (void)transaction.AwaitCommits(absl::Now() + std::min(kFarewell, options.step_timeout));
  EndLoan();
  router.reset();
}

bool Session::Impl::forked() const { return ForkCount() != forks; }

absl::Status Session::Impl::Usable() const {
  if (forked()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported,
                        "this process was forked from the one that opened the session; open a session after the fork");
  }
  return finished;
}

absl::Status Session::Impl::CheckReadable(uint32_t unit) const {
  BALLAST_RETURN_IF_ERROR(Usable());
  if (seat.version < 0) return Precondition("the job is new and has no values; Initialise comes first");
  return seat.units->CheckUnit(unit);
}

absl::Status Session::Impl::CheckElement(const char* what, kernels::Dtype dtype, uint64_t element_bytes) {
  if (element_bytes == kernels::ElementBytes(dtype)) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadDtype,
                      absl::StrCat(what, " of this job have ", kernels::ElementBytes(dtype), " bytes an element, came ",
                                   element_bytes, "; SessionOptions::optimizer names their dtype"));
}

absl::Status Session::Impl::CheckHasValues(uint32_t unit) const {
  BALLAST_RETURN_IF_ERROR(CheckReadable(unit));
  for (const uint32_t tensor : without_values) {
    const model::Tensor& missing = seat.units->layout().tensors()[tensor];
    if (missing.unit == unit) {
      return Precondition(absl::StrCat("tensor '", missing.name, "' has no values yet; Initialise comes first"));
    }
  }
  return absl::OkStatus();
}

UnitLease Session::Impl::Lease(Session* session, uint32_t unit, std::unique_ptr<UnitBuffer> buffer) const {
  const uint64_t width = kernels::ElementBytes(seat.optimizer.working);
  const absl::Span<const std::byte> bytes(buffer->data.get(), seat.units->unit(unit).elements * width);
  return UnitLease(session, buffer.release(), bytes, width);
}

absl::Status Session::Impl::Conclude(absl::Status status) {
  const std::string reason = model::ReasonOf(status);
  if (reason == model::kStaleEpoch || reason == model::kRankMissing || reason == model::kStateLost ||
      absl::IsDataLoss(status) || (absl::IsCancelled(status) && options.interrupted && options.interrupted())) {
    finished = status;
  }
  return status;
}

absl::Status Session::Impl::Adopt(const std::shared_ptr<const v1::OpenRequest>& new_open) {
  BALLAST_ASSIGN_OR_RETURN(auto plan, model::EpochPlan::Make(*new_open));
  BALLAST_ASSIGN_OR_RETURN(seat.optimizer, model::OptimizerOf(new_open->spec()));
  open = new_open;
  seat.units = std::make_shared<UnitMap>(std::make_shared<const model::EpochPlan>(std::move(plan)), group.rank());
  seat.version = open->base();
  seat.attempt = 0;
  gradients.Resize();
  without_values = model::TensorsWithoutValues(seat.units->plan(), seat.version);
  norm_cache = {};
  steps_cache = {};
  if (open->has_base_decision()) {
    // A server that restarts may need this decision again before it can go on.
    auto commit = std::make_shared<v1::CommitRequest>();
    commit->set_job(options.job);
    *commit->mutable_decision() = open->base_decision();
    router->SetCommit(std::move(commit));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Session>> Session::Open(const SessionOptions& options,
                                                       const std::vector<TensorSpec>& tensors,
                                                       std::vector<std::unique_ptr<Transport>> servers,
                                                       Collective* collective) {
  if (servers.empty()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec, "a session needs at least one server");
  }
  auto impl = std::make_unique<Impl>(options, std::move(servers), collective);
  BALLAST_RETURN_IF_ERROR(impl->router->made());
  BALLAST_ASSIGN_OR_RETURN(const auto open,
                           Opening(impl->router.get(), &impl->group, options.split).Open(options, tensors));
  BALLAST_RETURN_IF_ERROR(impl->Adopt(open));
  if (options.progress && options.says_whether_new && impl->group.rank() == 0) {
    options.progress(absl::StrCat("job '", options.job, "' ",
                                  open->base() < 0 ? "is new" : absl::StrCat("continues at version ", open->base())));
  }
  if (open->has_base_decision()) {
    const auto& blobs = open->base_decision().blobs();
    impl->resumed_blobs.assign(blobs.begin(), blobs.end());
    const auto rank = static_cast<size_t>(impl->group.rank());
    if (rank < impl->resumed_blobs.size()) impl->sealed_blob = impl->resumed_blobs[rank];
  }
  if (open->has_restores()) BALLAST_RETURN_IF_ERROR(impl->GoBack(open->restores()));
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(const SessionOptions& options,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<std::string>& servers,
                                                          Collective* collective) {
  BALLAST_ASSIGN_OR_RETURN(auto transports, MakeGrpcTransports(servers, options.job, options.access,
                                                               options.open_timeout, options.interrupted));
  return Open(options, tensors, std::move(transports), collective);
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() {
  // Threads and connections belong to the parent: the child can only leave them alone.
  if (impl_->forked()) (void)impl_.release();
}

int64_t Session::version() const { return impl_->seat.version; }

uint64_t Session::attempt() const { return impl_->seat.attempt; }
const absl::Status& Session::ended() const { return impl_->finished; }
bool Session::needs_values() const { return !impl_->without_values.empty(); }
const std::vector<std::string>& Session::resumed_blobs() const { return impl_->resumed_blobs; }
int64_t Session::restored_version() const { return impl_->restored_version; }
int Session::rank() const { return impl_->group.rank(); }
int Session::world_size() const { return impl_->group.world_size(); }
const kernels::OptimizerSpec& Session::optimizer() const { return impl_->seat.optimizer; }
uint32_t Session::unit_count() const { return impl_->seat.units->unit_count(); }

absl::StatusOr<uint32_t> Session::FindUnit(absl::string_view name) const {
  return impl_->seat.units->layout().FindUnit(name);
}

uint64_t Session::unit_elements(uint32_t unit) const {
  return unit < unit_count() ? impl_->seat.units->unit(unit).elements : 0;
}

uint32_t Session::tensor_count() const { return static_cast<uint32_t>(impl_->seat.units->layout().tensors().size()); }

std::vector<std::string> Session::tensor_names() const {
  const model::Layout& layout = impl_->seat.units->layout();
  std::vector<std::string> names;
  for (uint32_t i = 0; i < layout.tensors().size(); ++i) {
    if (layout.live(i)) names.push_back(layout.tensors()[i].name);
  }
  return names;
}

absl::StatusOr<uint32_t> Session::TensorIndex(absl::string_view tensor) const {
  return impl_->seat.units->layout().FindTensor(tensor);
}

absl::StatusOr<v1::Frozen> Session::FrozenAs(absl::string_view tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, TensorIndex(tensor));
  return impl_->seat.units->layout().tensors()[index].frozen;
}

absl::StatusOr<Session::Location> Session::Locate(absl::string_view tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, impl_->seat.units->layout().FindTensor(tensor));
  const model::Tensor& found = impl_->seat.units->layout().tensors()[index];
  return Location{found.unit, found.range.begin, found.range.end};
}

const std::vector<UnitRange>& Session::owned(uint32_t unit) const { return RangesOf(rank(), unit); }

const std::vector<UnitRange>& Session::RangesOf(int rank, uint32_t unit) const {
  if (rank < 0 || rank >= world_size() || unit >= unit_count()) return NoRanges();
  return impl_->seat.units->unit(unit).ranges[rank];
}

uint64_t Session::owned_elements(uint32_t unit) const {
  return unit < unit_count() ? impl_->seat.units->unit(unit).owned_elements : 0;
}

void Session::Prefetch(uint32_t unit) {
  if (impl_->Usable().ok()) impl_->parameters.Prefetch(unit);
}

absl::StatusOr<UnitLease> Session::Acquire(uint32_t unit) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckHasValues(unit));
  auto buffer = impl_->parameters.Acquire(unit);
  if (!buffer.ok()) {
    // The other ranks sit in the all-gather: any further collective call would meet them there.
    if (world_size() > 1) impl_->finished = buffer.status();
    return impl_->Conclude(buffer.status());
  }
  return impl_->Lease(this, unit, *std::move(buffer));
}

absl::StatusOr<UnitLease> Session::AcquireWhole(uint32_t unit) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckHasValues(unit));
  auto buffer = impl_->parameters.AcquireWhole(unit);
  if (!buffer.ok()) return impl_->Conclude(buffer.status());
  return impl_->Lease(this, unit, *std::move(buffer));
}

absl::Status Session::Impl::PullOwned(uint32_t unit, absl::Span<std::byte> to, uint64_t element_bytes) {
  BALLAST_RETURN_IF_ERROR(CheckHasValues(unit));
  BALLAST_RETURN_IF_ERROR(CheckElement("working parameters", seat.optimizer.working, element_bytes));
  return Conclude(parameters.PullOwned(unit, to));
}

absl::Status Session::PullOwned(uint32_t unit, absl::Span<bf16> to) {
  return impl_->PullOwned(unit, WritableBytes(to), sizeof(bf16));
}

absl::Status Session::PullOwned(uint32_t unit, absl::Span<float> to) {
  return impl_->PullOwned(unit, WritableBytes(to), sizeof(float));
}

const model::Box* Session::Held(uint32_t tensor) const {
  return tensor < tensor_count() ? impl_->seat.units->Held(tensor) : nullptr;
}

Split Session::split() const { return impl_->options.split; }

uint64_t Session::inflight_bytes_max() const { return impl_->options.inflight_bytes_max; }

absl::StatusOr<PendingPull> Session::StartPull(uint32_t unit, absl::Span<const PullRun> runs) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckHasValues(unit));
  return PendingPull(this, impl_->parameters.StartPull(unit, runs));
}

absl::Status PendingPull::Await(absl::Duration waited) {
  if (tally_ == nullptr) return absl::OkStatus();
  const std::shared_ptr<Tally> tally = std::exchange(tally_, nullptr);
  return session_->impl_->Conclude(session_->impl_->parameters.AwaitPull(*tally, waited));
}

std::function<void()> PendingPull::Waiter() const {
  return [tally = tally_] {
    if (tally != nullptr) (void)tally->WaitUntil(absl::InfiniteFuture());
  };
}

absl::Status Session::Pin() {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  v1::PinRequest request;
  request.set_job(impl_->seat.job);
  request.set_version(version());
  const auto answers = impl_->router->CallAll<v1::PinRequest, v1::PinResponse>(
      &Transport::Pin, absl::StrCat("Pin of version ", version()), request, impl_->seat.Deadline());
  if (!answers.ok()) return impl_->Conclude(answers.status());
  const auto& steps = answers->front().tensor_steps();
  impl_->pinned_steps[version()].assign(steps.begin(), steps.end());
  return absl::OkStatus();
}

absl::Status Session::Unpin(int64_t version) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  v1::UnpinRequest request;
  request.set_job(impl_->seat.job);
  request.set_version(version);
  const auto answers = impl_->router->CallAll<v1::UnpinRequest, v1::UnpinResponse>(
      &Transport::Unpin, absl::StrCat("Unpin of version ", version), request, impl_->seat.Deadline());
  impl_->pinned_steps.erase(version);
  return impl_->Conclude(answers.status());
}

absl::StatusOr<std::vector<model::BoxRun>> Session::WholeRuns(absl::string_view tensor) const {
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, impl_->seat.units->layout().FindTensor(tensor));
  return RunsOf(index, model::WholeOf(impl_->seat.units->layout().tensors()[index].shape));
}

const std::vector<uint64_t>& Session::ShapeOf(uint32_t tensor) const {
  return impl_->seat.units->layout().tensors()[tensor].shape;
}

std::vector<model::BoxRun> Session::RunsOf(uint32_t tensor, const model::Box& box) const {
  const model::Tensor& found = impl_->seat.units->layout().tensors()[tensor];
  return model::RunsOf(found.shape, box, found.parts);
}

absl::Status Session::Read(absl::string_view tensor, Content content, int64_t version, absl::Span<float> to,
                           absl::Span<const model::BoxRun> runs) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const Location at, Locate(tensor));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<model::BoxRun> whole, WholeRuns(tensor));
  if (runs.empty()) runs = whole;
  if (to.size() != model::ElementsOf(runs) || runs.back().in_tensor + runs.back().count > at.end - at.begin) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadLength,
        absl::StrCat("tensor '", tensor, "' has ", at.end - at.begin, " elements, got room for ", to.size()));
  }
  if (version > this->version()) {
    return Precondition(absl::StrCat("version ", version, " is not decided yet; this session is at ", this->version()));
  }
  const kernels::Dtype dtype = content == Content::kWorking ? optimizer().working : kernels::Dtype::kF32;
  const uint64_t width = kernels::ElementBytes(dtype);
  std::vector<std::byte> read;
  for (const model::RunGroup& group : model::GroupRuns(runs, kGapElementsMax)) {
    const model::Range range{at.begin + group.range.begin, at.begin + group.range.end};
    const bool direct = group.first + 1 == group.last && dtype == kernels::Dtype::kF32;
    absl::Span<std::byte> place;
    if (direct) {
      place = WritableBytes(to.subspan(runs[group.first].in_box, range.size()));
    } else {
      read.resize(range.size() * width);
      place = absl::MakeSpan(read);
    }
    BALLAST_RETURN_IF_ERROR(impl_->Conclude(impl_->parameters.Read(at.unit, range, ToProto(content), version, place)));
    for (size_t i = group.first; i < group.last && !direct; ++i) {
      kernels::ToF32(dtype, place.data() + (runs[i].in_tensor - group.range.begin) * width,
                     to.subspan(runs[i].in_box, runs[i].count));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Session::TensorSteps(absl::string_view tensor, int64_t version) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, impl_->seat.units->layout().FindTensor(tensor));
  if (version != this->version()) {
    const auto pinned = impl_->pinned_steps.find(version);
    if (pinned != impl_->pinned_steps.end() && index < pinned->second.size()) return pinned->second[index];
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kVersionGone,
        absl::StrCat("step counts of tensor '", tensor, "' at version ", version, " are not known: this ",
                     "session is at version ", this->version(), " and did not pin ", version));
  }
  auto& known = impl_->steps_cache;
  if (known.version == version && index < known.steps.size()) return known.steps[index];
  // Step counts come from the servers, which are at version() once they took its commit.
  for (const bool again : {false, true}) {
    if (again) impl_->transaction.CommitAgain();
    (void)impl_->transaction.AwaitCommits(impl_->seat.Deadline());
    v1::GetJobRequest ask;
    ask.set_job(impl_->seat.job);
    ask.set_without_open(true);
    BALLAST_ASSIGN_OR_RETURN(const auto answers, (impl_->router->CallAll<v1::GetJobRequest, v1::GetJobResponse>(
                                                     &Transport::GetJob, "GetJob", ask, impl_->seat.Deadline())));
    for (const v1::GetJobResponse& answer : answers) {
      if (answer.committed() != version || static_cast<int>(index) >= answer.tensor_steps_size()) continue;
      known.version = version;
      known.steps.assign(answer.tensor_steps().begin(), answer.tensor_steps().end());
      return known.steps[index];
    }
  }
  return model::Error(absl::StatusCode::kUnavailable, model::kBehind,
                      absl::StrCat("no server is at version ", version, " yet; ask again"));
}

SessionStats Session::stats() const {
  SessionStats stats;
  stats.pull_seconds = impl_->parameters.pull_seconds();
  stats.gather_seconds = impl_->parameters.gather_seconds();
  stats.push_seconds = impl_->push_seconds;
  stats.seal_seconds = impl_->seal_seconds;
  stats.pulled_bytes = impl_->parameters.pulled_bytes();
  stats.pushed_bytes = impl_->gradients.pushed_bytes();
  stats.gathered_bytes = impl_->parameters.gathered_bytes();
  return stats;
}

UnitLease::UnitLease(Session* session, void* buffer, absl::Span<const std::byte> bytes, uint64_t element_bytes)
    : session_(session), buffer_(buffer), bytes_(bytes), element_bytes_(element_bytes) {}

namespace {

void RequireWidth(uint64_t width, uint64_t element_bytes, const char* instead) {
  if (width == element_bytes) return;
  std::fprintf(stderr, "UnitLease: working parameters have %d bytes an element; use %s\n",
               static_cast<int>(element_bytes), instead);
  std::abort();
}

}  // namespace

absl::Span<const bf16> UnitLease::parameters() const {
  RequireWidth(sizeof(bf16), element_bytes_, "parameters_f32()");
  return {reinterpret_cast<const bf16*>(bytes_.data()), bytes_.size() / sizeof(bf16)};
}

absl::Span<const float> UnitLease::parameters_f32() const {
  RequireWidth(sizeof(float), element_bytes_, "parameters()");
  return {reinterpret_cast<const float*>(bytes_.data()), bytes_.size() / sizeof(float)};
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
  }
  return {};
}

UnitLease::UnitLease(UnitLease&& other) noexcept
    : session_(std::exchange(other.session_, nullptr)),
      buffer_(std::exchange(other.buffer_, nullptr)),
      bytes_(std::exchange(other.bytes_, {})),
      element_bytes_(std::exchange(other.element_bytes_, 0)) {}

UnitLease& UnitLease::operator=(UnitLease&& other) noexcept {
  std::swap(session_, other.session_);
  std::swap(buffer_, other.buffer_);
  std::swap(bytes_, other.bytes_);
  std::swap(element_bytes_, other.element_bytes_);
  return *this;
}

UnitLease::~UnitLease() {
  if (buffer_ == nullptr) return;
  session_->impl_->parameters.Return(std::unique_ptr<UnitBuffer>(static_cast<UnitBuffer*>(buffer_)));
}

}  // namespace ballast::client
