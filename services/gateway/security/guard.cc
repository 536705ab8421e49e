#include "ballast/services/gateway/security/guard.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/text_file.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kLookInterval = absl::Seconds(1);
// A certificate may be refused for its dates alone, and become valid without a change of its file.
constexpr absl::Duration kRefusedInterval = absl::Minutes(1);
constexpr absl::string_view kBearer = "Bearer ";

absl::Status BadOptions(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

// Any one of these rights is enough. 0: whoever has an identity may ask.
RightSet NeededFor(const AskedCall& asked) {
  switch (asked.call) {
    case Call::kIdentify:
      return 0;
    case Call::kGetJob:
    case Call::kPull:
      return Right::kTrain | Right::kRead;
    case Call::kPin:
    case Call::kUnpin:
      if (asked.durable) return static_cast<RightSet>(Right::kPin);
      return asked.of_group ? static_cast<RightSet>(Right::kTrain) : Right::kTrain | Right::kRead;
    case Call::kFence:
    case Call::kOpen:
    case Call::kPush:
    case Call::kNorm:
    case Call::kSeal:
    case Call::kCommit:
      return static_cast<RightSet>(Right::kTrain);
    case Call::kExport:
      return static_cast<RightSet>(Right::kCopy);
    case Call::kGetServerStatus:
    case Call::kGetSteps:
      return static_cast<RightSet>(Right::kStatus);
    case Call::kDropJob:
      return static_cast<RightSet>(Right::kDrop);
    case Call::kSetBudget:
      return static_cast<RightSet>(Right::kBudget);
  }
  return static_cast<RightSet>(Right::kBudget);  // not reached: the compiler knows all calls
}

// As NeededFor, while the call's message, which says for what, is not read yet.
RightSet NeededForSome(const AskedCall& asked) {
  if (asked.call != Call::kPin && asked.call != Call::kUnpin) return NeededFor(asked);
  return NeededFor({asked.call, "", false}) | NeededFor({asked.call, "", true});
}

// Answers show the jobs alone that the caller may see.
bool OfWholeServer(Call call) {
  return call == Call::kGetServerStatus || call == Call::kGetSteps || call == Call::kSetBudget;
}

const char* NameOfCall(Call call) { return kCallNames[static_cast<size_t>(call)]; }

}  // namespace

bool GuardOptions::has_files() const {
  const bool audit_file = !audit_log.empty() && audit_log != "stderr" && audit_log != "none";
  return tls.enabled() || !tokens.empty() || !rights.empty() || audit_file;
}

bool IsLocalPeer(absl::string_view peer) {
  for (const char* local : {"ipv4:127.", "ipv6:[::1]:", "ipv6:%5B::1%5D:", "unix:", "unix-abstract:"}) {
    if (absl::StartsWith(peer, local)) return true;
  }
  return false;
}

Guard::Guard(GuardOptions options)
    : options_(std::move(options)),
      audit_(!options_.audit_log.empty() ? options_.audit_log
             : options_.asks_identity()  ? "stderr"
                                         : "none") {}

absl::StatusOr<std::unique_ptr<Guard>> Guard::Make(GuardOptions options) {
  const CertificatePaths& tls = options.tls;
  if (tls.certificate.empty() != tls.key.empty()) {
    return BadOptions("tls.certificate and tls.key belong together, and one is missing; set both or neither");
  }
  if (!tls.enabled() && !(tls.client_ca.empty() && tls.crl_directory.empty())) {
    return BadOptions("tls.client_ca and tls.crl_directory need TLS; set tls.certificate and tls.key");
  }
  if (!tls.crl_directory.empty() && tls.client_ca.empty()) {
    return BadOptions("tls.crl_directory revokes client certificates; set tls.client_ca, too");
  }
  if (!options.rights.empty() && !options.asks_identity()) {
    return BadOptions("rights belong to identities, and this server knows no identities; set tls.client_ca, or tokens");
  }
  std::unique_ptr<Guard> guard(new Guard(std::move(options)));
  const GuardOptions& kept = guard->options_;
  std::vector<Watched> watched;
  if (kept.tls.enabled()) {
    guard->served_ = std::make_unique<ServedCertificates>(kept.tls);
    BALLAST_RETURN_IF_ERROR(guard->served_->Read(absl::Now()));
    watched.push_back({"certificates",
                       {kept.tls.certificate, kept.tls.key, kept.tls.client_ca, kept.tls.crl_directory},
                       [raw = guard.get()] { return raw->served_->Load(absl::Now(), &raw->counters_); },
                       &guard->counters_.tls});
  }
  if (!kept.tokens.empty()) {
    BALLAST_RETURN_IF_ERROR(guard->LoadTokens());
    watched.push_back(
        {"tokens", {kept.tokens}, [raw = guard.get()] { return raw->LoadTokens(); }, &guard->counters_.tokens});
  }
  if (!kept.rights.empty()) {
    BALLAST_RETURN_IF_ERROR(guard->LoadRights());
    watched.push_back(
        {"rights", {kept.rights}, [raw = guard.get()] { return raw->LoadRights(); }, &guard->counters_.rights});
  }
  BALLAST_RETURN_IF_ERROR(guard->audit_.Open());
  absl::MutexLock lock(&guard->load_mu_);
  guard->watched_ = std::move(watched);
  return guard;
}

