#include "ballast/client/python/native/python_session.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/gloo_collective.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/placement.h"
#include "ballast/services/embedded/embedded_transport.h"
#include "ballast/services/server/estimate.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;
using client::Session;

// The entry of `table` with that name; else BAD_CONFIG, naming all.
template <typename Value, size_t n>
Value Named(const char* what, const std::string& name, const std::array<std::pair<const char*, Value>, n>& table) {
  std::vector<std::string> names;
  for (const auto& [known, value] : table) {
    if (name == known) return value;
    names.emplace_back(known);
  }
  throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                                 absl::StrCat(what, " '", name, "': expected one of ", absl::StrJoin(names, ", "))));
}

kernels::OptimizerSpec SpecOf(const Optimizer& optimizer) {
  return {.kind = Take(model::OptimizerNamed(optimizer.kind)),
          .amsgrad = optimizer.amsgrad,
          .momentum = optimizer.momentum,
          .nesterov = optimizer.nesterov,
          .moments = Take(model::MomentsNamed(optimizer.moments)),
          .master = Take(model::MasterNamed(optimizer.master)),
          .gradient = Take(model::DtypeNamed(optimizer.gradient)),
          .working = Take(model::DtypeNamed(optimizer.working))};
}

client::Content ContentNamed(const std::string& name) {
  using client::Content;
  return Named("content", name,
               std::array<std::pair<const char*, Content>, 5>{{{"working", Content::kWorking},
                                                               {"master", Content::kMaster},
                                                               {"moment1", Content::kMoment1},
                                                               {"moment2", Content::kMoment2},
                                                               {"moment3", Content::kMoment3}}});
}

client::SessionOptions OptionsOf(const OpenOptions& options) {
  using client::Resume;
  client::SessionOptions session;
  session.job = options.job;
  session.resume = Named("resume", options.resume,
                         std::array<std::pair<const char*, Resume>, 3>{
                             {{"never", Resume::kNever}, {"auto", Resume::kAuto}, {"must", Resume::kMust}}});
  session.group_count = options.group_count;
  session.chunk_elements = options.chunk_elements;
  session.optimizer = SpecOf(options.optimizer);
  session.seed = options.seed;
  session.durability = Take(model::DurabilityNamed(options.durability));
  session.pin_interval = options.pin_interval;
  session.split = options.placed ? client::Split::kPlaced : client::Split::kEven;
  session.step_timeout = absl::Seconds(options.step_timeout);
  session.open_timeout = absl::Seconds(options.open_timeout);
  session.says_whether_new = false;  // ballast.torch does, in steps
  if (options.progress) {
    session.progress = [](const std::string& line) { std::fprintf(stderr, "ballast: %s\n", line.c_str()); };
  }
  return session;
}

// The mesh by strides, if its ranks are a grid, else as a list.
v1::MeshCuts MeshCutsOf(const Placement& placement) {
  v1::MeshCuts part;
  v1::Mesh& mesh = *part.mutable_mesh();
  const size_t axes = placement.sizes.size();
  uint64_t behind = 1;
  std::vector<uint32_t> strides(axes, 0);
  for (size_t axis = axes; axis-- > 0; behind *= placement.sizes[axis]) {
    // Ranks that descend make no grid: the comparison below finds that.
    if (placement.sizes[axis] > 1 && behind < placement.ranks.size() && placement.ranks[behind] > placement.ranks[0]) {
      strides[axis] = placement.ranks[behind] - placement.ranks[0];
    }
  }
  for (const uint32_t size : placement.sizes) mesh.add_size(size);
  if (!placement.ranks.empty()) mesh.set_first(placement.ranks[0]);
  for (const uint32_t stride : strides) mesh.add_stride(stride);
  if (model::RanksOf(mesh) != placement.ranks) {
    mesh.clear_first();
    mesh.clear_stride();
    for (const uint32_t rank : placement.ranks) mesh.add_ranks(rank);
  }
  for (const auto& [axis, dimension] : placement.cuts) {
    v1::Cut* cut = part.add_cuts();
    cut->set_axis(axis);
    cut->set_dimension(dimension);
  }
  return part;
}

constexpr std::pair<v1::Frozen, const char*> kFrozen[] = {
    {v1::FROZEN_UNSPECIFIED, ""}, {v1::FROZEN_WORKING, "working"}, {v1::FROZEN_Q8, "q8"}};

