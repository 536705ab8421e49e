#include "ballast/proto/registry/registry.h"

#include <arpa/inet.h>
#include <google/protobuf/util/json_util.h>
#include <grpc/grpc.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/access.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/text_file.h"
#include "ballast/proto/base/tls_probe.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/table.h"

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

constexpr int64_t kEntriesMax = 4096;
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

std::string ToJson(const google::protobuf::Message& message) {
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

// Passes over fields of a later release.
auto FromJson(const std::string& json, google::protobuf::Message* message) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  return google::protobuf::util::JsonStringToMessage(json, message, options);
}

// Whether this version knows all that the value says. Whoever writes it anew would lose the rest.
bool IsWhollyKnown(const std::string& json, const google::protobuf::Message& value) {
  const std::unique_ptr<google::protobuf::Message> known(value.New());
  return google::protobuf::util::JsonStringToMessage(json, known.get()).ok();
}

// Why a key that was read says not where a job is; empty: it does.
std::string TroubleWith(const v1::JobKey& key) {
  if (key.table().members().empty()) return "it names no members";
  if (key.table().shards().empty()) return "";
  return absl::CEscape(model::CheckTable(key.table()).message());
}
// A wish may be of any servers.
std::string TroubleWith(const v1::Wish&) { return ""; }

std::string HowToMend(const v1::JobKey&, const std::string& key) {
  return absl::StrCat(
      "expected what a trainer writes there. If all servers of the job run, remove the key by `etcdctl ", "del ", key,
      "`: the next start makes a new one, or for a job with copies `ballastctl members --restore`");
}
std::string HowToMend(const v1::Wish&, const std::string& key) {
  return absl::StrCat("expected what ballastctl writes there. Remove the key by `etcdctl del ", key,
                      "`, and say again what you want");
}

// The entry in a value that somebody wrote there, whoever that was.
absl::StatusOr<v1::ServerEntry> ParseEntry(const v1::EtcdKeyValue& pair, absl::string_view folder) {
  absl::string_view id = pair.key();
  absl::ConsumePrefix(&id, folder);
  v1::ServerEntry entry;
  const auto parsed = FromJson(pair.value(), &entry);
  std::string trouble;
  if (!parsed.ok()) {
    trouble = absl::CEscape(std::string(parsed.message()));
  } else if (entry.server_id() != id || !model::IsServerId(id)) {
    trouble = absl::StrCat("server_id is '", absl::CEscape(entry.server_id()), "'");
  } else {
    trouble = absl::CEscape(model::ParseAddress(entry.address(), model::AddressUse::kConnect).status().message());
  }
  if (trouble.empty()) return entry;
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      absl::StrCat("etcd's key ", absl::CEscape(pair.key()), " holds no entry of that server: ",
                                   trouble, "; expected what ballastd writes there. Remove it by `etcdctl del ",
                                   absl::CEscape(pair.key()), "`"));
}

}  // namespace

