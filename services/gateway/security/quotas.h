// Quotas: an identity's jobs may hold so many bytes in each tier of this server, and be so many.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/gateway/security/policy.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// All that a job takes of each tier, as the ledger counts it: state, working copies, slices, staging, log, kept
// versions and reserves.
TierUse HeldBytes(const v1::JobStatus& job);
// The bytes that an Open would take, as its dry run answered: as much more as HeldBytes shows afterwards.
TierUse AskedBytes(const v1::OpenResponse& dry_run);

// Lowers what a dry run tells as free to what the quota leaves beside `jobs`, the server's.
void LimitFree(const Quota& quota, const std::vector<v1::JobStatus>& jobs,
               const std::function<bool(absl::string_view job)>& mine, v1::OpenResponse* dry_run);

// The server's jobs, and the time on the clock of Quotas before anybody looked at them.
struct JobsAsOf {
  uint64_t time = 0;
  std::vector<v1::JobStatus> jobs;
};

// Counts Opens and growth under way, so that two at a time do not both take what is left. Threads: any.
class Quotas {
 public:
  // An Open under way, or growth, counts until its lease ends.
  using Lease = std::shared_ptr<void>;
  // Does the job count as the identity's?
  using IsMine = std::function<bool(absl::string_view job)>;

  // A clock that goes on whenever a lease ends: then the jobs hold more than they did.
  uint64_t Now() const ABSL_LOCKS_EXCLUDED(mu_);

  // May `identity` fence or open `job`, or may it grow, which takes `asked` more than the job has? `seen` and `asked`
  // are as of one time. RESOURCE_EXHAUSTED (QUOTA), with the numbers asked and held, the parts of the latter, and the
  // quota. ABORTED: an Open has ended since; look again. The job of that Open would be overlooked, or what it took
  // would count twice.
  absl::StatusOr<Lease> Ask(const std::string& identity, const Quota& quota, const std::string& job,
                            const TierUse& asked, const JobsAsOf& seen, const IsMine& mine) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Opening {
    TierUse bytes = {};  // of the job, once it is open
    int leases = 0;
  };
  // Adds what Opens and growth of the identity's other jobs will have taken.
  void AddOthersUnderWay(const std::string& job, const IsMine& mine, std::map<std::string, TierUse>* held) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Counts `job`, which holds `held`, as having `asked` more until the lease ends.
  Lease Begin(const std::string& job, const TierUse& held, const TierUse& asked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(const std::string& job) ABSL_LOCKS_EXCLUDED(mu_);

  mutable absl::Mutex mu_;
  std::map<std::string, Opening> openings_ ABSL_GUARDED_BY(mu_);  // by job
  uint64_t now_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ballast::services
