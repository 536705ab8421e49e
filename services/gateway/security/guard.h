// Decides for each call: whose identity makes it, and does the server grant it the right? Reads the files behind the
// decision anew when they change: certificates, tokens and rights.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/gateway/security/audit.h"
#include "ballast/services/gateway/security/certificates.h"
#include "ballast/services/gateway/security/counters.h"
#include "ballast/services/gateway/security/policy.h"
#include "ballast/services/gateway/security/quotas.h"
#include "ballast/services/gateway/security/served_certificates.h"

namespace ballast::services {

struct GuardOptions {
  CertificatePaths tls;
  absl::Duration connection_age = absl::Hours(1);  // a TLS connection ends then, and its client connects anew
  std::string tokens;                              // path; empty: no tokens
  std::string rights;                              // path; empty: whoever gets in may do everything
  std::string audit_log;  // a path, stderr or none; empty: stderr where identities are asked for, else none

  // Callers must show who they are.
  bool asks_identity() const { return !tls.client_ca.empty() || !tokens.empty(); }
  // Reload has something to read.
  bool has_files() const;
};

// The identity that a connection and a call show, before it is believed.
struct CallerShown {
  std::string peer;        // as gRPC spells it
  bool encrypted = false;  // by TLS
  // The SPIFFE ID of the client's verified certificate, else its first subject alternative name. Empty: none of either.
  std::string certificate_name;
  bool has_certificate = false;
  // The metadata `authorization`, once for each time that it was sent.
  std::vector<std::string> authorization;
};
// Whether bytes to and from `peer` stay on this machine.
bool IsLocalPeer(absl::string_view peer);

// An identity and its rights, as they were when its call came.
class Identity {
 public:
  Identity() = default;  // nobody in particular, who may do everything: no identity was asked for
  Identity(std::string name, std::shared_ptr<const Rights> rights)
      : name_(std::move(name)), rights_(std::move(rights)) {}
  const std::string& name() const { return name_; }
  bool MayAny(RightSet rights, absl::string_view job) const {
    return rights_ == nullptr || rights_->MayAny(name_, rights, job);
  }
  // For whatever job.
  bool MayAnywhere(RightSet rights) const { return rights_ == nullptr || rights_->MayAnywhere(name_, rights); }
  // Whether its answers may tell of `job`.
  bool Sees(absl::string_view job) const { return MayAny(static_cast<RightSet>(Right::kStatus), job); }
  const Rights* rights() const { return rights_.get(); }

 private:
  std::string name_;
  std::shared_ptr<const Rights> rights_;  // null: everything
};

struct AskedCall {
  Call call;
  std::string job;        // empty for calls of the whole server
  bool durable = false;   // of Pin and Unpin
  bool of_group = false;  // of Pin and Unpin for reading: the trainers' own, which has no lease
};

// Threads: any. Outlives the servers that ask it.
class Guard {
 public:
  // Reads all files. INVALID_ARGUMENT (BAD_CONFIG) if one is missing or bad, or if options do not fit together.
  static absl::StatusOr<std::unique_ptr<Guard>> Make(GuardOptions options);
  ~Guard();

  // From now on files that change are read again: once a second the guard looks.
  absl::Status Watch();
  // Reads all files again, and opens the audit log anew. A bad file is logged and counted, and its old content holds.
  // Blocks.
  void Reload();

