#include "ballast/storage/io/io_queue.h"

#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "ballast/storage/io/thread_queue.h"
#include "ballast/storage/io/uring_queue.h"

namespace ballast::storage {

const std::string& IoBackendProbe() {
  static const std::string* const probe = [] {
    const absl::Status uring = MakeUringQueue({}).status();
    return new std::string(uring.ok() ? "io_uring" : absl::StrCat("threads: ", std::string(uring.message())));
  }();
  return *probe;
}

absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(const IoQueueOptions& options) {
  if (options.backend == IoBackend::kUring) return MakeUringQueue(options.registered);
  if (options.backend == IoBackend::kAuto && IoBackendProbe() == "io_uring") {
    absl::StatusOr<std::unique_ptr<IoQueue>> queue = MakeUringQueue(options.registered);
    if (queue.ok()) return queue;
    // The probe got its ring, but this queue did not: a limit was reached since.
    spdlog::warn("I/O by threads: {}", std::string(queue.status().message()));
  }
  return std::unique_ptr<IoQueue>(std::make_unique<ThreadQueue>(options.threads));
}

}  // namespace ballast::storage