// Channels to etcd's members, by one content of the files.
struct Registry::Cluster {
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

Registry::Registry(RegistryUrl url) : url_(std::move(url)) {
  static const bool started = (grpc_init(), true);  // for the life of the process, as client/grpc_transport
  (void)started;
}

Registry::~Registry() = default;

absl::StatusOr<std::shared_ptr<Registry::Cluster>> Registry::Reach() {
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

std::string Registry::KeyOf(const std::string& server_id) const {
  return absl::StrCat("/", url_.prefix, "/servers/", server_id);
}

template <typename Response, typename Request>
absl::StatusOr<Response> Registry::Call(const char* method, const Request& request, absl::Time deadline) {
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

absl::StatusOr<std::vector<v1::ServerEntry>> Registry::List(absl::Time deadline, OnUnreadable on_unreadable) {
  const std::string folder = KeyOf("");
  v1::EtcdRangeRequest request;
  request.set_key(folder);
  // The first key behind the folder: '0' follows '/'.
  request.set_range_end(absl::StrCat(folder.substr(0, folder.size() - 1), "0"));
  request.set_limit(kEntriesMax);
  BALLAST_ASSIGN_OR_RETURN(const auto response, Call<v1::EtcdRangeResponse>(kRange, request, deadline));
  if (response.more()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat(FormatRegistryUrl(url_), " has more than ", kEntriesMax,
                                     " servers; give each set of servers a prefix of its own"));
  }
  std::vector<v1::ServerEntry> entries;  // etcd sorts by key
  for (const v1::EtcdKeyValue& pair : response.kvs()) {
    auto entry = ParseEntry(pair, folder);
    if (entry.ok()) {
      entries.push_back(*std::move(entry));
    } else if (on_unreadable == OnUnreadable::kRefuse) {
      return entry.status();
    }
  }
  return entries;
}

absl::StatusOr<int64_t> Registry::Grant(absl::Duration ttl, absl::Time deadline) {
  v1::EtcdLeaseGrantRequest request;
  request.set_ttl_seconds(std::max<int64_t>(1, absl::ToInt64Seconds(ttl)));
  BALLAST_ASSIGN_OR_RETURN(const auto response, Call<v1::EtcdLeaseGrantResponse>(kLeaseGrant, request, deadline));
  return response.id();
}

absl::Status Registry::KeepAlive(int64_t lease, absl::Time deadline) {
  v1::EtcdLeaseKeepAliveRequest request;
  request.set_id(lease);
  BALLAST_ASSIGN_OR_RETURN(const auto response,
                           Call<v1::EtcdLeaseKeepAliveResponse>(kLeaseKeepAlive, request, deadline));
  if (response.ttl_seconds() > 0) return absl::OkStatus();
  return model::Error(absl::StatusCode::kNotFound, model::kBadRequest, "the lease has ended");
}

absl::Status Registry::Revoke(int64_t lease, absl::Time deadline) {
  v1::EtcdLeaseRevokeRequest request;
  request.set_id(lease);
  return Call<v1::EtcdLeaseRevokeResponse>(kLeaseRevoke, request, deadline).status();
}

absl::StatusOr<std::optional<v1::EtcdKeyValue>> Registry::Read(const std::string& key, absl::Time deadline) {
  v1::EtcdRangeRequest request;
  request.set_key(key);
  BALLAST_ASSIGN_OR_RETURN(auto response, Call<v1::EtcdRangeResponse>(kRange, request, deadline));
  if (response.kvs().empty()) return std::nullopt;
  return std::move(*response.mutable_kvs(0));
}

absl::StatusOr<bool> Registry::Swap(const std::string& key, int64_t revision,
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

absl::StatusOr<std::optional<Registry::Found<v1::ServerEntry>>> Registry::Find(const std::string& server_id,
                                                                               absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const auto pair, Read(KeyOf(server_id), deadline));
  if (!pair.has_value()) return std::nullopt;
  Found<v1::ServerEntry> found{.value = {}, .revision = pair->mod_revision(), .lease = pair->lease()};
  if (auto entry = ParseEntry(*pair, KeyOf("")); entry.ok()) found.value = *std::move(entry);
  return found;
}

absl::StatusOr<bool> Registry::Put(const v1::ServerEntry& entry, int64_t lease, int64_t revision, absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_put()->set_key(KeyOf(entry.server_id()));
  operation.mutable_put()->set_lease(lease);
  operation.mutable_put()->set_value(ToJson(entry));
  return Swap(operation.put().key(), revision, operation, deadline);
}

std::string Registry::JobKeyName(const std::string& job) const { return absl::StrCat("/", url_.prefix, "/jobs/", job); }

// etcd says what it refuses, and not of which key.
absl::Status Registry::OfJob(const std::string& job, const absl::Status& status) const {
  if (status.ok() || absl::IsUnavailable(status)) return status;
  return model::Annotate(status, absl::StrCat("the key of job '", job, "', which trainers must be allowed to read and ",
                                              "to write (", JobKeyName(job), ")"));
}

template <typename Value>
absl::StatusOr<std::optional<Registry::Found<Value>>> Registry::FindOf(const std::string& job, const std::string& key,
                                                                       absl::Time deadline) {
  const auto read = Read(key, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, read.status()));
  if (!read->has_value()) return std::nullopt;
  const v1::EtcdKeyValue& pair = **read;
  Found<Value> found{.value = {}, .revision = pair.mod_revision(), .lease = pair.lease()};
  const auto parsed = FromJson(pair.value(), &found.value);
  if (parsed.ok() && !IsWhollyKnown(pair.value(), found.value)) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kLaterVersion,
                        absl::StrCat("a later version of Ballast wrote etcd's key ", key, ", which says more of job '",
                                     job, "' than this version knows; use that version for this job"));
  }
  const std::string trouble = parsed.ok() ? TroubleWith(found.value) : absl::CEscape(std::string(parsed.message()));
  if (trouble.empty()) return found;
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      absl::StrCat("etcd's key ", key, " does not say which servers have job '", job, "': ", trouble,
                                   "; ", HowToMend(found.value, key)));
}

absl::StatusOr<bool> Registry::PutOf(const std::string& job, const std::string& key,
                                     const google::protobuf::Message& value, int64_t revision, absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_put()->set_key(key);
  operation.mutable_put()->set_value(ToJson(value));
  const auto put = Swap(key, revision, operation, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, put.status()));
  return *put;
}

absl::StatusOr<bool> Registry::EraseOf(const std::string& job, const std::string& key, int64_t revision,
                                       absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_delete_range()->set_key(key);
  const auto erased = Swap(key, revision, operation, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, erased.status()));
  if (*erased) return true;
  const auto left = Read(key, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, left.status()));
  return !left->has_value();
}

absl::StatusOr<std::optional<Registry::Found<v1::JobKey>>> Registry::FindJob(const std::string& job,
                                                                             absl::Time deadline) {
  return FindOf<v1::JobKey>(job, JobKeyName(job), deadline);
}

absl::StatusOr<bool> Registry::PutJob(const std::string& job, const v1::JobKey& key, int64_t revision,
                                      absl::Time deadline) {
  return PutOf(job, JobKeyName(job), key, revision, deadline);
}

absl::StatusOr<bool> Registry::EraseJob(const std::string& job, int64_t revision, absl::Time deadline) {
  return EraseOf(job, JobKeyName(job), revision, deadline);
}

// No job's name has a slash.
std::string Registry::WishKeyName(const std::string& job) const { return absl::StrCat(JobKeyName(job), "/want"); }

absl::StatusOr<std::optional<Registry::Found<v1::Wish>>> Registry::FindWish(const std::string& job,
                                                                            absl::Time deadline) {
  return FindOf<v1::Wish>(job, WishKeyName(job), deadline);
}

absl::StatusOr<bool> Registry::PutWish(const std::string& job, const v1::Wish& wish, int64_t revision,
                                       absl::Time deadline) {
  return PutOf(job, WishKeyName(job), wish, revision, deadline);
}

absl::StatusOr<bool> Registry::EraseWish(const std::string& job, int64_t revision, absl::Time deadline) {
  return EraseOf(job, WishKeyName(job), revision, deadline);
}

}  // namespace ballast::registry