v1::Frozen FrozenNamed(const std::string& name) {
  for (const auto& [frozen, its] : kFrozen) {
    if (name == its) return frozen;
  }
  throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                                 absl::StrCat("frozen is '", name, "'; expected '', 'working' or 'q8'")));
}

std::vector<client::TensorSpec> SpecsOf(const std::vector<Tensor>& tensors) {
  std::vector<client::TensorSpec> specs;
  for (const Tensor& tensor : tensors) {
    client::TensorSpec& spec = specs.emplace_back();
    spec.name = tensor.name;
    spec.unit = tensor.unit;
    spec.shape = tensor.shape;
    spec.group = tensor.group;
    if (tensor.placement.has_value()) spec.placement = MeshCutsOf(*tensor.placement);
    spec.parts = {tensor.parts.first, tensor.parts.second};
    spec.frozen = FrozenNamed(tensor.frozen);
  }
  return specs;
}

// Waits for the answer of `call`, which gets a callback for its reply.
template <typename Response, typename Call>
Response Await(const Call& call) {
  std::promise<absl::StatusOr<Response>> answered;
  call([&](absl::StatusOr<Response> answer) { answered.set_value(std::move(answer)); });
  return Take(answered.get_future().get());
}

// A forked child has none of the parent's threads: what belongs to them is left alone.
template <typename T>
void LeaveToParent(std::shared_ptr<T>* shared) {
  new std::shared_ptr<T>(std::move(*shared));
}

// The same holds for libraries, some of whose static destructors wait for threads. So a forked child's exit() skips all
// handlers registered before the fork for the end of the process. on_exit takes a lock of the C library: if another
// thread registers a handler in the instant of the fork, the child hangs.
void LetForkedChildrenExit() {
  static const int once = pthread_atfork(nullptr, nullptr, [] {
    on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          _exit(status);
        },
        nullptr);
  });
  (void)once;
}

}  // namespace

PythonServer::PythonServer(const std::string& directory, uint64_t dram, uint64_t nvme, int threads, bool working_copies)
    : pid_(getpid()), threads_(threads) {
  LetForkedChildrenExit();
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                                   absl::StrCat("directory '", directory, "' cannot be made: ", error.message())));
  }
  services::StateServerOptions options;
  options.data_directory = directory;
  options.budget.dram = dram;
  options.budget.nvme = nvme;
  options.compute_threads = threads;
  options.read_threads = threads;
  options.working_copies = working_copies;
  server_ = Take(services::StateServer::Start(options));
}

uint64_t StagingBytes(uint64_t dram) {
  services::StateServerOptions options;
  options.budget.dram = dram;
  return services::StagingBytes(options);
}

EstimateReport EstimateFor(const std::vector<Tensor>& tensors, const OpenOptions& options, uint64_t dram, uint64_t nvme,
                           int threads, uint32_t servers, const std::string& profile, bool working_copies) {
  services::EstimateRequest request;
  request.ranks = static_cast<uint32_t>(std::max(options.world_size, 0));
  request.servers = std::max<uint32_t>(servers, 1);
  request.server.budget = {.hbm = 0, .dram = dram, .nvme = nvme};
  request.server.compute_threads = threads;
  request.server.machine_profile = profile;
  request.server.working_copies = working_copies;
  v1::JobSpec& spec = request.spec;
  spec.set_name("estimate");
  spec.set_chunk_elements(options.chunk_elements);
  spec.set_durability(Take(model::DurabilityNamed(options.durability)));
  spec.set_pin_interval(options.pin_interval);
  spec.set_group_count(options.group_count);
  model::SetOptimizer(SpecOf(options.optimizer), &spec);
  v1::Registration* registration = spec.add_registrations();
  registration->set_version(-1);
  for (const Tensor& tensor : tensors) {
    v1::TensorSpec* to = registration->add_tensors();
    to->set_name(tensor.name);
    to->set_unit(tensor.unit);
    for (const uint64_t extent : tensor.shape) to->add_shape(extent);
    to->set_group(tensor.group);
    to->set_frozen(FrozenNamed(tensor.frozen));
  }
  const services::Estimate estimate = Take(services::EstimateJob(request));
  EstimateReport report{.fits = estimate.fits.ok(),
                        .text = estimate.Explain(request),
                        .step_seconds = estimate.server.prediction().total_seconds(),
                        .tiers = {},
                        .rank_bytes = estimate.whole.all(),
                        .rank_bytes_sharded = estimate.sharded.all()};
  for (const v1::PlannedTier& tier : estimate.server.tiers()) {
    report.tiers.emplace_back(tier.tier(), tier.state_bytes() + tier.working_bytes() + tier.other_bytes());
  }
  return report;
}

