// Raises a data directory's mark beside the beats of the server's entry: a sync of a busy disk may take longer than a
// lease.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/services/daemon/marked_directory.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::services {

// Threads: any.
class Marker {
 public:
  enum class When {
    kNow,        // and again until the mark is raised
    kIfDue,      // if something changed since the last mark, and that is `every` ago
    kIfChanged,  // if something changed since the last mark
  };
  // Borrows `directory`.
  Marker(MarkedDirectory* directory, absl::Duration every);
  // Waits for the mark that is being raised: for the disk at worst.
  ~Marker();
  // RESOURCE_EXHAUSTED (LIMIT) if the system made no thread: then no mark is raised.
  const absl::Status& made() const { return made_; }

  // Has the thread raise the mark of a server that is registered as `entry`. `changes` is another number whenever there
  // is something that a copy from before would lose. Waits for nothing. The log has a warning at the first failure.
  void Ask(const v1::ServerEntry& entry, uint64_t changes, When when);
  // Waits until the thread is idle, for `patience` at most.
  void Await(absl::Duration patience);
  // Whether etcd's mark showed since the last call that another copy served last.
  bool TakeOlder();

 private:
  struct Wanted {
    v1::ServerEntry entry;
    uint64_t changes = 0;
  };
  void Run();
  // The log has a failure and the next success once each.
  void Tell(const v1::ServerEntry& entry, const absl::Status& raised);

  MarkedDirectory* const directory_;
  const std::chrono::milliseconds every_;
  bool failed_ = false;  // the thread alone uses it
  // std's, as Registration's.
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::optional<Wanted> wanted_;
  bool busy_ = false;
  bool stopping_ = false;
  bool older_ = false;
  bool owed_ = true;  // a mark that is wanted whatever changed
  uint64_t marked_changes_ = 0;
  std::chrono::steady_clock::time_point marked_at_;
  std::thread thread_;
  absl::Status made_;
};

}  // namespace ballast::services
