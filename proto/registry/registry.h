// Servers' entries in etcd, and the few calls to etcd for them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/proto/registry/registry_url.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::registry {

// Threads: any. Calls block until their deadline at most, and try each member of etcd in turn, from the one on that
// answered last; each has an equal share of the time that is left. Files of the URL are read at the first call, and
// again when they change. Errors: UNAVAILABLE (SERVER_DOWN), naming the URL, if no member answers; INVALID_ARGUMENT
// (BAD_CONFIG), naming the file, if a file is bad; INTERNAL (BAD_REQUEST) with etcd's text if etcd refuses.
class Registry {
 public:
  enum class OnUnreadable { kRefuse, kPassOver };

  explicit Registry(RegistryUrl url);
  ~Registry();

  // All entries, by server id. A value that is no entry of its key's server is passed over, or refused with
  // INVALID_ARGUMENT (BAD_CONFIG), naming the key.
  absl::StatusOr<std::vector<v1::ServerEntry>> List(absl::Time deadline,
                                                    OnUnreadable on_unreadable = OnUnreadable::kRefuse);

  // A lease of at least `ttl`. KeepAlive starts its time anew; NOT_FOUND: the lease has ended, and its entries with it.
  absl::StatusOr<int64_t> Grant(absl::Duration ttl, absl::Time deadline);
  absl::Status KeepAlive(int64_t lease, absl::Time deadline);
  absl::Status Revoke(int64_t lease, absl::Time deadline);

  // Writes an entry, in place of an earlier one of this server id; the entry goes with the lease.
  absl::Status Put(const v1::ServerEntry& entry, int64_t lease, absl::Time deadline);
  // The lease of a server's entry; absent without an entry.
  absl::StatusOr<std::optional<int64_t>> LeaseOf(const std::string& server_id, absl::Time deadline);

  const RegistryUrl& url() const { return url_; }

 private:
  struct Cluster;
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(const char* method, const Request& request, absl::Time deadline);
  absl::StatusOr<std::shared_ptr<Cluster>> Reach();
  std::string KeyOf(const std::string& server_id) const;

  const RegistryUrl url_;
  absl::Mutex mutex_;
  std::shared_ptr<Cluster> cluster_ ABSL_GUARDED_BY(mutex_);  // null: not reached for yet
  std::string stamp_ ABSL_GUARDED_BY(mutex_);                 // of the files behind it
  std::atomic<size_t> answers_{0};                            // index of the member that answered last
};

// Entries of servers that are registered at `url`, by id, as soon as there are `url.servers`. Asks again until
// `timeout`, or until `interrupted` (which may be empty) says so; then UNAVAILABLE (SERVER_DOWN), naming those found,
// or the error of List; CANCELLED if interrupted.
absl::StatusOr<std::vector<v1::ServerEntry>> AwaitServers(Registry* registry, absl::Duration timeout,
                                                          const std::function<bool()>& interrupted);

// Addresses for a list that a user gave: the list itself, or what is registered at its URL.
absl::StatusOr<std::vector<std::string>> FindServers(const std::vector<std::string>& servers, absl::Duration timeout);

}  // namespace ballast::registry
