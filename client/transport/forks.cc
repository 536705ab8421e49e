#include "ballast/client/transport/forks.h"

#include <pthread.h>

#include <atomic>

namespace ballast::client {
namespace {

std::atomic<uint64_t> fork_count{0};

}  // namespace

uint64_t ForkCount() {
  static const int registered = pthread_atfork(
      nullptr, nullptr, +[] { fork_count.fetch_add(1); });
  (void)registered;
  return fork_count.load();
}

}  // namespace ballast::client
