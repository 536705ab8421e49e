// Classes behind the Python module: one rank's session with its tensors, and the store by which ranks find each other.
// Methods block, throw StatusError, and need the interpreter's lock only where noted. Threads: any; calls on one
// session take turns.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/collective/rendezvous.h"
#include "ballast/client/python/native/interrupt.h"
#include "ballast/client/python/native/options.h"
#include "ballast/client/python/native/server.h"
#include "ballast/client/session.h"
#include "ballast/client/tensors.h"

namespace ballast::python {

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

class PythonSession {
 public:
  // COLLECTIVE. `server`: null with OpenOptions::servers. `store`: used only by several ranks.
  static std::unique_ptr<PythonSession> Open(const OpenOptions& options, const std::vector<client::TensorSpec>& tensors,
                                             PythonServer* server, client::Rendezvous* store,
                                             const Interrupt& interrupt);
  ~PythonSession();
  // Ends the session; further calls throw. Call without the interpreter's lock.
  void Close();
  // From here on the interpreter owns the session, and holds its lock when it destroys it.
  void HandToPython() { pythons_ = true; }
  const Interrupt& interrupt() const { return interrupt_; }

  // The session with its tensors, for one call; calls of all threads take turns. FAILED_PRECONDITION (BAD_REQUEST):
  // closed.
  class Using {
   public:
    explicit Using(const PythonSession* of);
    client::Session* operator->() const { return of_->session_.get(); }
    client::Tensors& tensors() const { return *of_->tensors_; }
    client::Collective& collective() const { return *of_->collective_; }
    // The index of a tensor. BAD_LENGTH if the session does not know it, or it has not so many local elements.
    size_t Find(const std::string& tensor, uint64_t elements) const;

   private:
    std::unique_lock<std::mutex> lock_;
    const PythonSession* of_;
  };
  Using Use() const { return Using(this); }

  // Why the session has ended, and the error's reason, while it is not closed. An empty text: it has not.
  std::pair<std::string, std::string> ended() const;
  // Names of tensors with written values that no transaction has taken yet.
  std::vector<std::string> written() const;
  // Compares local lengths, where known, with the session's. INVALID_ARGUMENT (BAD_LENGTH) names a tensor that differs.
  void CheckElements(absl::Span<const std::optional<uint64_t>> elements) const;

  // See client/tensors.h; no rank waits for another. `elements`: the length of each gradient that is there.
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
  // `whole`: each place holds the whole tensor, in its shape; otherwise this rank's elements. Returns the pull's
  // number. `kept` lives until the pull was awaited, or the session ends.
  uint64_t StartPull(const std::vector<size_t>& which, absl::Span<const Place> places, bool whole,
                     std::shared_ptr<void> kept);
  // Bytes of a pull of this rank's part of a tensor. A place of blocks (kE4m3Blocks) has as many bytes as elements.
  uint64_t PullBytes(size_t tensor);
  // Blocks until the places hold the parameters. Returns at once if this pull was awaited already.
  void AwaitPull(uint64_t pull);
  // COLLECTIVE. Session::Register, and further tensors for all calls.
  void Register(const std::vector<client::TensorSpec>& tensors);

 private:
  explicit PythonSession(const Interrupt& interrupt) : interrupt_(interrupt) {}
  void MakeTensors(const std::vector<std::string>& names);
  // PushEarly, up to the wait for room.
  client::Waiter StartPush(size_t unit, absl::Span<const client::TensorMemory> gradients,
                           absl::Span<const std::optional<uint64_t>> elements,
                           const std::shared_ptr<const void>& owner);

  const Interrupt interrupt_;

  const pid_t pid_ = getpid();
  bool pythons_ = false;
  mutable std::mutex mutex_;

  std::shared_ptr<services::StateServer> server_;  // outlives the session
  std::unique_ptr<client::Collective> collective_;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<client::Tensors> tensors_;
  absl::flat_hash_map<std::string, size_t> index_;  // of each of the tensors
  // Pulls that were not awaited, by number.
  struct UnderWay {
    std::shared_ptr<void> kept;
    std::vector<client::PendingPull> pulls;  // end before `kept` does
  };
  std::map<uint64_t, UnderWay> under_way_;
  uint64_t pulls_started_ = 0;
};

}  // namespace ballast::python