Guard::~Guard() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status Guard::Watch() {
  absl::MutexLock lock(&load_mu_);
  if (thread_.joinable() || watched_.empty()) return absl::OkStatus();
  for (Watched& watched : watched_) {
    watched.loaded = watched.seen = model::StampOf(watched.paths);
    BALLAST_RETURN_IF_ERROR(watched.load());
  }
  BALLAST_ASSIGN_OR_RETURN(thread_, model::MakeThread([this] { Run(); }));
  return absl::OkStatus();
}

void Guard::Reload() {
  if (const absl::Status opened = audit_.Open(); !opened.ok()) spdlog::error("{}", std::string(opened.message()));
  absl::MutexLock lock(&load_mu_);
  for (Watched& watched : watched_) Load(&watched);
}

void Guard::Load(Watched* watched) {
  watched->loaded = watched->seen = model::StampOf(watched->paths);
  const absl::Status status = watched->load();
  (status.ok() ? watched->counts->taken : watched->counts->refused).fetch_add(1, std::memory_order_relaxed);
  watched->again = status.ok() ? absl::InfiniteFuture() : absl::Now() + kRefusedInterval;
  if (status.ok()) {
    spdlog::info("loaded new {}", watched->what);
  } else {
    spdlog::error("refused new {}, the old ones stay in use: {}", watched->what, std::string(status.message()));
  }
}

void Guard::Look() {
  absl::MutexLock lock(&load_mu_);
  for (Watched& watched : watched_) {
    const std::string stamp = model::StampOf(watched.paths);
    // Files that belong together are written one after the other: a change counts once it has been the same for a
    // while.
    const bool settled = std::exchange(watched.seen, stamp) == stamp;
    if ((settled && stamp != watched.loaded) || absl::Now() >= watched.again) Load(&watched);
  }
}

void Guard::Run() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), kLookInterval)) return;
    }
    Look();
  }
}

absl::Status Guard::LoadTokens() {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, model::ReadTextFile(options_.tokens));
  BALLAST_ASSIGN_OR_RETURN(Tokens tokens, Tokens::Parse(text, options_.tokens));
  absl::MutexLock lock(&mu_);
  if (rights_[0] != nullptr && !options_.tls.client_ca.empty()) BALLAST_RETURN_IF_ERROR(rights_[0]->CheckKinds(tokens));
  tokens_ = std::make_shared<const Tokens>(std::move(tokens));
  return absl::OkStatus();
}

absl::Status Guard::LoadRights() {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, model::ReadTextFile(options_.rights));
  BALLAST_ASSIGN_OR_RETURN(Rights of_tokens, Rights::Parse(text, options_.rights, IdentityKind::kToken));
  BALLAST_ASSIGN_OR_RETURN(Rights of_certificates, Rights::Parse(text, options_.rights, IdentityKind::kCertificate));
  absl::MutexLock lock(&mu_);
  if (tokens_ != nullptr && !options_.tls.client_ca.empty()) BALLAST_RETURN_IF_ERROR(of_tokens.CheckKinds(*tokens_));
  rights_ = {std::make_shared<const Rights>(std::move(of_tokens)),
             std::make_shared<const Rights>(std::move(of_certificates))};
  return absl::OkStatus();
}

