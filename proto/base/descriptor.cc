#include "ballast/proto/base/descriptor.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace ballast::model {
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

Descriptor Descriptor::Foreign(int fd) {
  Descriptor out;
  out.fd_ = fd;
  out.owner_ = getpid();
  out.kind_ = Kind::kForeign;
  return out;
}

Descriptor Descriptor::Socket(int fd) {
  Descriptor out(fd);
  out.kind_ = Kind::kSocket;
  return out;
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
    owner_ = other.owner_;
    kind_ = other.kind_;
  }
  return *this;
}

bool Descriptor::own() const { return owner_ == getpid(); }

void Descriptor::Release() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || !own() || kind_ == Kind::kForeign) return;
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.open.erase(fd);
}

void Descriptor::Close() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || !own()) return;
  if (kind_ == Kind::kSocket) shutdown(fd, SHUT_RDWR);
  Registry& registry = TheRegistry();
  if (kind_ == Kind::kOwn) {
    const std::lock_guard lock(registry.mutex);
    registry.open.erase(fd);
    close(fd);
    return;
  }
  if (kind_ == Kind::kSocket) {
    const std::lock_guard lock(registry.mutex);
    registry.open.erase(fd);
  }
  close(fd);
}

}  // namespace ballast::model
