// Classes behind the Python module: a state server of this process, and one rank's session with its tensors. Methods
// block, throw StatusError, and need the interpreter's lock only where noted. Threads: any; calls on one session take
// turns.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/client/collective/collective.h"
#include "ballast/client/collective/rendezvous.h"
#include "ballast/client/session.h"
#include "ballast/client/tensors.h"
#include "ballast/proto/model/access.h"
#include "ballast/services/server/state_server.h"

namespace ballast::python {

// `directory` is created; budgets in bytes. `threads`: the number that compute an update.
class PythonServer {
 public:
  // working_copies: the server keeps parameters too, for a trainer without parameters. Otherwise sessions lend the
  // trainer's parameters to the server.
  PythonServer(const std::string& directory, uint64_t dram, uint64_t nvme, int threads, bool working_copies);
  ~PythonServer();
  // Ends the server; further calls throw. The directory is free at return, or when the last session with this server
  // closes; this object may live on.
  void Stop();
  // Names, sorted.
  std::vector<std::string> Jobs() const;
  // Deletes the job, if it exists, with all its data. No session may be open with the job.
  void Drop(const std::string& job);
  std::shared_ptr<services::StateServer> server() const;
  int threads() const { return threads_; }  // for compute, and for reads
  // (budget, used) in bytes: for DRAM, for NVMe.
  std::vector<std::pair<uint64_t, uint64_t>> Tiers() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<services::StateServer> server_;  // sessions share it; null after Stop()
  const pid_t pid_;
  const int threads_;
};

// torch.distributed's store, or any object with set(key, bytes) and get(key, seconds) -> bytes. Takes the interpreter's
// lock for each call.
class PythonStore : public client::Rendezvous {
 public:
  // Call with the interpreter's lock, like the destructor.
  explicit PythonStore(nanobind::object store) : store_(std::move(store)) {}
  absl::Status Set(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;

 private:
  nanobind::object store_;
};

// Strings as Python spells them: see OpenOptions.
struct Optimizer {
  std::string kind = "adamw";  // adamw, adam, sgd, adagrad, lion
  bool amsgrad = false;
  bool momentum = false;
  bool nesterov = false;
  std::string moments = "f32";                    // f32, bf16, i8, f8
  std::string master = "f32";                     // f32, remainder, lent
  std::string gradient = "f32", working = "f32";  // f32, bf16, f16
};

// Resources that a job would need: see services/server/estimate.h.
struct EstimateReport {
  bool fits = false;
  std::string text;                                     // for people
  double step_seconds = 0;                              // 0: not known
  std::vector<std::pair<std::string, uint64_t>> tiers;  // bytes on the fullest server
  uint64_t rank_bytes = 0, rank_bytes_sharded = 0;      // parameters and gradients of a trainer
};

struct OpenOptions {
  std::string job;
  std::string resume = "never";     // never, auto, must
  std::string durability = "none";  // step, every-K, none
  uint64_t pin_interval = 0;
  Optimizer optimizer;
  uint32_t group_count = 1;
  uint64_t chunk_elements = uint64_t{1} << 20;
  uint64_t seed = 0;
  bool placed = false;               // each rank has the parts of tensors that their placements say, not whole tensors
  std::vector<std::string> servers;  // "host:port"; empty: the embedded server
  model::Access access;              // to the servers
  int rank = 0;
  int world_size = 1;
  std::string host = "127.0.0.1";  // where this rank listens for the rest
  double step_timeout = 120;       // seconds
  double open_timeout = 30;
  bool progress = true;  // lines on stderr when a wait is long
};

// How the ranks of a mesh have a tensor: see v1.MeshCuts.
struct Placement {
  std::vector<uint32_t> ranks;  // row-major
  std::vector<uint32_t> sizes;  // of the mesh's axes
  // Axis and dimension of each cut, in their order.
  std::vector<std::pair<uint32_t, uint32_t>> cuts;
};

struct Tensor {
  Tensor(std::string tensor_name, std::string tensor_unit, std::vector<uint64_t> tensor_shape, uint32_t tensor_group)
      : name(std::move(tensor_name)),
        unit(std::move(tensor_unit)),
        shape(std::move(tensor_shape)),
        group(tensor_group) {}
  std::string name;
  std::string unit;
  std::vector<uint64_t> shape;
  uint32_t group;
  std::optional<Placement> placement;         // none: this rank alone has the whole of it
  std::pair<uint32_t, uint32_t> parts{0, 1};  // dimension and number: see client::TensorSpec
  std::string frozen;                         // "", "working" or "q8": what servers keep
};

struct Report {
  int64_t version = -1;
  bool skipped = false;
  double norm = 0;
  double push_seconds = 0;  // gradients taken
  double seal_seconds = 0;  // until the step is decided
  double pull_seconds = 0;  // until parameters hold the version
};

// Notices Ctrl-C while a call waits for servers. Threads: any; copies are of one session. Signals are seen on the main
// thread alone: for a call on another thread, whoever waits for it there calls EndWait().
class Interrupt {
 public:
  // For calls to a server in this process, which end by themselves. A job without a disk would lose its state with the
  // session, so a first Ctrl-C waits for the call's end, and one that comes after the message ends the session.
  Interrupt OfOwnServer() const {
    Interrupt own = *this;
    own.own_server_ = true;
    return own;
  }
  // Runs `call` on a thread of its own, and returns its result or throws its exception. If a signal's handler raises
  // meanwhile (this is the main thread), the call has two seconds to end by itself; then its wait is ended, and the
  // session too, but see OfOwnServer(). Either way the handler's exception is thrown. Call without the interpreter's
  // lock.
  template <typename Call>
  auto Watch(const Call& call) const;
  // Ends the wait, and the session too.
  void Raise() const { raised_->store(true); }
  // For a call that another thread waits for, and that a Ctrl-C interrupted. A call to the server in this process goes
  // on at the first, with a message, and is ended at the second, as in Watch.
  void EndWait() const {
    if (!own_server_ || asked_->exchange(true)) return Raise();
    SayThatItWaits();
  }
  std::function<bool()> raised() const {
    return [raised = raised_] { return raised->load(); };
  }

