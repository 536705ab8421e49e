#include "ballast/client/python/native/python_session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/gloo_collective.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/proto/model/placement.h"
#include "ballast/services/gateway/embedded_transport.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;

absl::Status BadLength(absl::string_view what) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength, what);
}

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

std::unique_ptr<PythonSession> PythonSession::Open(const OpenOptions& options,
                                                   const std::vector<client::TensorSpec>& tensors, PythonServer* server,
                                                   client::Rendezvous* store, const Interrupt& interrupt) {
  LetForkedChildrenExit();
  std::unique_ptr<PythonSession> session(new PythonSession(server == nullptr ? interrupt : interrupt.OfOwnServer()));
  if (options.world_size > 1) {
    client::GlooOptions gloo;
    gloo.host = options.host;
    // Other ranks wait in an exchange while rank 0 waits for servers.
    gloo.timeout = std::max(options.step_timeout, 2 * options.open_timeout);
    session->collective_ = Take(client::MakeGloo(store, options.rank, options.world_size, gloo));
  } else {
    session->collective_ = std::move(client::MakeLoopbackGroup(1).front());
  }
  auto transports = Take(client::MakeGrpcTransports(options.servers, options.job, options.access, options.open_timeout,
                                                    interrupt.raised()));
  if (server != nullptr) {
    session->server_ = server->server();
    constexpr int kCopyThreadsMax = 8;  // more are no faster: memory is the bound
    transports.push_back(
        services::MakeEmbeddedTransport(session->server_.get(), std::clamp(server->threads(), 1, kCopyThreadsMax)));
  }
  client::SessionOptions interruptible = options;
  interruptible.interrupted = interrupt.raised();
  session->session_ =
      Take(client::Session::Open(interruptible, tensors, std::move(transports), session->collective_.get()));
  std::vector<std::string> names;
  for (const client::TensorSpec& tensor : tensors) names.push_back(tensor.name);
  session->MakeTensors(names);
  return session;
}

void PythonSession::MakeTensors(const std::vector<std::string>& names) {
  tensors_ = std::make_unique<client::Tensors>(Take(client::Tensors::Make(session_.get(), names)));
  index_.clear();
  for (size_t i = 0; i < names.size(); ++i) index_[names[i]] = i;
}

PythonSession::Using::Using(const PythonSession* of) : lock_(of->mutex_), of_(of) {
  if (of->session_ != nullptr) return;
  throw StatusError(model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, "the session was closed"));
}

size_t PythonSession::Using::Find(const std::string& tensor, uint64_t elements) const {
  const auto found = of_->index_.find(tensor);
  if (found != of_->index_.end() && tensors().local_elements(found->second) == elements) return found->second;
  throw StatusError(BadLength(absl::StrCat("tensor '", tensor, "' does not have ", elements,
                                           " local elements, or the session does not know it")));
}

std::pair<std::string, std::string> PythonSession::ended() const {
  const Using session = Use();
  const absl::Status& why = session->ended();
  if (!why.ok()) return {std::string(why.message()), model::ReasonOf(why)};
  return {interrupt_.raised()() ? "an interrupt (Ctrl-C) ended it" : "", ""};
}

std::vector<std::string> PythonSession::written() const {
  const Using session = Use();
  std::vector<std::string> names;
  for (const std::string& name : tensors_->names()) {
    const absl::StatusOr<uint32_t> index = session->TensorIndex(name);
    if (index.ok() && session->written(*index)) names.push_back(name);
  }
  return names;
}

void PythonSession::CheckElements(absl::Span<const std::optional<uint64_t>> elements) const {
  const Using session = Use();
  const std::vector<std::string>& names = tensors_->names();
  if (elements.size() != names.size()) {
    throw StatusError(BadLength(absl::StrCat("expected ", names.size(), " tensors, got ", elements.size())));
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    if (!elements[i].has_value() || *elements[i] == tensors_->local_elements(i)) continue;
    throw StatusError(BadLength(absl::StrCat("tensor '", names[i], "': expected ", tensors_->local_elements(i),
                                             " local elements, as it was registered with, got ", *elements[i])));
  }
}