absl::Status Guard::MeetClient(absl::string_view certificate, absl::string_view chain, const std::string& peer) {
  if (certificate.empty() && !options_.tokens.empty()) return absl::OkStatus();
  Denial why = Denial::kBadCertificate;
  absl::Status status = CheckClient(*served_->current(), certificate, chain, absl::Now(), &why);
  if (status.ok()) return status;
  counters_.Count(why);
  const char* const kind = kKindNames[static_cast<size_t>(IdentityKind::kCertificate)];
  audit_.Denied({"handshake", SubjectOf(certificate), kind, peer, ""}, kDenialNames[static_cast<size_t>(why)],
                status.message());
  return status;
}

void Guard::RefusePlain(const std::string& peer) {
  counters_.Count(Denial::kNoTls);
  audit_.Denied({"handshake", "", "none", peer, ""}, kDenialNames[static_cast<size_t>(Denial::kNoTls)],
                "a client connected without TLS; give it the server's CA (ca, --ca)");
}

absl::StatusOr<std::string> Guard::NameOf(const CallerShown& shown, Denial* why) const {
  const auto unknown = [why](Denial denial, absl::string_view message) {
    *why = denial;
    return model::Error(absl::StatusCode::kUnauthenticated, model::kNoIdentity, message);
  };
  if (KindOf(shown) == IdentityKind::kToken) {
    if (!shown.encrypted && !IsLocalPeer(shown.peer)) {
      return unknown(Denial::kTokenInClear,
                     absl::StrCat("a token came in the clear from ", shown.peer,
                                  ", where others could read it; connect by TLS, and replace the token"));
    }
    absl::string_view token = shown.authorization[0];
    std::shared_ptr<const Tokens> tokens;
    {
      absl::MutexLock lock(&mu_);
      tokens = tokens_;
    }
    const bool bearer = shown.authorization.size() == 1 && absl::ConsumePrefix(&token, kBearer);
    const std::string* const identity = bearer ? tokens->IdentityOf(token) : nullptr;
    if (identity == nullptr) {
      return unknown(Denial::kBadToken,
                     bearer ? "the server's tokens file does not contain this token"
                            : "expected one `authorization: Bearer TOKEN`; the call has another, or several");
    }
    return *identity;
  }
  if (!shown.certificate_name.empty()) return shown.certificate_name;
  return unknown(
      Denial::kNoIdentity,
      absl::StrCat("the server requires an identity; expected ",
                   options_.tls.client_ca.empty() ? "a token (token_file)"
                   : options_.tokens.empty()      ? "a client's certificate with a name"
                                                  : "a client's certificate with a name, or a token",
                   ", got ", shown.has_certificate ? "a certificate without a subject alternative name" : "none"));
}

absl::StatusOr<Identity> Guard::Know(const CallerShown& shown, const AskedCall& asked) {
  if (!options_.asks_identity()) return Identity();
  Denial why = Denial::kNoIdentity;
  absl::StatusOr<std::string> name = NameOf(shown, &why);
  if (!name.ok()) return Refuse("", shown, asked, why, name.status());
  std::shared_ptr<const Rights> rights;
  {
    absl::MutexLock lock(&mu_);
    rights = rights_[static_cast<size_t>(KindOf(shown))];
  }
  Identity identity(*std::move(name), std::move(rights));
  const RightSet needed = NeededForSome(asked);
  const bool may = identity.rights() == nullptr ? true
                   : needed == 0                ? identity.rights()->Knows(identity.name())
                                                : identity.MayAnywhere(needed);
  if (!may) return RefuseRight(identity, shown, asked, needed);
  return identity;
}

absl::Status Guard::Allow(const Identity& identity, const CallerShown& shown, const AskedCall& asked) {
  const RightSet needed = NeededFor(asked);
  if (needed == 0 || OfWholeServer(asked.call) || identity.MayAny(needed, asked.job)) return absl::OkStatus();
  return RefuseRight(identity, shown, asked, needed);
}

absl::StatusOr<Identity> Guard::Admit(const CallerShown& shown, const AskedCall& asked) {
  absl::StatusOr<Identity> identity = Know(shown, asked);
  if (!identity.ok()) return identity;
  BALLAST_RETURN_IF_ERROR(Allow(*identity, shown, asked));
  return identity;
}