PythonServer::~PythonServer() {
  if (getpid() != pid_) LeaveToParent(&server_);
}

std::shared_ptr<services::StateServer> PythonServer::server() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (server_ != nullptr) return server_;
  throw StatusError(model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, "the server was stopped"));
}

void PythonServer::Stop() {
  std::shared_ptr<services::StateServer> server;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    server = std::move(server_);
  }
  if (server != nullptr) server->Stop();
}

std::vector<std::string> PythonServer::Jobs() const {
  std::vector<std::string> names;
  const v1::GetServerStatusResponse status = server()->Status();
  for (const v1::JobStatus& job : status.jobs()) names.push_back(job.name());
  return names;
}

void PythonServer::Drop(const std::string& job) {
  const std::shared_ptr<services::StateServer> server = this->server();
  const v1::GetServerStatusResponse status = server->Status();
  for (const v1::JobStatus& known : status.jobs()) {
    if (known.name() != job) continue;
    v1::DropJobRequest drop;
    drop.set_job(job);
    *drop.mutable_epoch() = known.epoch();
    (void)Await<v1::DropJobResponse>([&](auto reply) { server->DropJob(drop, reply); });
  }
}

std::vector<std::pair<uint64_t, uint64_t>> PythonServer::Tiers() const {
  const v1::GetServerStatusResponse status = server()->Status();
  std::vector<std::pair<uint64_t, uint64_t>> tiers;
  for (const v1::TierStatus& tier : status.tiers()) {
    if (tier.tier() != "hbm") tiers.emplace_back(tier.capacity_bytes(), tier.used_bytes());
  }
  return tiers;
}

namespace {

// The exception in one line: users have no use for the traceback of a callback.
std::string Said(const nb::python_error& error) {
  const nb::str type(error.type().attr("__name__")), text(error.value());
  return absl::StrCat(type.c_str(), ": ", text.c_str());
}

}  // namespace

absl::Status PythonStore::Set(absl::string_view key, absl::string_view value) {
  const nb::gil_scoped_acquire lock;
  try {
    store_.attr("set")(nb::str(key.data(), key.size()), nb::bytes(value.data(), value.size()));
    return absl::OkStatus();
  } catch (nb::python_error& error) {
    return model::Error(absl::StatusCode::kUnavailable, model::kRankMissing,
                        absl::StrCat("the store of the process group: ", Said(error)));
  }
}

absl::StatusOr<std::string> PythonStore::Get(absl::string_view key, absl::Time deadline) {
  const nb::gil_scoped_acquire lock;
  try {
    const double seconds = std::max(0.001, absl::ToDoubleSeconds(deadline - absl::Now()));
    const auto value = nb::cast<nb::bytes>(store_.attr("get")(nb::str(key.data(), key.size()), seconds));
    return std::string(value.c_str(), value.size());
  } catch (nb::python_error& error) {
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
                        absl::StrCat("no rank told '", key, "' to the process group's store in time; did one end? (",
                                     Said(error), ")"));
  } catch (const nb::cast_error&) {
    return model::Error(absl::StatusCode::kInternal, model::kRankMissing,
                        "the store's get gave something else than bytes");
  }
}

