// What a Ctrl-C does while a call waits for servers.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>

namespace ballast::python {

// Notices Ctrl-C while a call waits for servers. Copies share the state of one session. Threads: any; but Python shows
// signals only to the main thread. If a call runs on another thread, the main thread waits for that thread, and calls
// EndWait() when a Ctrl-C interrupts the wait.
class Interrupt {
 public:
  // For calls to a server in this process, which end by themselves. Ending the session would lose the state of a job
  // without a disk. So after the first Ctrl-C the call runs on to its end, and Ballast prints a message. A Ctrl-C after
  // this message ends the session.
  Interrupt OfOwnServer() const {
    Interrupt own = *this;
    own.own_server_ = true;
    return own;
  }
  // Runs `call` on a thread of its own, and returns its result or throws its exception. If a signal handler raises an
  // exception on this thread (the main thread), Watch gives the call two seconds to end. Then it ends the call's wait
  // and the session (OfOwnServer() changes this). Either way Watch throws the handler's exception. Call it without the
  // interpreter's lock.
  template <typename Call>
  auto Watch(const Call& call) const;
  // Ends the call's wait and the session.
  void Raise() const { raised_->store(true); }
  // Called when a Ctrl-C interrupts the wait for a call that runs on another thread. If the call goes to the server in
  // this process, the first Ctrl-C prints a message and the call goes on; the second ends it.
  void EndWait() const {
    if (!own_server_ || asked_->exchange(true)) return Raise();
    SayThatItWaits();
  }
  std::function<bool()> raised() const {
    return [raised = raised_] { return raised->load(); };
  }

 private:
  static void SayThatItWaits() {
    std::fputs(
        "ballast: Ctrl-C came amid a call to the server in this process; the call ends first. A second Ctrl-C ends the "
        "session\n",
        stderr);
  }

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
    // Each call counts its Ctrl-Cs anew.
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

}  // namespace ballast::python