absl::Status Guard::RefuseRight(const Identity& identity, const CallerShown& shown, const AskedCall& asked,
                                RightSet needed) {
  return Refuse(identity.name(), shown, asked, Denial::kNoRight,
                model::Error(absl::StatusCode::kPermissionDenied, model::kNoRight,
                             absl::StrCat("'", identity.name(), "' may not ", NameOfCall(asked.call),
                                          asked.job.empty() ? "" : absl::StrCat(" job '", asked.job, "'"),
                                          needed == 0 ? ": the server's rights file does not name this identity"
                                                      : absl::StrCat(": the server's rights file would have to grant ",
                                                                     NamesOf(needed)))));
}

const Quota* Guard::QuotaOf(const Identity& identity) {
  return identity.rights() == nullptr ? nullptr : identity.rights()->QuotaOf(identity.name());
}

namespace {

// Jobs that count as the identity's.
Quotas::IsMine JobsOf(const Identity& identity) {
  return [&](absl::string_view name) { return identity.MayAny(static_cast<RightSet>(Right::kTrain), name); };
}

}  // namespace

void Guard::LimitFree(const Identity& identity, const std::vector<v1::JobStatus>& jobs, v1::OpenResponse* dry_run) {
  services::LimitFree(*QuotaOf(identity), jobs, JobsOf(identity), dry_run);
}

absl::StatusOr<Quotas::Lease> Guard::AskQuota(const Identity& identity, const CallerShown& shown, const AskedCall& call,
                                              const TierUse& asked, const JobsAsOf& seen) {
  auto lease = quotas_.Ask(identity.name(), *QuotaOf(identity), call.job, asked, seen, JobsOf(identity));
  if (lease.ok() || absl::IsAborted(lease.status())) return lease;
  return Refuse(identity.name(), shown, call, Denial::kQuota, lease.status());
}

absl::Status Guard::QuotaBusy(absl::StatusCode code) {
  return model::Error(code, model::kBusy,
                      absl::StrCat("Opens and fences of the quota's jobs ended during each of ", kQuotaTries,
                                   " looks at what the jobs hold; try again"));
}

absl::StatusOr<Quotas::Lease> Guard::AskGrowth(const std::string& job, const TierUse& more,
                                               const std::function<std::vector<v1::JobStatus>()>& jobs) {
  std::vector<std::shared_ptr<const Rights>> all;
  {
    absl::MutexLock lock(&mu_);
    all.assign(rights_.begin(), rights_.end());
  }
  const auto leases = std::make_shared<std::vector<Quotas::Lease>>();
  for (const std::shared_ptr<const Rights>& rights : all) {
    if (rights == nullptr) continue;
    for (const auto& [identity, quota] : rights->quotas()) {
      const auto mine = [&, &identity = identity](absl::string_view name) {
        return rights->MayAny(identity, static_cast<RightSet>(Right::kTrain), name);
      };
      if (!mine(job)) continue;
      absl::StatusOr<Quotas::Lease> lease = absl::AbortedError("");
      for (int tries = kQuotaTries; tries > 0 && absl::IsAborted(lease.status()); --tries) {
        const uint64_t time = quotas_.Now();
        lease = quotas_.Ask(identity, quota, job, more, {time, jobs()}, mine);
      }
      // A job that may not grow goes on as it is; it would not after another error.
      if (absl::IsAborted(lease.status())) return QuotaBusy(absl::StatusCode::kResourceExhausted);
      if (!lease.ok()) return lease;
      leases->push_back(*std::move(lease));
    }
  }
  return leases;
}

AuditedCall Guard::LineOf(const std::string& identity, const CallerShown& shown, const AskedCall& asked) const {
  const bool shows = KindOf(shown) == IdentityKind::kToken || shown.has_certificate;
  const char* const kind = shows ? kKindNames[static_cast<size_t>(KindOf(shown))] : "none";
  return {NameOfCall(asked.call), identity, kind, shown.peer, asked.job};
}

absl::Status Guard::Refuse(const std::string& identity, const CallerShown& shown, const AskedCall& asked, Denial why,
                           absl::Status status) {
  counters_.Count(why);
  audit_.Denied(LineOf(identity, shown, asked), kDenialNames[static_cast<size_t>(why)], status.message());
  return status;
}

bool Guard::IsAudited(Call call) {
  return call == Call::kFence || call == Call::kOpen || call == Call::kDropJob || call == Call::kSetBudget;
}

void Guard::Audit(const Identity& identity, const CallerShown& shown, const AskedCall& asked,
                  const absl::Status& status) {
  if (IsAudited(asked.call)) audit_.Ended(LineOf(identity.name(), shown, asked), status);
}

}  // namespace ballast::services