std::unique_ptr<PythonSession> PythonSession::Open(const OpenOptions& options, const std::vector<Tensor>& tensors,
                                                   PythonServer* server, client::Rendezvous* store,
                                                   const Interrupt& interrupt) {
  LetForkedChildrenExit();
  std::unique_ptr<PythonSession> session(new PythonSession(server == nullptr ? interrupt : interrupt.OfOwnServer()));
  if (options.world_size > 1) {
    client::GlooOptions gloo;
    gloo.host = options.host;
    // Other ranks wait in an exchange while rank 0 waits for servers.
    gloo.timeout = absl::Seconds(std::max(options.step_timeout, 2 * options.open_timeout));
    session->collective_ = Take(client::MakeGloo(store, options.rank, options.world_size, gloo));
  } else {
    session->collective_ = std::move(client::MakeLoopbackGroup(1).front());
  }
  auto transports = Take(client::MakeGrpcTransports(options.servers, options.job, options.access,
                                                    absl::Seconds(options.open_timeout), interrupt.raised()));
  if (server != nullptr) {
    session->server_ = server->server();
    constexpr int kCopyThreadsMax = 8;  // more are no faster: memory is the bound
    transports.push_back(
        services::MakeEmbeddedTransport(session->server_.get(), std::clamp(server->threads(), 1, kCopyThreadsMax)));
  }
  client::SessionOptions session_options = OptionsOf(options);
  session_options.interrupted = interrupt.raised();
  session->session_ =
      Take(Session::Open(session_options, SpecsOf(tensors), std::move(transports), session->collective_.get()));
  for (const Tensor& tensor : tensors) session->names_.push_back(tensor.name);
  session->MakeTensors();
  return session;
}

void PythonSession::MakeTensors() {
  tensors_ = std::make_unique<client::Tensors>(Take(client::Tensors::Make(session_.get(), names_)));
}

PythonSession::Using::Using(const PythonSession* of) : lock_(of->mutex_), session_(of->session_.get()) {
  if (session_ != nullptr) return;
  throw StatusError(model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, "the session was closed"));
}

std::pair<std::string, std::string> PythonSession::ended() const {
  const Using session = Use();
  const absl::Status& why = session->ended();
  if (!why.ok()) return {std::string(why.message()), model::ReasonOf(why)};
  return {interrupt_.raised()() ? "an interrupt (Ctrl-C) ended it" : "", ""};
}

void Interrupt::SayThatItWaits() {
  std::fputs(
      "ballast: Ctrl-C came amid a call to the server in this process; the call ends first. A second Ctrl-C ends the "
      "session\n",
      stderr);
}

std::vector<std::string> PythonSession::written() const {
  const Using session = Use();
  std::vector<std::string> names;
  for (const std::string& name : names_) {
    const absl::StatusOr<uint32_t> index = session->TensorIndex(name);
    if (index.ok() && session->written(*index)) names.push_back(name);
  }
  return names;
}

void PythonSession::CheckElements(absl::Span<const std::optional<uint64_t>> elements) const {
  const Using session = Use();
  const auto refuse = [](const std::string& what) {
    throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength, what));
  };
  if (elements.size() != names_.size()) {
    refuse(absl::StrCat("expected ", names_.size(), " tensors, got ", elements.size()));
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    if (!elements[i].has_value() || *elements[i] == tensors_->local_elements(i)) continue;
    refuse(absl::StrCat("tensor '", names_[i], "': expected ", tensors_->local_elements(i),
                        " local elements, as it was registered with, got ", *elements[i]));
  }
}

void PythonSession::Initialise(absl::Span<const client::TensorMemory> memory, const client::Tensors::Source& source) {
  const Using session = Use();
  Check(tensors_->Initialise(memory, source));
}

Report PythonSession::Step(absl::Span<const client::TensorMemory> memory, const client::StepOptions& options,
                           const client::Tensors::Ready& ready) {
  const Using session = Use();
  const client::TensorsReport stepped = Take(tensors_->Step(memory, options, ready));
  return {.version = stepped.step.version,
          .skipped = stepped.step.skipped,
          .norm = stepped.step.norm,
          .push_seconds = stepped.push_seconds,
          .seal_seconds = stepped.seal_seconds,
          .pull_seconds = stepped.pull_seconds};
}

bool PythonSession::pushes_gradients() const {
  const Using session = Use();
  return tensors_->pushes_gradients();
}

std::vector<std::vector<size_t>> PythonSession::Units() const {
  const Using session = Use();
  std::vector<std::vector<size_t>> units;
  for (size_t unit = 0; unit < tensors_->unit_count(); ++unit) units.push_back(tensors_->TensorsOf(unit));
  return units;
}

