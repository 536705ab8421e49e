// Servers' entries and jobs' keys in etcd, and the few calls to etcd for them.
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
class Registry {
 public:
  // A value, the revision of etcd that wrote it, and its lease (0: none).
  template <typename Value>
  struct Found {
    Value value;
    int64_t revision = 0;
    int64_t lease = 0;
  };
  enum class OnUnreadable { kRefuse, kPassOver };

  explicit Registry(RegistryUrl url);
  ~Registry();

  // All entries, by server id. If a value is not an entry of its key's server, List skips it, or refuses it with
  // INVALID_ARGUMENT (BAD_CONFIG) and names the key.
  absl::StatusOr<std::vector<v1::ServerEntry>> List(absl::Time deadline,
                                                    OnUnreadable on_unreadable = OnUnreadable::kRefuse);

  // Makes a lease of at least `ttl`. KeepAlive restarts its time; NOT_FOUND if the lease and its entries have ended.
  absl::StatusOr<int64_t> Grant(absl::Duration ttl, absl::Time deadline);
  absl::Status KeepAlive(int64_t lease, absl::Time deadline);
  absl::Status Revoke(int64_t lease, absl::Time deadline);

  // The entry under a server's id. Of an unreadable entry only lease and revision are set.
  absl::StatusOr<std::optional<Found<v1::ServerEntry>>> Find(const std::string& server_id, absl::Time deadline);
  // Writes an entry that ends with the lease, and replaces the entry found at `revision` (0: there was none). False if
  // somebody else changed the entry meanwhile, or if an earlier try wrote it and its answer was lost. Find tells which,
  // also after an error.
  absl::StatusOr<bool> Put(const v1::ServerEntry& entry, int64_t lease, int64_t revision, absl::Time deadline);

  // A job's key. INVALID_ARGUMENT (BAD_CONFIG), naming the key, if its value cannot be read; FAILED_PRECONDITION
  // (LATER_VERSION) if a later version wrote more into it than this one knows.
  absl::StatusOr<std::optional<Found<v1::JobKey>>> FindJob(const std::string& job, absl::Time deadline);
  // Like Put, but the key stays until EraseJob.
  absl::StatusOr<bool> PutJob(const std::string& job, const v1::JobKey& key, int64_t revision, absl::Time deadline);
  // True: the key is gone, perhaps by an earlier try whose answer was lost. False: it has changed since `revision`.
  absl::StatusOr<bool> EraseJob(const std::string& job, int64_t revision, absl::Time deadline);
  // For messages: the key's whole name.
  std::string JobKeyName(const std::string& job) const;

  // What an operator wants of the job's servers. Errors as FindJob's.
  absl::StatusOr<std::optional<Found<v1::Wish>>> FindWish(const std::string& job, absl::Time deadline);
  absl::StatusOr<bool> PutWish(const std::string& job, const v1::Wish& wish, int64_t revision, absl::Time deadline);
  absl::StatusOr<bool> EraseWish(const std::string& job, int64_t revision, absl::Time deadline);
  std::string WishKeyName(const std::string& job) const;

  const RegistryUrl& url() const { return url_; }

 private:
  struct Cluster;
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(const char* method, const Request& request, absl::Time deadline);
  absl::StatusOr<std::shared_ptr<Cluster>> Reach();
  absl::Status OfJob(const std::string& job, const absl::Status& status) const;
  template <typename Value>
  absl::StatusOr<std::optional<Found<Value>>> FindOf(const std::string& job, const std::string& key,
                                                     absl::Time deadline);
  absl::StatusOr<bool> PutOf(const std::string& job, const std::string& key, const google::protobuf::Message& value,
                             int64_t revision, absl::Time deadline);
  absl::StatusOr<bool> EraseOf(const std::string& job, const std::string& key, int64_t revision, absl::Time deadline);
  absl::StatusOr<std::optional<v1::EtcdKeyValue>> Read(const std::string& key, absl::Time deadline);
  // Does `operation` if `key` is still as it was at `revision`.
  absl::StatusOr<bool> Swap(const std::string& key, int64_t revision, const v1::EtcdTxnRequest::Operation& operation,
                            absl::Time deadline);
  std::string KeyOf(const std::string& server_id) const;

  const RegistryUrl url_;
  absl::Mutex mutex_;
  std::shared_ptr<Cluster> cluster_ ABSL_GUARDED_BY(mutex_);  // null: not reached for yet
  std::string stamp_ ABSL_GUARDED_BY(mutex_);                 // of the files behind it
  std::atomic<size_t> answers_{0};                            // index of the member that answered last
};

}  // namespace ballast::registry
