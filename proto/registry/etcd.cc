#include "ballast/proto/registry/etcd.h"

#include <arpa/inet.h>
#include <grpc/grpc.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/access.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/text_file.h"
#include "ballast/proto/base/tls_probe.h"

namespace ballast::registry {
namespace {

bool IsNumber(const std::string& host) {
  in6_addr ignored;
  return inet_pton(AF_INET, host.c_str(), &ignored) == 1 || inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

constexpr char kRange[] = "/etcdserverpb.KV/Range";
constexpr char kAuthenticate[] = "/etcdserverpb.Auth/Authenticate";
constexpr char kTxn[] = "/etcdserverpb.KV/Txn";
constexpr char kLeaseGrant[] = "/etcdserverpb.Lease/LeaseGrant";
constexpr char kLeaseRevoke[] = "/etcdserverpb.Lease/LeaseRevoke";
// A stream of both sides. On the wire a stream of one request and one answer is a plain call.
constexpr char kLeaseKeepAlive[] = "/etcdserverpb.Lease/LeaseKeepAlive";

// etcd's numbers of "equal" and "the key's mod_revision".
constexpr int kEqual = 0, kModRevision = 2;

// `token`: of etcd's, empty: none.
template <typename Request, typename Response>
grpc::Status CallOnce(const std::shared_ptr<grpc::Channel>& channel, const char* method, const std::string& token,
                      const Request& request, absl::Time deadline, Response* response) {
  grpc::TemplatedGenericStub<Request, Response> stub(channel);
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("token", token);
  context.set_deadline(absl::ToChronoTime(deadline));
  absl::Notification done;
  grpc::Status status;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &request, response, [&](grpc::Status ended) {
    status = std::move(ended);
    done.Notify();
  });
  done.WaitForNotification();
  return status;
}

// etcd's tokens end after some minutes without a call, and when users or roles change.
bool TokenIsStale(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         absl::StrContains(status.error_message(), "auth store is old");
}

// A member that stops resets its calls, which gRPC calls CANCELLED; nothing here cancels one.
bool MemberIsDown(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE || status.error_code() == grpc::StatusCode::CANCELLED ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
}

}  // namespace

// Channels to etcd's members, by one content of the files.
struct Etcd::Cluster {
  // etcd's token for `password`, from `channel` unless an earlier call has brought one other than `stale`.
  grpc::Status TokenFrom(const std::shared_ptr<grpc::Channel>& channel, const std::string& stale, absl::Time deadline,
                         std::string* out) {
    {
      absl::MutexLock lock(&mutex);
      *out = token;
    }
    if (user.empty() || (!out->empty() && *out != stale)) return grpc::Status::OK;
    v1::EtcdAuthenticateRequest request;
    request.set_name(user);
    request.set_password(password);
    v1::EtcdAuthenticateResponse response;
    const grpc::Status status = CallOnce(channel, kAuthenticate, "", request, deadline, &response);
    *out = response.token();
    absl::MutexLock lock(&mutex);
    token = response.token();
    return status;
  }

  // What keeps this client and a member apart, by a handshake: gRPC knows of little more than a closed socket. Empty:
  // nothing of that kind. Blocks until `deadline`, and 0.2 s for each member after it. Looking up a name has no such
  // bound, so `looks_up` and time left are needed for that.
  std::string TlsFault(const std::vector<std::string>& endpoints, bool looks_up, absl::Time deadline) const {
    for (const std::string& endpoint : endpoints) {
      const absl::StatusOr<model::Address> member = model::ParseAddress(endpoint, model::AddressUse::kConnect);
      const absl::Time now = absl::Now();
      if (!member.ok() || !(IsNumber(member->host) || (looks_up && now < deadline))) continue;
      const absl::Time until = std::clamp(deadline, now + absl::Milliseconds(200), now + absl::Seconds(2));
      const absl::Status met = model::ProbeTls(*member, access, until);
      if (!met.ok()) return std::string(met.message());
    }
    return "";
  }

  std::vector<std::shared_ptr<grpc::Channel>> members;
  model::AccessContent access;
  std::string user, password;
  absl::Mutex mutex;
  std::string token ABSL_GUARDED_BY(mutex);
};

Etcd::Etcd(RegistryUrl url) : url_(std::move(url)) {
  static const bool started = (grpc_init(), true);  // for the life of the process, as client/grpc_transport
  (void)started;
}

Etcd::~Etcd() = default;

absl::StatusOr<std::shared_ptr<Etcd::Cluster>> Etcd::Reach() {
  absl::MutexLock lock(&mutex_);
  std::string stamp = model::StampOf(url_.files());
  if (cluster_ != nullptr && stamp == stamp_) return cluster_;
  auto cluster = std::make_shared<Cluster>();
  const absl::StatusOr<model::AccessContent> access = model::ReadAccess(url_.access);
  const absl::StatusOr<std::string> password =
      url_.user.empty() ? std::string() : model::ReadTextFile(url_.password_file);
  for (const absl::Status& status : {access.status(), password.status()}) {
    if (status.ok()) continue;
    if (cluster_ != nullptr) return cluster_;  // half written, perhaps
    return status;
  }
  cluster->access = *access;
  cluster->user = url_.user;
  cluster->password = std::string(absl::StripAsciiWhitespace(*password));
  const auto credentials = access->ca.empty() ? grpc::InsecureChannelCredentials()
                                              : grpc::SslCredentials({access->ca, access->key, access->certificate});
  for (const std::string& endpoint : url_.endpoints) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY,
                     0);  // as trainers' channels: a proxy of the environment is for downloads
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    cluster->members.push_back(grpc::CreateCustomChannel(endpoint, credentials, arguments));
  }
  cluster_ = std::move(cluster);
  stamp_ = std::move(stamp);
  return cluster_;
}

