// Servers' entries and marks, jobs' keys and operators' wishes in etcd.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/proto/registry/etcd.h"
#include "ballast/proto/registry/registry_url.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::registry {

// Threads, deadlines and errors are those of Etcd, but for what a method adds.
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

  // All entries, by server id. If a value is not an entry of its key's server, List skips it, or refuses it with
  // INVALID_ARGUMENT (BAD_CONFIG) and names the key.
  absl::StatusOr<std::vector<v1::ServerEntry>> List(absl::Time deadline,
                                                    OnUnreadable on_unreadable = OnUnreadable::kRefuse);

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

  // The newest mark of a data directory of server `server_id`. INVALID_ARGUMENT (BAD_CONFIG), naming the key, if its
  // value cannot be read; FAILED_PRECONDITION (LATER_VERSION) as FindJob.
  absl::StatusOr<std::optional<Found<v1::DirectoryMark>>> FindMark(const std::string& server_id, uint64_t disk,
                                                                   absl::Time deadline);
  // The marks of all data directories that ever served as `server_id`.
  absl::StatusOr<std::vector<Found<v1::DirectoryMark>>> ListMarks(const std::string& server_id, absl::Time deadline);
  // Like Put, but the key stays.
  absl::StatusOr<bool> PutMark(const std::string& server_id, const v1::DirectoryMark& mark, int64_t revision,
                               absl::Time deadline);
  std::string MarkKeyName(const std::string& server_id, uint64_t disk) const;

  Etcd& etcd() { return etcd_; }  // for leases
  const RegistryUrl& url() const { return etcd_.url(); }

 private:
  absl::Status OfJob(const std::string& job, const absl::Status& status) const;
  template <typename Value>
  absl::StatusOr<std::optional<Found<Value>>> FindOf(const std::string& job, const std::string& key,
                                                     absl::Time deadline);
  absl::StatusOr<bool> PutOf(const std::string& job, const std::string& key, const google::protobuf::Message& value,
                             int64_t revision, absl::Time deadline);
  absl::StatusOr<bool> EraseOf(const std::string& job, const std::string& key, int64_t revision, absl::Time deadline);
  std::string KeyOf(const std::string& server_id) const;
  std::string MarksOf(const std::string& server_id) const;

  Etcd etcd_;
};

}  // namespace ballast::registry
