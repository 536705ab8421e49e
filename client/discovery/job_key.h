// A job's key in a registry of servers: the servers of the job, and the epoch of the last fence, written before the
// fence is sent.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/v1/registry.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// Only rank 0 uses it. Without a registry there is no key, and calls do nothing.
class JobKey {
 public:
  // Borrows `registry`, which may be null.
  JobKey(registry::Registry* registry, std::string job) : registry_(registry), job_(std::move(job)) {}

  // Errors: the registry's.
  absl::Status Read(absl::Time deadline);
  // Whether jobs have keys here: there is a registry.
  bool is_kept() const { return registry_ != nullptr; }
  // The operator's wish; empty if there is none, or if it was for an earlier job of this name. Errors: the registry's.
  absl::StatusOr<v1::Wish> ReadWish(absl::Time deadline) const;
  // Whether there is a key: Read found it, or Claim made it.
  bool exists() const { return revision_ != 0; }
  const v1::JobKey& value() const { return value_; }
  // FAILED_PRECONDITION (OTHER_SERVER) if a server has a member's name but another data directory.
  absl::Status CheckServers(const std::vector<v1::Member>& servers) const;

  // Whether the key names this server: id and directory.
  bool Has(absl::string_view server_id, uint64_t disk) const;
  // `there`: which members are, by index. `lost`: under whose name another data directory answers. UNAVAILABLE
  // (SERVER_DOWN) unless each chunk is on a member that is there, as far as the table says; names the members whose
  // start helps, or says that none does.
  absl::Status CheckEnough(const std::vector<bool>& there, const std::vector<bool>& lost) const;
  // A member that is not `there` and that is registered as one that recovers its jobs; empty: none.
  std::string WhoRecovers(const std::vector<bool>& there, absl::Time deadline) const;
  // Writes the table of the group that has claimed `epoch`, before it opens the job with it. STALE_EPOCH: another group
  // has claimed the job since. After any other error the key has the old table or the new.
  absl::Status WriteTable(const v1::Table& table, const v1::Epoch& epoch, absl::Time deadline);
  // Whether the key says which server has which chunk (shards): then the job's Opens go by it.
  bool has_places() const { return !value_.table().shards().empty(); }
  // Of a job with places: FAILED_PRECONDITION (KEY_LOST) if some server promised an epoch that nobody claimed, or
  // opened the claimed epoch by another table. Then etcd has an older state than the job.
  absl::Status CheckClaimed(absl::Span<const v1::GetJobResponse> answers, absl::Time deadline);

  // Call before a fence with epoch `least` or higher. Writes an epoch above the claimed one into the key, and returns
  // it. A new key gets `table`, whose members are members since that epoch; an old one keeps its own.
  // FAILED_PRECONDITION (OTHER_SERVER), with both lists, if the key names other servers than `table` by now. Otherwise
  // the registry's errors.
  // `own`: of a group at work, which claims over its own claim alone, and by the key's table: else STALE_EPOCH.
  absl::StatusOr<v1::Epoch> Claim(const v1::Table& table, const v1::Epoch& least, absl::Time deadline,
                                  const v1::Epoch* own = nullptr);

 private:
  std::vector<v1::Member> Members(const std::vector<uint32_t>& indices) const;
  absl::Status CheckSame(const v1::Table& table) const;
  absl::Status CheckNewest(absl::Span<const v1::GetJobResponse> answers) const;
  absl::Status CheckOwn(const v1::Epoch& own, const v1::Table& table) const;
  v1::JobKey ClaimedBy(const v1::Epoch& epoch, const v1::Table& table) const;

  registry::Registry* const registry_;
  const std::string job_;
  v1::JobKey value_;
  int64_t revision_ = 0;  // 0: no key
};

}  // namespace ballast::client