template <typename Response, typename Request>
absl::StatusOr<Response> Etcd::Call(const char* method, const Request& request, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Cluster> cluster, Reach());
  grpc::Status status;
  const size_t count = cluster->members.size(), first = answers_.load();
  for (size_t tried = 0; tried < count; ++tried) {
    const size_t member = (first + tried) % count;
    // A member whose machine is gone says nothing at all: it leaves the others their share of the time.
    const absl::Time now = absl::Now();
    const absl::Time until = now + (deadline - now) / static_cast<int64_t>(count - tried);
    std::string token;
    for (const bool again : {false, true}) {
      if (again && (cluster->user.empty() || !TokenIsStale(status))) break;
      Response response;
      const std::string stale = token;
      status = cluster->TokenFrom(cluster->members[member], stale, until, &token);
      if (status.ok()) status = CallOnce(cluster->members[member], method, token, request, until, &response);
      if (!MemberIsDown(status)) answers_.store(member);
      if (status.ok()) return response;
    }
    if (!MemberIsDown(status)) break;
  }
  if (MemberIsDown(status)) {
    const bool resolved = !absl::StrContains(status.error_message(), "DNS");
    std::string fault = cluster->TlsFault(url_.endpoints, resolved, deadline);
    if (fault.empty()) {
      fault = absl::StrCat(status.error_message(), "; is etcd running there, ",
                           url_.access.ca.empty() ? "without TLS? With TLS, the URL needs ca=FILE"
                                                  : "by TLS, and issued by a CA of the URL's `ca`?");
    } else {
      absl::StrAppend(&fault, " (in the URL: ca=FILE, certificate=FILE, key=FILE)");
    }
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        absl::StrCat(FormatRegistryUrl(url_), " does not answer: ", fault));
  }
  const bool gone = status.error_code() == grpc::StatusCode::NOT_FOUND;
  return model::Error(gone ? absl::StatusCode::kNotFound : absl::StatusCode::kInternal, model::kBadRequest,
                      absl::StrCat(FormatRegistryUrl(url_), " refuses ", method, ": ", status.error_message()));
}

absl::StatusOr<std::optional<v1::EtcdKeyValue>> Etcd::Read(const std::string& key, absl::Time deadline) {
  v1::EtcdRangeRequest request;
  request.set_key(key);
  BALLAST_ASSIGN_OR_RETURN(auto response, Call<v1::EtcdRangeResponse>(kRange, request, deadline));
  if (response.kvs().empty()) return std::nullopt;
  return std::move(*response.mutable_kvs(0));
}

absl::StatusOr<std::vector<v1::EtcdKeyValue>> Etcd::List(const std::string& folder, int64_t count_max,
                                                         absl::Time deadline) {
  v1::EtcdRangeRequest request;
  request.set_key(folder);
  // The first key behind the folder: '0' follows '/'.
  request.set_range_end(absl::StrCat(folder.substr(0, folder.size() - 1), "0"));
  request.set_limit(count_max);
  BALLAST_ASSIGN_OR_RETURN(auto response, Call<v1::EtcdRangeResponse>(kRange, request, deadline));
  if (response.more()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat(FormatRegistryUrl(url_), " has more than ", count_max, " keys in ", folder,
                                     "; remove those of servers and data directories that are gone (`etcdctl del`), or "
                                     "give each set of servers a prefix of its own"));
  }
  return std::vector<v1::EtcdKeyValue>(std::make_move_iterator(response.mutable_kvs()->begin()),
                                       std::make_move_iterator(response.mutable_kvs()->end()));
}

absl::StatusOr<bool> Etcd::Swap(const std::string& key, int64_t revision,
                                const v1::EtcdTxnRequest::Operation& operation, absl::Time deadline) {
  v1::EtcdTxnRequest request;
  v1::EtcdTxnRequest::Compare* const compare = request.add_compare();
  compare->set_result(kEqual);
  compare->set_target(kModRevision);
  compare->set_key(key);
  compare->set_mod_revision(revision);
  *request.add_success() = operation;
  BALLAST_ASSIGN_OR_RETURN(const auto response, Call<v1::EtcdTxnResponse>(kTxn, request, deadline));
  return response.succeeded();
}

absl::StatusOr<int64_t> Etcd::Grant(absl::Duration ttl, absl::Time deadline) {
  v1::EtcdLeaseGrantRequest request;
  request.set_ttl_seconds(std::max<int64_t>(1, absl::ToInt64Seconds(ttl)));
  BALLAST_ASSIGN_OR_RETURN(const auto response, Call<v1::EtcdLeaseGrantResponse>(kLeaseGrant, request, deadline));
  return response.id();
}

absl::Status Etcd::KeepAlive(int64_t lease, absl::Time deadline) {
  v1::EtcdLeaseKeepAliveRequest request;
  request.set_id(lease);
  BALLAST_ASSIGN_OR_RETURN(const auto response,
                           Call<v1::EtcdLeaseKeepAliveResponse>(kLeaseKeepAlive, request, deadline));
  if (response.ttl_seconds() > 0) return absl::OkStatus();
  return model::Error(absl::StatusCode::kNotFound, model::kBadRequest, "the lease has ended");
}

absl::Status Etcd::Revoke(int64_t lease, absl::Time deadline) {
  v1::EtcdLeaseRevokeRequest request;
  request.set_id(lease);
  return Call<v1::EtcdLeaseRevokeResponse>(kLeaseRevoke, request, deadline).status();
}

}  // namespace ballast::registry