void PythonSession::PushEarly(size_t unit, absl::Span<const client::TensorMemory> gradients,
                              absl::Span<const std::optional<uint64_t>> elements,
                              const std::shared_ptr<const void>& owner) {
  const Using session = Use();
  bool fits = unit < tensors_->unit_count() && elements.size() == tensors_->TensorsOf(unit).size();
  for (size_t i = 0; fits && i < elements.size(); ++i) {
    fits = !elements[i].has_value() || *elements[i] == tensors_->local_elements(tensors_->TensorsOf(unit)[i]);
  }
  if (!fits) {
    throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                                   "expected a unit of the session, and a gradient of each of its tensors"));
  }
  Check(tensors_->PushEarly(unit, gradients, owner));
}

uint64_t PythonSession::StartPull(const std::vector<size_t>& which, absl::Span<const Place> places, bool whole,
                                  std::shared_ptr<void> kept) {
  const Using session = Use();
  if (which.size() != places.size()) {
    throw StatusError(
        model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength, "expected a place per tensor"));
  }
  std::vector<std::byte*> to;
  std::vector<model::Box> boxes;
  for (size_t i = 0; i < which.size(); ++i) {
    bool fits = which[i] < names_.size();
    if (fits && whole) {
      const std::vector<uint64_t>& shape = session->ShapeOf(Take(session->TensorIndex(names_[which[i]])));
      if (places[i].shape != shape) {
        throw StatusError(model::Error(
            absl::StatusCode::kInvalidArgument, model::kBadLength,
            absl::StrCat("tensor '", names_[which[i]], "' has shape [", absl::StrJoin(shape, ", "),
                         "], and its place came with shape [", absl::StrJoin(places[i].shape, ", "), "]")));
      }
      boxes.push_back(model::WholeOf(shape));
    } else if (fits) {
      fits = places[i].elements == tensors_->local_elements(which[i]);
    }
    if (fits && places[i].dtype == session->optimizer().working) {
      to.push_back(places[i].memory);
      continue;
    }
    throw StatusError(
        model::Error(absl::StatusCode::kInvalidArgument, fits ? model::kBadDtype : model::kBadLength,
                     absl::StrCat("tensor ", which[i], " has a place of ", places[i].elements, " elements; expected ",
                                  whole ? "the tensor" : "this rank's part", ", in the job's working dtype")));
  }
  std::vector<client::PendingPull> pulls = Take(tensors_->StartPull(which, to, boxes));
  under_way_.try_emplace(++pulls_started_, UnderWay{std::move(kept), std::move(pulls)});
  return pulls_started_;
}

void PythonSession::AwaitPull(uint64_t pull) {
  std::vector<std::function<void()>> waiters;
  {
    const Using session = Use();
    const auto it = under_way_.find(pull);
    if (it == under_way_.end()) return;
    for (const client::PendingPull& each : it->second.pulls) waiters.push_back(each.Waiter());
  }
  const absl::Time began = absl::Now();
  for (const auto& wait : waiters) wait();  // without the session's lock: gradients go meanwhile
  absl::Duration waited = absl::Now() - began;
  const Using session = Use();
  auto found = under_way_.extract(pull);
  if (found.empty()) return;
  absl::Status status;
  for (client::PendingPull& each : found.mapped().pulls) {
    status.Update(each.Await(std::exchange(waited, absl::ZeroDuration())));
  }
  Check(status);
}

void PythonSession::Drop() {
  const Using session = Use();
  Check(tensors_->Drop());
}

void PythonSession::Pull(absl::Span<const client::TensorMemory> memory) {
  const Using session = Use();
  Check(tensors_->Pull(memory));
}

size_t PythonSession::Find(const std::string& tensor, uint64_t elements) const {
  const auto found = std::find(names_.begin(), names_.end(), tensor);
  const auto index = static_cast<size_t>(found - names_.begin());
  if (found != names_.end() && tensors_->local_elements(index) == elements) return index;
  throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                                 absl::StrCat("tensor '", tensor, "' does not have ", elements,
                                              " local elements, or the session does not know it")));
}

void PythonSession::Write(const std::string& tensor, absl::Span<const float> values) {
  const Using session = Use();
  Check(tensors_->Write(Find(tensor, values.size()), values));
}

Report PythonSession::CommitValues() {
  const client::StepReport stepped = Take(Use()->CommitValues());
  return {.version = stepped.version, .skipped = stepped.skipped};
}

