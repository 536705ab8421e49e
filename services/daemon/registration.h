// A server's entry in the registry, from start to end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/services/daemon/marked_directory.h"
#include "ballast/services/daemon/marker.h"

namespace ballast::services {

// Keeps an entry in the registry by a thread of its own. While the registry does not answer, the server goes on and the
// thread tries again; the log has a warning at the first failure and an info after the first success. The entry of
// another run stays, unless the other was a run of this data directory at this address, and so is over. A copy of the
// directory that etcd's mark shows to be older is not registered (marked_directory.h). Threads: any.
class Registration {
 public:
  // Fills in what changes by itself, and returns a number that is another one once the server has something new that an
  // older copy of its directory would lack.
  using Fill = std::function<uint64_t(v1::ServerEntry*)>;
  struct Times {
    // After so long without a beat etcd removes the entry. There is a beat each third of it.
    absl::Duration lease = absl::Seconds(10);
    // Between two marks of the directory. Each is a revision of etcd, which keeps revisions until it compacts them.
    absl::Duration mark = absl::Minutes(5);
  };
  // `directory`: the server's data directory, which gets marks.
  Registration(const registry::RegistryUrl& url, const std::string& directory, const Times& times);
  // RESOURCE_EXHAUSTED (LIMIT) if the system made no thread: then nothing is registered.
  const absl::Status& made() const { return made_; }
  // Marks the directory, for two seconds at most, and removes the entry, if the registry answers within a second. A
  // disk that hangs is waited for.
  ~Registration();

  // Registers `entry` (with a disk), or changes the entry, soon. `fill` is called on the thread at every beat and at
  // the end, with the entry; it may be empty.
  void Announce(v1::ServerEntry entry, Fill fill);
  // Blocks until this server has its name in the registry, or the registry does not answer. ALREADY_EXISTS
  // (BAD_CONFIG), with both servers, if the name is that of another living server: its entry outlasts a lease.
  // FAILED_PRECONDITION (BAD_CONFIG) for an older copy of the data directory, also if the registry tells so only after
  // an earlier AwaitName returned. Also returns errors of `interrupt` (may be empty), which is asked meanwhile.
  // REQUIRES: Announce.
  absl::Status AwaitName(const std::function<absl::Status()>& interrupt);

 private:
  void Run();
  absl::Status Beat(const v1::ServerEntry& entry, uint64_t changes);
  // Renews the lease, or takes a new one.
  absl::Status KeepLease();
  // If the entry's revision is `revision` (0: there is none).
  absl::Status WriteEntry(const v1::ServerEntry& entry, int64_t revision);
  // FAILED_PRECONDITION: etcd's mark shows an older copy, and there is no entry of it now. OK if etcd or the file does
  // not tell, unless the entry is to be written and etcd does not answer.
  absl::Status CheckCopy(const v1::ServerEntry& entry, bool written);
  // The entry under this name is another run's.
  absl::Status Held(const v1::ServerEntry& entry, const registry::Registry::Found<v1::ServerEntry>& holder);
  void Tell(const absl::Status& now);
  void Settle(const absl::Status& beaten);

  registry::Registry registry_;
  const absl::Duration lease_time_;
  MarkedDirectory marked_;
  Marker marker_;
  // The thread alone uses these.
  int64_t lease_ = 0;          // 0: none
  int64_t written_lease_ = 0;  // the lease of `written_`, which may have ended since; 0: nothing was written
  v1::ServerEntry written_;
  bool checked_ = false;     // this is the newest copy
  bool told_doubt_ = false;  // the log has that it may not be
  int64_t holder_ = 0;       // the lease of another run under this name, seen since `held_since_`; 0: none
  std::chrono::steady_clock::time_point held_since_;
  std::optional<absl::StatusCode> told_;
  // std's, whose waits go by the steady clock: absl's beat would come late by as much as the machine's clock is set
  // back.
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  v1::ServerEntry entry_;
  Fill fill_;
  bool wanted_ = false;
  bool stopping_ = false;
  bool held_ = false;                  // by another run, which may be over
  bool got_name_ = false;              // by a beat that succeeded
  std::optional<absl::Status> named_;  // what AwaitName waits for
  std::thread thread_;
  absl::Status made_;
};

}  // namespace ballast::services
