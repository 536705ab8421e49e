// Libraries that write to sockets as to files: a write to a lost peer raises SIGPIPE, which would end the process.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <ctime>

namespace ballast::model {

// Blocks the signal in the calling thread and, by inheritance, in threads started meanwhile; takes off a pending signal
// before the mask is restored.
class BrokenPipeBlock {
 public:
  BrokenPipeBlock() {
    sigemptyset(&broken_pipe_);
    sigaddset(&broken_pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken_pipe_, &before_);
  }
  ~BrokenPipeBlock() {
    if (sigismember(&before_, SIGPIPE) != 0) return;
    const timespec at_once = {};
    while (sigtimedwait(&broken_pipe_, nullptr, &at_once) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BrokenPipeBlock(const BrokenPipeBlock&) = delete;
  BrokenPipeBlock& operator=(const BrokenPipeBlock&) = delete;

 private:
  sigset_t broken_pipe_;
  sigset_t before_;
};

}  // namespace ballast::model