 private:
  static void SayThatItWaits();

  bool own_server_ = false;
  std::shared_ptr<std::atomic<bool>> raised_ = std::make_shared<std::atomic<bool>>(false);
  // EndWait() has said that the call under way ends first.
  std::shared_ptr<std::atomic<bool>> asked_ = std::make_shared<std::atomic<bool>>(false);
};

template <typename Call>
auto Interrupt::Watch(const Call& call) const {
  constexpr auto kAsk = std::chrono::milliseconds(100);
  constexpr auto kGrace = std::chrono::seconds(2);
  auto result = std::async(std::launch::async, [&]() -> decltype(call()) {
    // A later call waits for a first Ctrl-C of its own.
    const std::unique_ptr<std::atomic<bool>, void (*)(std::atomic<bool>*)> ends(
        asked_.get(), [](std::atomic<bool>* asked) { asked->store(false); });
    return call();
  });
  while (result.wait_for(kAsk) != std::future_status::ready) {
    std::optional<nanobind::python_error> error;
    {
      const nanobind::gil_scoped_acquire lock;
      if (PyErr_CheckSignals() != 0) error.emplace();
    }
    if (!error.has_value()) continue;
    if (result.wait_for(kGrace) == std::future_status::ready) throw *std::move(error);
    if (own_server_) {
      // A Ctrl-C from before the message does not count as the second.
      const nanobind::gil_scoped_acquire lock;
      if (PyErr_CheckSignals() != 0) error.emplace();
      SayThatItWaits();
    }
    bool ends = !own_server_;
    do {
      if (ends) Raise();
      const nanobind::gil_scoped_acquire lock;
      if (PyErr_CheckSignals() != 0) {
        ends = true;
        error.emplace();
      }
    } while (result.wait_for(kAsk) != std::future_status::ready);
    throw *std::move(error);
  }
  return result.get();
}

class PythonSession {
 public:
  // COLLECTIVE. `server`: null with OpenOptions::servers. `store`: used only by several ranks.
  static std::unique_ptr<PythonSession> Open(const OpenOptions& options, const std::vector<Tensor>& tensors,
                                             PythonServer* server, client::Rendezvous* store,
                                             const Interrupt& interrupt);
  const Interrupt& interrupt() const { return interrupt_; }

  int64_t version() const { return Use()->version(); }
  // Why the session has ended, and the error's reason, while it is not closed. An empty text: it has not.
  std::pair<std::string, std::string> ended() const;
  uint64_t attempt() const { return Use()->attempt(); }
  bool needs_values() const { return Use()->needs_values(); }
  bool lends_masters() const { return Use()->lends_masters(); }
  // Names of tensors with written values that no transaction has taken yet.
  std::vector<std::string> written() const;
  int64_t restored_version() const { return Use()->restored_version(); }
  std::vector<std::string> blobs() const { return Use()->resumed_blobs(); }
  // Compares local lengths, where known, with the session's. INVALID_ARGUMENT (BAD_LENGTH) names a tensor that differs.
  void CheckElements(absl::Span<const std::optional<uint64_t>> elements) const;

