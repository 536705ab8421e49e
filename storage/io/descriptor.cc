#include "ballast/storage/io/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace ballast::storage {
namespace {

struct Registry {
  std::mutex mutex;  // held while the process forks
  std::set<int> open;
};

Registry& TheRegistry() {
  static Registry* const registry = [] {
    pthread_atfork([] { TheRegistry().mutex.lock(); }, [] { TheRegistry().mutex.unlock(); },
                   [] {
                     for (const int fd : TheRegistry().open) close(fd);
                     TheRegistry().open.clear();
                     TheRegistry().mutex.unlock();
                   });
    return new Registry;
  }();
  return *registry;
}

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd), owner_(getpid()) {
  if (fd < 0) return;
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.open.insert(fd);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
    owner_ = other.owner_;
  }
  return *this;
}

bool Descriptor::own() const { return owner_ == getpid(); }

void Descriptor::Release() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || !own()) return;
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.open.erase(fd);
}

void Descriptor::Close() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || !own()) return;
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.open.erase(fd);
  close(fd);
}

}  // namespace ballast::storage