void PythonSession::PushEarly(size_t unit, absl::Span<const client::TensorMemory> gradients,
                              absl::Span<const std::optional<uint64_t>> elements,
                              const std::shared_ptr<const void>& owner) {
  const client::Waiter admitted = StartPush(unit, gradients, elements, owner);
  if (admitted) admitted();  // without the session's lock: pulls go meanwhile, and further pushes may queue up
}

client::Waiter PythonSession::StartPush(size_t unit, absl::Span<const client::TensorMemory> gradients,
                                        absl::Span<const std::optional<uint64_t>> elements,
                                        const std::shared_ptr<const void>& owner) {
  const Using session = Use();
  bool fits = unit < tensors_->unit_count() && elements.size() == tensors_->TensorsOf(unit).size();
  for (size_t i = 0; fits && i < elements.size(); ++i) {
    fits = !elements[i].has_value() || *elements[i] == tensors_->local_elements(tensors_->TensorsOf(unit)[i]);
  }
  if (!fits) {
    throw StatusError(BadLength("expected a unit of the session, and a gradient of each of its tensors"));
  }
  client::Waiter admitted;
  Check(tensors_->PushEarly(unit, gradients, owner, &admitted));
  return admitted;
}

uint64_t PythonSession::PullBytes(size_t tensor) {
  const Using session = Use();
  if (tensor < tensors_->names().size()) return tensors_->PullBytes(tensor);
  throw StatusError(BadLength(absl::StrCat("expected one of ", tensors_->names().size(), " tensors, got ", tensor)));
}

uint64_t PythonSession::StartPull(const std::vector<size_t>& which, absl::Span<const Place> places, bool whole,
                                  std::shared_ptr<void> kept) {
  const Using session = Use();
  if (which.size() != places.size()) throw StatusError(BadLength("expected a place per tensor"));
  const std::vector<std::string>& names = tensors_->names();
  std::vector<std::byte*> to;
  std::vector<model::Box> boxes;
  for (size_t i = 0; i < which.size(); ++i) {
    bool fits = which[i] < names.size();
    if (fits && whole) {
      const std::vector<uint64_t>& shape = session->ShapeOf(Take(session->TensorIndex(names[which[i]])));
      if (places[i].shape != shape) {
        throw StatusError(
            BadLength(absl::StrCat("tensor '", names[which[i]], "' has shape [", absl::StrJoin(shape, ", "),
                                   "], and its place came with shape [", absl::StrJoin(places[i].shape, ", "), "]")));
      }
      boxes.push_back(model::WholeOf(shape));
    } else if (fits) {
      const bool coded = places[i].dtype == kernels::Dtype::kE4m3Blocks;
      fits = places[i].elements == (coded ? tensors_->PullBytes(which[i]) : tensors_->local_elements(which[i]));
    }
    const bool blocks = whole && kernels::GrainOf(places[i].dtype) > 1;  // a shape tells nothing of them
    if (fits && !blocks && places[i].dtype == session->optimizer().working) {
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

void PythonSession::Register(const std::vector<client::TensorSpec>& tensors) {
  const Using session = Use();
  Check(session->Register(tensors));
  std::vector<std::string> names = tensors_->names();
  for (const client::TensorSpec& tensor : tensors) {
    if (!index_.contains(tensor.name)) names.push_back(tensor.name);
  }
  MakeTensors(names);
}

PythonSession::~PythonSession() {
  if (getpid() == pid_) {
    // Calls that end here may wait for the interpreter's lock, to let go of gradients.
    std::optional<nb::gil_scoped_release> release;
    if (pythons_) release.emplace();
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
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!under_way_.empty()) interrupt_.Raise();  // nobody wants them: a server that has ended is not waited for
  under_way_.clear();
  tensors_.reset();
  session_.reset();
  collective_.reset();
  server_.reset();
}

}  // namespace ballast::python
