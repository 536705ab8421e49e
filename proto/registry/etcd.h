// The few calls to etcd: keys are read, listed and swapped, and leases kept.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
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

// Threads: any. Calls block at most until their deadline. They try the members of etcd in turn, first the one that
// answered last; each gets an equal share of the time that is left. The first call reads the files in the URL; later
// calls read them again when they change. Errors: UNAVAILABLE (SERVER_DOWN), naming the URL, if no member answers;
// INVALID_ARGUMENT (BAD_CONFIG), naming the file, if a file is bad; INTERNAL (BAD_REQUEST) with etcd's text if etcd
// refuses.
class Etcd {
 public:
  explicit Etcd(RegistryUrl url);
  ~Etcd();

  absl::StatusOr<std::optional<v1::EtcdKeyValue>> Read(const std::string& key, absl::Time deadline);
  // The keys that begin with `folder`, which ends with '/', in their order. INVALID_ARGUMENT (BAD_CONFIG) if there are
  // more than `count_max`.
  absl::StatusOr<std::vector<v1::EtcdKeyValue>> List(const std::string& folder, int64_t count_max, absl::Time deadline);
  // Does `operation` if `key` is still as it was at `revision` (0: absent), and else says false.
  absl::StatusOr<bool> Swap(const std::string& key, int64_t revision, const v1::EtcdTxnRequest::Operation& operation,
                            absl::Time deadline);

  // Makes a lease of at least `ttl`. KeepAlive restarts its time; NOT_FOUND if the lease and its keys have ended.
  absl::StatusOr<int64_t> Grant(absl::Duration ttl, absl::Time deadline);
  absl::Status KeepAlive(int64_t lease, absl::Time deadline);
  absl::Status Revoke(int64_t lease, absl::Time deadline);

  const RegistryUrl& url() const { return url_; }

 private:
  struct Cluster;
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(const char* method, const Request& request, absl::Time deadline);
  absl::StatusOr<std::shared_ptr<Cluster>> Reach();

  const RegistryUrl url_;
  absl::Mutex mutex_;
  std::shared_ptr<Cluster> cluster_ ABSL_GUARDED_BY(mutex_);  // null: not reached for yet
  std::string stamp_ ABSL_GUARDED_BY(mutex_);                 // of the files behind it
  std::atomic<size_t> answers_{0};                            // index of the member that answered last
};

}  // namespace ballast::registry