  // Whether a connection may be made by a client with this certificate, as CheckClient says; a token may stand for
  // none. Refusals are counted and audited. `peer`: in gRPC's spelling; empty: unknown. REQUIRES: tls.client_ca.
  absl::Status MeetClient(absl::string_view certificate, absl::string_view chain, const std::string& peer = "");
  // A client came without TLS, and its connection ends: counted and audited. `peer`: as gRPC spells it.
  void RefusePlain(const std::string& peer);
  // The caller's identity, if it may make the call. Else UNAUTHENTICATED (NO_IDENTITY) or PERMISSION_DENIED
  // (NO_RIGHT), counted and audited.
  absl::StatusOr<Identity> Admit(const CallerShown& shown, const AskedCall& asked);
  // The two halves of Admit. Know: whose identity it is, if it may make such calls for some job; nobody has read the
  // message yet. Allow: whether it may for this job.
  absl::StatusOr<Identity> Know(const CallerShown& shown, const AskedCall& asked);
  absl::Status Allow(const Identity& identity, const CallerShown& shown, const AskedCall& asked);
  // The quota that an Open by `identity` must keep; null: none. Valid while `identity` lives.
  static const Quota* QuotaOf(const Identity& identity);
  // A question of a quota that is ABORTED is asked anew so often, and then refused with QuotaBusy.
  static constexpr int kQuotaTries = 16;
  static absl::Status QuotaBusy(absl::StatusCode code);  // BUSY
  uint64_t QuotaTime() const { return quotas_.Now(); }
  // As Quotas::Ask, for a Fence or an Open. A refusal is counted and audited.
  absl::StatusOr<Quotas::Lease> AskQuota(const Identity& identity, const CallerShown& shown, const AskedCall& call,
                                         const TierUse& asked, const JobsAsOf& seen);
  // What of a tier is free for copies of kept versions, whose growth the quota has to allow later. REQUIRES: QuotaOf.
  static void LimitFree(const Identity& identity, const std::vector<v1::JobStatus>& jobs, v1::OpenResponse* dry_run);

  // May `job` take `more`, without an Open: for a longer log, a kept version, copies of a pin? All quotas that count
  // the job have to allow growth, since nobody knows after a restart whose the job is. `jobs`: as in JobsAsOf, `job`
  // among them. Errors as Quotas::Ask's; RESOURCE_EXHAUSTED (BUSY) in place of ABORTED.
  absl::StatusOr<Quotas::Lease> AskGrowth(const std::string& job, const TierUse& more,
                                          const std::function<std::vector<v1::JobStatus>()>& jobs)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Writes a line about the end of a call, if it is a fence, an Open, a drop or a new budget.
  void Audit(const Identity& identity, const CallerShown& shown, const AskedCall& asked, const absl::Status& status);
  static bool IsAudited(Call call);
  // Waits until the audit log's lines so far are written; false if that takes longer than `patience`.
  bool DrainAudit(absl::Duration patience) { return audit_.Drain(patience); }

  const GuardOptions& options() const { return options_; }
  // Null: no TLS. Before Watch the copy of the HTTP port alone is there.
  const ServedCertificates* certificates() const { return served_ == nullptr ? nullptr : served_.get(); }
  const SecurityCounters& counters() const { return counters_; }

 private:
  // Files of one kind, and the function to read them.
  struct Watched {
    const char* what;  // for messages
    std::vector<std::string> paths;
    std::function<absl::Status()> load;
    SecurityCounters::Reloads* counts;
    std::string loaded, seen;                   // stamps of the files, as last loaded and as last seen
    absl::Time again = absl::InfiniteFuture();  // when a refused load is tried again
  };

  explicit Guard(GuardOptions options);
  // Which of its two identities the caller shows: the token's, if the server takes tokens and one came.
  IdentityKind KindOf(const CallerShown& shown) const {
    return shown.authorization.empty() || options_.tokens.empty() ? IdentityKind::kCertificate : IdentityKind::kToken;
  }
  AuditedCall LineOf(const std::string& identity, const CallerShown& shown, const AskedCall& asked) const;
  absl::StatusOr<std::string> NameOf(const CallerShown& shown, Denial* why) const;
  absl::Status Refuse(const std::string& identity, const CallerShown& shown, const AskedCall& asked, Denial why,
                      absl::Status status);
  absl::Status RefuseRight(const Identity& identity, const CallerShown& shown, const AskedCall& asked, RightSet needed);
  absl::Status LoadTokens();
  absl::Status LoadRights();
  void Load(Watched* watched) ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mu_);
  void Look() ABSL_LOCKS_EXCLUDED(load_mu_);
  void Run();

  const GuardOptions options_;
  SecurityCounters counters_;
  AuditLog audit_;
  Quotas quotas_;
  std::unique_ptr<ServedCertificates> served_;

  absl::Mutex load_mu_;
  std::vector<Watched> watched_ ABSL_GUARDED_BY(load_mu_);

  mutable absl::Mutex mu_;
  std::shared_ptr<const Tokens> tokens_ ABSL_GUARDED_BY(mu_);  // null: none are taken
  // Null: everything.
  std::array<std::shared_ptr<const Rights>, kKindNames.size()> rights_ ABSL_GUARDED_BY(mu_);  // by IdentityKind
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ballast::services
