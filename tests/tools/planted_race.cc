// A race that ThreadSanitizer must report, and the same work under a lock, which it must not: a sanitizer run that
// reports nothing is worth something only if both hold.
#include <cstdio>
#include <cstring>
#include <thread>

#include "absl/synchronization/mutex.h"

namespace {

int counter = 0;
absl::Mutex mutex;

void AddUnlocked() { ++counter; }

void AddLocked() {
  absl::MutexLock lock(&mutex);
  ++counter;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || (std::strcmp(argv[1], "race") != 0 && std::strcmp(argv[1], "lock") != 0)) {
    std::fprintf(stderr, "usage: %s race|lock\n", argv[0]);
    return 2;
  }
  const auto add = std::strcmp(argv[1], "race") == 0 ? AddUnlocked : AddLocked;
  std::thread other(add);
  add();
  other.join();
  std::printf("counted to %d\n", counter);
  return 0;
}
