// Gives the memory that large messages leave in malloc's arenas back to the system. A trim takes milliseconds, and
// gRPC's few threads carry the calls of all jobs, so another thread trims for them.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Threads: any.
class Trimmer {
 public:
  // `wake`: has Run called soon, on a thread that may take its time.
  explicit Trimmer(std::function<void()> wake) : wake_(std::move(wake)) {}
  ~Trimmer() { Stop(); }

  // Runs `done` (may be empty) once what was freed until now has been given back. Several who ask share a trim.
  void Trim(std::function<void()> done) ABSL_LOCKS_EXCLUDED(mu_);
  // Trims if somebody has asked.
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // The server ends, and Run is called no more: whoever has asked, or asks, is told at once.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  using Asked = std::vector<std::function<void()>>;
  static void Tell(const Asked& asked);

  const std::function<void()> wake_;
  absl::Mutex mu_;
  Asked asked_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast::services