Report PythonSession::CommitState(const std::string& array, absl::Span<const State> states, const std::string& blob) {
  const Using session = Use();
  std::vector<size_t> which;
  std::vector<const float*> values;
  std::vector<uint64_t> steps;
  absl::flat_hash_map<std::string, size_t> by_name;
  for (size_t i = 0; i < names_.size(); ++i) by_name[names_[i]] = i;
  for (const State& state : states) {
    const auto found = by_name.find(state.tensor);
    const size_t index = found == by_name.end() ? 0 : found->second;
    if (found == by_name.end() || state.values.size() != tensors_->local_elements(index)) {
      throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                                     absl::StrCat("tensor '", state.tensor, "' does not have ", state.values.size(),
                                                  " local elements, or the session does not know it")));
    }
    which.push_back(index);
    values.push_back(state.values.data());
    steps.push_back(state.steps);
  }
  const client::StepReport stepped = Take(tensors_->CommitState(ContentNamed(array), which, values, steps, blob));
  return {.version = stepped.version, .skipped = stepped.skipped};
}

void PythonSession::Register(const std::vector<Tensor>& tensors) {
  const Using session = Use();
  Check(session->Register(SpecsOf(tensors)));
  const absl::flat_hash_set<std::string> known(names_.begin(), names_.end());
  for (const Tensor& tensor : tensors) {
    if (!known.contains(tensor.name)) names_.push_back(tensor.name);
  }
  MakeTensors();
}

Report PythonSession::Restore(const client::KeptVersion& kept) {
  const client::StepReport stepped = Take(Use()->Restore(kept));
  return {.version = stepped.version, .skipped = stepped.skipped};
}

void PythonSession::Read(const std::string& tensor, const std::string& content, absl::Span<float> to) {
  const client::Content what = ContentNamed(content);
  const Using session = Use();
  Check(session->Read(tensor, what, session->version(), to));
}

void PythonSession::ReadPart(const std::string& tensor, const std::string& content, absl::Span<float> to) {
  const client::Content what = ContentNamed(content);
  const Using session = Use();
  Check(tensors_->Read(Find(tensor, to.size()), what, to));
}

std::string PythonSession::FrozenAs(const std::string& tensor) {
  const v1::Frozen found = Take(Use()->FrozenAs(tensor));
  return std::find_if(std::begin(kFrozen), std::end(kFrozen), [&](const auto& each) { return each.first == found; })
      ->second;
}

uint64_t PythonSession::TensorSteps(const std::string& tensor) {
  const Using session = Use();
  return Take(session->TensorSteps(tensor, session->version()));
}

std::vector<std::string> PythonSession::Exchange(const std::string& mine) {
  const Using session = Use();
  return Take(collective_->Exchange(mine));
}

void PythonSession::Pin() { Check(Use()->PinDurably()); }
void PythonSession::Unpin(int64_t version) { Check(Use()->UnpinDurably(version)); }
std::vector<client::KeptVersion> PythonSession::Pins() { return Take(Use()->DurablePins()); }
void PythonSession::CheckKept(const client::KeptVersion& wanted) { Check(Use()->CheckKept(wanted)); }

std::vector<std::pair<uint64_t, uint64_t>> BoxOf(const Placement& placement, const std::vector<uint64_t>& shape,
                                                 uint64_t place) {
  const v1::MeshCuts part = MeshCutsOf(placement);
  Check(model::CheckMesh(part, model::kRanksMax));
  std::vector<std::pair<uint64_t, uint64_t>> box;
  for (const model::Range& range : Take(model::BoxAt(part, shape, place))) box.emplace_back(range.begin, range.end);
  return box;
}

PythonSession::~PythonSession() {
  if (getpid() == pid_) {
    Close();
    return;
  }
  (void)new std::map<uint64_t, UnderWay>(std::move(under_way_));  // the parent's
  (void)tensors_.release();
  (void)session_.release();
  (void)collective_.release();
  LeaveToParent(&server_);
}

void PythonSession::Close() {
  if (getpid() != pid_) return;
  // Calls that end here may wait for the interpreter's lock, to let go of gradients.
  std::optional<nb::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!under_way_.empty()) interrupt_.Raise();  // nobody wants them: a server that has ended is not waited for
  under_way_.clear();
  tensors_.reset();
  session_.reset();
  collective_.reset();
  server_.reset();
}

}  // namespace ballast::python