  // COLLECTIVE from here to Exchange, unless noted.
  void Initialise(absl::Span<const client::TensorMemory> memory, const client::Tensors::Source& source);
  Report Step(absl::Span<const client::TensorMemory> memory, const client::StepOptions& options,
              const client::Tensors::Ready& ready);
  // See client/tensors.h; no rank waits for another. `unit`: index into Units().
  bool pushes_gradients() const;
  std::vector<std::vector<size_t>> Units() const;
  // `elements`: the length of each gradient that is there. `owner`: see client/tensors.h.
  void PushEarly(size_t unit, absl::Span<const client::TensorMemory> gradients,
                 absl::Span<const std::optional<uint64_t>> elements, const std::shared_ptr<const void>& owner);
  // Where a tensor's local elements go.
  struct Place {
    std::byte* memory = nullptr;
    kernels::Dtype dtype = kernels::Dtype::kF32;
    uint64_t elements = 0;
    std::vector<uint64_t> shape;
  };
  // See client/tensors.h. Called by any rank. `places`: of the job's working dtype, else INVALID_ARGUMENT (BAD_DTYPE).
  // `whole`: they are of the tensors' shapes, for all elements; else for this rank's. Returns the pull's number. `kept`
  // lives until the pull was awaited, or the session ends.
  uint64_t StartPull(const std::vector<size_t>& which, absl::Span<const Place> places, bool whole,
                     std::shared_ptr<void> kept);
  // Blocks until the places hold the parameters. A number that no pull has any more returns at once.
  void AwaitPull(uint64_t pull);
  void Drop();
  void Pull(absl::Span<const client::TensorMemory> memory);
  // `values`: this rank's part.
  void Write(const std::string& tensor, absl::Span<const float> values);
  Report CommitValues();
  // `array`: master, moment1, moment2, moment3. For some tensors, the local elements of each.
  struct State {
    std::string tensor;
    absl::Span<const float> values;
    uint64_t steps = 0;
  };
  Report CommitState(const std::string& array, absl::Span<const State> states, const std::string& blob);
  void Register(const std::vector<Tensor>& tensors);
  Report Restore(const client::KeptVersion& kept);

  // Returns every rank's bytes, in rank order; at most 1 MiB per rank.
  std::vector<std::string> Exchange(const std::string& mine);

  // Called by any rank. `content`: working, master, moment1, moment2, moment3. ReadPart: this rank's part.
  void Read(const std::string& tensor, const std::string& content, absl::Span<float> to);
  void ReadPart(const std::string& tensor, const std::string& content, absl::Span<float> to);
  uint64_t TensorSteps(const std::string& tensor);
  // As Tensor::frozen, of the job.
  std::string FrozenAs(const std::string& tensor);
  void Pin();
  void Unpin(int64_t version);
  std::vector<client::KeptVersion> Pins();
  void CheckKept(const client::KeptVersion& wanted);
  // Ends the session; further calls throw.
  void Close();
  ~PythonSession();

 private:
  // The session, for one call; calls of all threads take turns. FAILED_PRECONDITION (BAD_REQUEST): closed.
  class Using {
   public:
    explicit Using(const PythonSession* of);
    client::Session* operator->() const { return session_; }

   private:
    std::unique_lock<std::mutex> lock_;
    client::Session* session_;
  };
  Using Use() const { return Using(this); }

  explicit PythonSession(const Interrupt& interrupt) : interrupt_(interrupt) {}
  void MakeTensors();
  // The place of a tensor in names_; BAD_LENGTH if the tensor has none, or not so many local elements.
  size_t Find(const std::string& tensor, uint64_t elements) const;

  const Interrupt interrupt_;

  const pid_t pid_ = getpid();
  mutable std::mutex mutex_;

  std::shared_ptr<services::StateServer> server_;  // outlives the session
  std::unique_ptr<client::Collective> collective_;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<client::Tensors> tensors_;
  // Pulls that were not awaited, by number.
  struct UnderWay {
    std::shared_ptr<void> kept;
    std::vector<client::PendingPull> pulls;  // end before `kept` does
  };
  std::map<uint64_t, UnderWay> under_way_;
  uint64_t pulls_started_ = 0;
  std::vector<std::string> names_;
};

// Begin and end of each dimension of the part of a tensor that the rank at `place` of the placement's ranks has.
std::vector<std::pair<uint64_t, uint64_t>> BoxOf(const Placement& placement, const std::vector<uint64_t>& shape,
                                                 uint64_t place);

// Bytes of a server's DRAM reserved for staging: state on its way to and from NVMe.
uint64_t StagingBytes(uint64_t dram);

// `servers`: 0 for an embedded server. Budgets of each server, in bytes; `profile`: from `ballastctl iotune`, empty for
// none. working_copies: as PythonServer's.
EstimateReport EstimateFor(const std::vector<Tensor>& tensors, const OpenOptions& options, uint64_t dram, uint64_t nvme,
                           int threads, uint32_t servers, const std::string& profile, bool working_copies);

}  // namespace ballast::python
