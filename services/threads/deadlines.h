// A thread that runs callbacks when their times have come.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

// Threads: any. Callbacks run in turn on a single thread, no lock held, and must be short.
class Deadlines {
 public:
  Deadlines();
  // RESOURCE_EXHAUSTED (LIMIT) if there is no thread: then nothing ever runs.
  const absl::Status& made() const { return made_; }
  ~Deadlines();  // pending callbacks never run

  uint64_t Add(absl::Time when, std::function<void()> callback);
  // From its return on the callback does not start; a started callback may still be running.
  void Cancel(uint64_t id);

 private:
  using Key = std::pair<absl::Time, uint64_t>;
  void Loop();

  absl::Mutex mu_;
  std::map<Key, std::function<void()>> due_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, absl::Time> times_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::CondVar changed_;
  std::thread thread_;
  absl::Status made_;
};

}  // namespace ballast::services
