// Identities against calls, over real connections.
#include "ballast/services/gateway/gate.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/tls_probe.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/services/gateway/chunk_client.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "ballast/tests/services/gateway/security/authority.h"
#include "ballast/tests/services/gateway/security/outside_address.h"

namespace ballast::services {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kRights[] = R"(
rights:
- {identity: 'spiffe://t/train', jobs: 'a-*', can: [train]}
- {identity: 'spiffe://t/read', jobs: 'a-*', can: [read]}
- {identity: 'spiffe://t/pin', jobs: 'a-*', can: [pin]}
- {identity: 'spiffe://t/drop', jobs: 'a-*', can: [drop]}
- {identity: 'spiffe://t/budget', jobs: '*', can: [budget]}
- {identity: 'spiffe://t/status', jobs: 'a-*', can: [status]}
- {identity: 'spiffe://t/copy', jobs: 'a-*', can: [copy]}
- {identity: 'spiffe://t/all', jobs: '*', can: [train, read, pin, drop, budget, status, copy]}
- {identity: token-trainer, kind: token, jobs: 'a-*', can: [train]}
- {identity: host.example, jobs: 'a-*', can: [read]}
quotas:
- {identity: token-trainer, kind: token, jobs: 1, dram: 16MiB}
)";
constexpr char kTokens[] =
    "tokens:\n- {identity: token-trainer, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}\n";

// The rights that each call takes, any of them; "-": an identity alone. Written down here once more, on purpose.
const std::map<std::string, std::set<std::string>>& Needs() {
  static const auto* const kNeeds =
      new std::map<std::string, std::set<std::string>>{{"Identify", {"-"}},
                                                       {"GetJob", {"train", "read"}},
                                                       {"Fence", {"train"}},
                                                       {"Open", {"train"}},
                                                       {"Push", {"train"}},
                                                       {"Norm", {"train"}},
                                                       {"Seal", {"train"}},
                                                       {"Commit", {"train"}},
                                                       {"Pull", {"train", "read"}},
                                                       {"Pin", {"train"}},
                                                       {"Pin of a reader", {"train", "read"}},
                                                       {"Unpin", {"train"}},
                                                       {"Unpin of a reader", {"train", "read"}},
                                                       {"Pin durable", {"pin"}},
                                                       {"Unpin durable", {"pin"}},
                                                       {"Export", {"copy"}},
                                                       {"GetServerStatus", {"status"}},
                                                       {"GetSteps", {"status"}},
                                                       {"DropJob", {"drop"}},
                                                       {"SetBudget", {"budget"}}};
  return *kNeeds;
}

struct Method {
  std::string path;
  std::string request;
};

// All methods that the services have, each with a request about `job`; by name.
std::map<std::string, Method> Methods(const std::string& job) {
  static google::protobuf::DynamicMessageFactory factory;
  std::map<std::string, Method> methods;
  for (const char* name : {"ballast.v1.StateService", "ballast.v1.AdminService"}) {
    const auto* const service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int i = 0; i < service->method_count(); ++i) {
      const auto* const method = service->method(i);
      const auto* const type = method->input_type();
      std::unique_ptr<google::protobuf::Message> message(factory.GetPrototype(type)->New());
      const auto* const reflection = message->GetReflection();
      if (const auto* const field = type->FindFieldByName("job")) reflection->SetString(message.get(), field, job);
      if (const auto* const spec = type->FindFieldByName("spec")) {
        auto* const inner = reflection->MutableMessage(message.get(), spec, &factory);
        inner->GetReflection()->SetString(inner, inner->GetDescriptor()->FindFieldByName("name"), job);
      }
      const std::string path = absl::StrCat("/", name, "/", method->name());
      methods[method->name()] = {path, message->SerializeAsString()};
      if (const auto* const holder = type->FindFieldByName("holder")) {
        reflection->SetUInt64(message.get(), holder, 7);
        methods[method->name() + " of a reader"] = {path, message->SerializeAsString()};
        reflection->SetUInt64(message.get(), holder, 0);
      }
      if (const auto* const durable = type->FindFieldByName("durable")) {
        reflection->SetBool(message.get(), durable, true);
        methods[method->name() + " durable"] = {path, message->SerializeAsString()};
      }
    }
  }
  return methods;
}

struct SessionShown {
  std::shared_ptr<SSL_SESSION> session;  // null: no handshake
  bool resumed = false;
};

// A handshake by TLS 1.2, which ends with the server's verdict, going on with `session` if there is one.
SessionShown ShakeHands(const std::string& address, const IssuedPair& pair,
                        const std::shared_ptr<SSL_SESSION>& session) {
  const std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free);
  SSL_CTX_set_max_proto_version(context.get(), TLS1_2_VERSION);
  const std::shared_ptr<BIO> certificate(BIO_new_mem_buf(pair.certificate.data(), -1), &BIO_free),
      key(BIO_new_mem_buf(pair.key.data(), -1), &BIO_free);
  const std::shared_ptr<X509> own(PEM_read_bio_X509(certificate.get(), nullptr, nullptr, nullptr), &X509_free);
  const std::shared_ptr<EVP_PKEY> own_key(PEM_read_bio_PrivateKey(key.get(), nullptr, nullptr, nullptr),
                                          &EVP_PKEY_free);
  SSL_CTX_use_certificate(context.get(), own.get());
  SSL_CTX_use_PrivateKey(context.get(), own_key.get());
  const std::shared_ptr<SSL> tls(SSL_new(context.get()), &SSL_free);
  SSL_set_alpn_protos(tls.get(), reinterpret_cast<const unsigned char*>("\x02h2"), 3);
  if (session != nullptr) SSL_set_session(tls.get(), session.get());
  const int fd = ConnectTo(address);
  SSL_set_fd(tls.get(), fd);
  SessionShown shown;
  char first = 0;  // a server that lets the client in speaks first
  if (SSL_connect(tls.get()) == 1 && SSL_read(tls.get(), &first, 1) == 1) {
    SSL_set_shutdown(tls.get(), SSL_SENT_SHUTDOWN | SSL_RECEIVED_SHUTDOWN);  // else SSL_free spoils the session
    shown.session.reset(SSL_get1_session(tls.get()), &SSL_SESSION_free);
    shown.resumed = SSL_session_reused(tls.get()) == 1;
  }
  ::close(fd);
  return shown;
}

class GateTest : public ::testing::Test {
 protected:
  GateTest() {
    std::filesystem::create_directory(dir_ / "crl");
    options_.tls = {dir_ / "tls.crt", dir_ / "tls.key", dir_ / "ca.crt", dir_ / "crl"};
    options_.tokens = dir_ / "tokens.yaml";
    options_.rights = dir_ / "rights.yaml";
    options_.audit_log = dir_ / "audit.log";
    Install(authority_.IssueServer("server"));
    WriteText(options_.tls.client_ca, authority_.certificate());
    WriteText(dir_ / "crl/ca.pem", authority_.Revocations({}));
    WriteText(options_.tokens, kTokens);
    WriteText(options_.rights, kRights);
  }
  void Install(const IssuedPair& pair) {
    WriteText(options_.tls.certificate, pair.certificate);
    WriteText(options_.tls.key, pair.key);
  }
  void Start(const std::string& listen = "127.0.0.1:0") {
    auto guard = Guard::Make(options_);
    ASSERT_TRUE(guard.ok()) << guard.status();
    guard_ = *std::move(guard);
    ASSERT_TRUE(guard_->Watch().ok());
    RpcServerOptions options;
    options.listen = listen;
    options.guard = guard_.get();
    auto rpc = RpcServer::Start(options, server_.get());
    ASSERT_TRUE(rpc.ok()) << rpc.status();
    rpc_ = *std::move(rpc);
  }
  // A channel of its own, with a certificate of `authority_` for the SPIFFE ID, or without one.
  std::shared_ptr<grpc::Channel> Connect(const std::string& identity = "") {
    return ConnectWith(identity.empty() ? IssuedPair() : authority_.IssueClient("spiffe://t/" + identity));
  }
  std::shared_ptr<grpc::Channel> ConnectWith(const IssuedPair& pair) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(rpc_->address(), grpc::SslCredentials({trusted_, pair.key, pair.certificate}),
                                     arguments);
  }
  static grpc::StatusCode Identify(const std::shared_ptr<grpc::Channel>& channel) {
    std::string answer;
    return RawCall(channel, "/ballast.v1.StateService/Identify", "", &answer).error_code();
  }
  // gRPC takes the copy of certificates within a second of the guard.
  void Reload() {
    guard_->Reload();
    absl::SleepFor(absl::Milliseconds(1500));
  }
  // Asks until the answer is `code`, for a minute at most: on a slow machine gRPC takes the copy later.
  static grpc::StatusCode Until(grpc::StatusCode code, const std::function<grpc::StatusCode()>& ask) {
    for (const absl::Time end = absl::Now() + absl::Minutes(1);;) {
      const grpc::StatusCode answer = ask();
      if (answer == code || absl::Now() > end) return answer;
      absl::SleepFor(absl::Milliseconds(100));
    }
  }
  std::vector<std::string> JobsSeenBy(const std::string& identity) {
    const auto stub = v1::AdminService::NewStub(Connect(identity));
    grpc::ClientContext context;
    v1::GetServerStatusResponse status;
    EXPECT_TRUE(stub->GetServerStatus(&context, {}, &status).ok());
    std::vector<std::string> names;
    for (const v1::JobStatus& job : status.jobs()) names.push_back(job.name());
    return names;
  }
  // Fences and opens a job with the token of "token-trainer".
  absl::Status OpenByToken(const std::string& job, bool dry_run = false,
                           v1::Durability durability = v1::DURABILITY_NONE, v1::OpenResponse* answer = nullptr) {
    v1::JobSpec spec = MakeSpec(job, SmallModel());
    spec.set_durability(durability);
    TrainerGroup group({server_.get()}, spec, 1);
    const auto stub = v1::StateService::NewStub(Connect());
    v1::FenceRequest fence;
    fence.set_job(job);
    *fence.mutable_epoch() = group.epoch();
    fence.set_protocol_version(model::kProtocolVersion);
    grpc::ClientContext fencing, opening;
    fencing.AddMetadata("authorization", "Bearer abc");
    opening.AddMetadata("authorization", "Bearer abc");
    for (grpc::ClientContext* context : {&fencing, &opening}) NameTarget(*server_.get(), context);
    v1::FenceResponse fenced;
    if (const grpc::Status status = stub->Fence(&fencing, fence, &fenced); !status.ok()) return FromGrpc(status);
    v1::OpenRequest open = group.open_request(-1, std::nullopt);
    open.set_dry_run(dry_run);
    v1::OpenResponse opened;
    return FromGrpc(stub->Open(&opening, open, answer != nullptr ? answer : &opened));
  }

  ScratchDirectory dir_;
  Authority authority_{"ca"};
  std::string trusted_ = authority_.certificate();
  GuardOptions options_;
  TestServer server_{"s"};
  std::unique_ptr<Guard> guard_;
  std::unique_ptr<RpcServer> rpc_;
};

TEST_F(GateTest, TheMatrixOfIdentitiesAndCalls) {
  Start();
  struct Caller {
    std::string name;
    std::shared_ptr<grpc::Channel> channel;
    std::string authorization;
    std::set<std::string> rights;  // empty: none, and no identity
  };
  const std::vector<Caller> callers = {
      {"train", Connect("train"), "", {"-", "train"}},
      {"read", Connect("read"), "", {"-", "read"}},
      {"pin", Connect("pin"), "", {"-", "pin"}},
      {"drop", Connect("drop"), "", {"-", "drop"}},
      {"budget", Connect("budget"), "", {"-", "budget"}},
      {"status", Connect("status"), "", {"-", "status"}},
      {"copy", Connect("copy"), "", {"-", "copy"}},
      {"all", Connect("all"), "", {"-", "train", "read", "pin", "drop", "budget", "status", "copy"}},
      {"token", Connect(), "Bearer abc", {"-", "train"}},
      {"token beside a certificate", Connect("all"), "Bearer abc", {"-", "train"}},
      {"DNS name",
       ConnectWith(authority_.Issue("c", {.alternative_names = "DNS:host.example,DNS:other.example"})),
       "",
       {"-", "read"}},
      {"certificate without rights", Connect("stranger"), "", {"none"}},
      {"certificate that is called as a token's holder",
       ConnectWith(authority_.Issue("c", {.alternative_names = "DNS:token-trainer"})),
       "",
       {"none"}},
      {"bad token", Connect("all"), "Bearer abd", {}},
      {"nobody", Connect(), "", {}},
      {"certificate without a name", ConnectWith(authority_.Issue("spiffe://t/all", {})), "", {}},
      // SPIFFE takes a certificate with one URI alone for a SPIFFE ID; a name of another kind is none.
      {"host that is called as a SPIFFE ID",
       ConnectWith(authority_.Issue("c", {.alternative_names = "DNS:spiffe://t/all"})),
       "",
       {}},
      {"address that is called as a SPIFFE ID",
       ConnectWith(authority_.Issue("c", {.alternative_names = "email:spiffe://t/all"})),
       "",
       {}},
      {"two SPIFFE IDs",
       ConnectWith(authority_.Issue("c", {.alternative_names = "URI:spiffe://t/all,URI:spiffe://t/read"})),
       "",
       {}}};
  const auto mine = Methods("a-1"), others = Methods("b-1");
  ASSERT_EQ(mine.size(), Needs().size()) << "a method without a row";
  int refused = 0;
  for (const Caller& caller : callers) {
    for (const auto& [name, method] : mine) {
      SCOPED_TRACE(caller.name + " calls " + name);
      const std::set<std::string>& needs = Needs().at(name);
      const bool may =
          std::any_of(needs.begin(), needs.end(), [&](const auto& right) { return caller.rights.count(right) > 0; });
      std::string answer;
      const grpc::Status status = RawCall(caller.channel, method.path, method.request, &answer, caller.authorization);
      const auto refusal =
          caller.rights.empty() ? grpc::StatusCode::UNAUTHENTICATED : grpc::StatusCode::PERMISSION_DENIED;
      if (may) {
        EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
        EXPECT_NE(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << status.error_message();
        EXPECT_NE(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
      } else {
        EXPECT_EQ(status.error_code(), refusal) << status.error_message();
        EXPECT_EQ(model::ReasonOf(FromGrpc(status)), caller.rights.empty() ? model::kNoIdentity : model::kNoRight);
        ++refused;
      }
      // A job of others: only what is the server's, and whoever may do all of it.
      const bool of_server =
          needs.count("-") > 0 || name == "GetServerStatus" || name == "GetSteps" || name == "SetBudget";
      if (of_server || caller.name == "all" || caller.rights.empty()) continue;
      const Method& other = others.at(name);
      EXPECT_EQ(RawCall(caller.channel, other.path, other.request, &answer, caller.authorization).error_code(),
                grpc::StatusCode::PERMISSION_DENIED);
    }
  }
  EXPECT_GT(refused, 100);
  uint64_t counted = 0;
  for (const auto& denials : guard_->counters().denials) counted += denials;
  EXPECT_GE(counted, static_cast<uint64_t>(refused));
}

TEST_F(GateTest, JobsThatAnIdentityMayNotSeeAreNotShown) {
  Start();
  for (const char* job : {"a-1", "b-1"}) {
    ASSERT_EQ(TrainerGroup({server_.get()}, MakeSpec(job, SmallModel()), 1).Start(), absl::OkStatus());
  }
  EXPECT_THAT(JobsSeenBy("status"), ElementsAre("a-1"));
  EXPECT_THAT(JobsSeenBy("all"), ElementsAre("a-1", "b-1"));
  // New budgets tell of jobs too.
  v1::SetBudgetRequest request;
  request.set_dram_bytes(uint64_t{63} << 20);
  for (const char* identity : {"budget", "all"}) {
    const auto stub = v1::AdminService::NewStub(Connect(identity));
    grpc::ClientContext context;
    v1::SetBudgetResponse response;
    const grpc::Status status = stub->SetBudget(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.jobs_size(), std::string(identity) == "all" ? 2 : 0);
  }
}

TEST_F(GateTest, AQuotaIsRefusedWithNumbers) {
  Start();
  // All that the small model takes, in bytes; a quota of one byte less.
  ASSERT_EQ(OpenByToken("a-1"), absl::OkStatus());
  const uint64_t held = HeldBytes(server_->Status().jobs(0))[1];
  ASSERT_GT(held, 1u << 20);
  const absl::Status jobs = OpenByToken("a-2");
  EXPECT_EQ(jobs.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(jobs), model::kQuota);
  EXPECT_THAT(std::string(jobs.message()), HasSubstr("asks for 1 job. Jobs of 'token-trainer' already hold 1 on this "
                                                     "server, and the quota is 1"));

  WriteText(options_.rights,
            absl::StrCat("rights: [{identity: token-trainer, kind: token, jobs: 'a-*', can: [train]}]\n"
                         "quotas: [{identity: token-trainer, kind: token, dram: ",
                         2 * held - 1, "}]\n"));
  guard_->Reload();
  for (const bool dry_run : {true, false}) {
    const absl::Status bytes = OpenByToken("a-3", dry_run);
    EXPECT_EQ(model::ReasonOf(bytes), model::kQuota) << bytes;
    EXPECT_THAT(std::string(bytes.message()),
                HasSubstr(absl::StrCat("asks for ", held, " bytes of dram. Jobs of 'token-trainer' already hold ", held,
                                       " (slices ")));
  }
  WriteText(options_.rights,
            absl::StrCat("rights: [{identity: token-trainer, kind: token, jobs: 'a-*', can: [train]}]\n"
                         "quotas: [{identity: token-trainer, kind: token, dram: ",
                         2 * held, "}]\n"));
  guard_->Reload();
  EXPECT_EQ(OpenByToken("a-4"), absl::OkStatus());
  EXPECT_EQ(guard_->counters().denials[static_cast<size_t>(Denial::kQuota)], 3u);
  std::set<std::string> left;
  const v1::GetServerStatusResponse status = server_->Status();
  for (const v1::JobStatus& job : status.jobs()) left.insert(job.name());
  EXPECT_EQ(left, (std::set<std::string>{"a-1", "a-4"})) << "a group that is refused leaves no job behind";
}

// A job whose state fits the quota, and whose log, slices and reserves do not, was let in.
TEST_F(GateTest, AQuotaCountsAllThatAJobTakes) {
  server_.options().budget.nvme = uint64_t{512} << 20;
  server_.Restart();
  const auto set_quota = [&](uint64_t nvme) {
    WriteText(options_.rights,
              absl::StrCat("rights: [{identity: token-trainer, kind: token, jobs: 'a-*', can: [train]}]\n"
                           "quotas: [{identity: token-trainer, kind: token, nvme: ",
                           nvme, "}]\n"));
    if (guard_ != nullptr) guard_->Reload();
  };
  set_quota(uint64_t{512} << 20);
  Start();
  ASSERT_EQ(OpenByToken("a-1", false, v1::DURABILITY_STEP), absl::OkStatus());
  const v1::JobStatus first = server_->Status().jobs(0);
  const uint64_t held = server_->Status().tiers(2).used_bytes(), state = first.tiers(1).state_bytes();
  EXPECT_EQ(HeldBytes(first)[2], held) << "the server's only job";
  ASSERT_GT(held, 2 * state) << "a log takes more than the state beside it";
  set_quota(held + 2 * state);  // room for another job's state, twice
  const absl::Status refused = OpenByToken("a-2", false, v1::DURABILITY_STEP);
  EXPECT_EQ(model::ReasonOf(refused), model::kQuota) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrCat("asks for ", held, " bytes of nvme. Jobs of 'token-trainer' already hold ", held,
                                     " (log ", first.log_capacity_bytes(), ", spare ")));
  EXPECT_EQ(OpenByToken("a-1", false, v1::DURABILITY_STEP), absl::OkStatus()) << "it goes on";
  set_quota(2 * held);
  v1::OpenResponse planned;
  EXPECT_EQ(OpenByToken("a-2", true, v1::DURABILITY_STEP, &planned), absl::OkStatus());
  ASSERT_EQ(planned.tiers_size(), 3);
  EXPECT_EQ(planned.tiers(2).free_bytes(), held) << "of the quota, not of the server";
  EXPECT_GT(planned.tiers(1).free_bytes(), 0u) << "which has no quota of dram";
  EXPECT_EQ(OpenByToken("a-2", false, v1::DURABILITY_STEP), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(OpenByToken("a-3", false, v1::DURABILITY_STEP)), model::kQuota);
}

// A job takes one of the server's places as soon as it is fenced.
TEST_F(GateTest, FencesDoNotGoAroundAQuotaOfJobs) {
  WriteText(options_.rights,
            "rights: [{identity: token-trainer, kind: token, jobs: 'a-*', can: [train]}]\n"
            "quotas: [{identity: token-trainer, kind: token, jobs: 2}]\n");
  Start();
  const auto stub = v1::StateService::NewStub(Connect());
  const auto fence = [&](const std::string& job, uint64_t counter) {
    v1::FenceRequest request;
    request.set_job(job);
    request.mutable_epoch()->set_counter(counter);
    request.set_protocol_version(model::kProtocolVersion);
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer abc");
    NameTarget(*server_.get(), &context);
    v1::FenceResponse response;
    return FromGrpc(stub->Fence(&context, request, &response));
  };
  constexpr int kUnopenedMax = 16;
  for (int i = 0; i < kUnopenedMax; ++i) ASSERT_EQ(fence(absl::StrCat("a-", i), 1), absl::OkStatus());
  const absl::Status refused = fence("a-new", 1);
  EXPECT_EQ(model::ReasonOf(refused), model::kQuota) << refused;
  EXPECT_EQ(server_->Status().jobs_size(), kUnopenedMax);
  EXPECT_EQ(fence("a-2", 2), absl::OkStatus()) << "of a job that is there";
}

// Each end of a call makes the server look at its jobs anew, and its thread for that is everybody's.
TEST_F(GateTest, AQuotaThatIsNeverStillIsBusy) {
  WriteText(options_.rights,
            "rights: [{identity: token-trainer, kind: token, jobs: 'a-*', can: [train]}]\n"
            "quotas: [{identity: token-trainer, kind: token, dram: 1GiB}]\n");
  Start();
  std::atomic<bool> over = false;
  std::thread others([&] {
    while (!over) (void)guard_->AskGrowth("a-other", {}, [] { return std::vector<v1::JobStatus>(); });
  });
  absl::Status status;
  const absl::Time until = absl::Now() + absl::Minutes(2);
  do {
    status = OpenByToken("a-1");
  } while (model::ReasonOf(status) != model::kBusy && absl::Now() < until);
  over = true;
  others.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kBusy) << status;
  EXPECT_EQ(OpenByToken("a-1"), absl::OkStatus());
}

TEST_F(GateTest, RotationOfLeafAndCa) {
  Start();
  const auto old = Connect("all");
  ASSERT_EQ(Identify(old), grpc::StatusCode::OK);

  Authority next("ca-2");
  const IssuedPair stranger = next.IssueClient("spiffe://t/all");
  EXPECT_EQ(Identify(ConnectWith(stranger)), grpc::StatusCode::UNAVAILABLE) << "a client of an unknown CA";
  // Both CAs, then the server's certificate of the next.
  WriteText(options_.tls.client_ca, authority_.certificate() + next.certificate());
  WriteText(dir_ / "crl/ca-2.pem", next.Revocations({}));
  Install(next.IssueServer("server-2"));
  Reload();
  EXPECT_EQ(guard_->counters().tls.taken, 1u);
  EXPECT_EQ(Identify(old), grpc::StatusCode::OK) << "the connection lives";
  const auto all = [&] { return Identify(Connect("all")); };
  const auto other = [&] { return Identify(ConnectWith(stranger)); };
  EXPECT_EQ(Until(grpc::StatusCode::UNAVAILABLE, all), grpc::StatusCode::UNAVAILABLE)
      << "the client trusts the first CA alone";
  trusted_ = next.certificate();
  EXPECT_EQ(Until(grpc::StatusCode::OK, all), grpc::StatusCode::OK);
  EXPECT_EQ(Until(grpc::StatusCode::OK, other), grpc::StatusCode::OK);
  // The first CA goes.
  WriteText(options_.tls.client_ca, next.certificate());
  Reload();
  EXPECT_EQ(Until(grpc::StatusCode::UNAVAILABLE, all), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Until(grpc::StatusCode::OK, other), grpc::StatusCode::OK);
}

TEST_F(GateTest, APairThatDoesNotMatchIsKeptOut) {
  Start();
  WriteText(options_.tls.key, authority_.IssueServer("other").key);
  // Found without being told.
  const auto& counts = guard_->counters().tls;
  for (int i = 0; i < 600 && counts.refused == 0; ++i) absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(counts.refused, 1u);
  absl::SleepFor(absl::Milliseconds(1500));
  EXPECT_EQ(Identify(Connect("all")), grpc::StatusCode::OK) << "the old pair serves new connections";
  Install(authority_.IssueServer("good"));
  for (int i = 0; i < 600 && counts.taken == 0; ++i) absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(counts.taken, 1u);
}

TEST_F(GateTest, ARevokedClientIsRefusedAlsoOnAnOldChannel) {
  options_.connection_age = absl::Seconds(2);
  Start();
  const IssuedPair revoked = authority_.IssueClient("spiffe://t/all");
  const auto channel = ConnectWith(revoked), other = Connect("all");
  ASSERT_EQ(Identify(channel), grpc::StatusCode::OK);
  WriteText(dir_ / "crl/ca.pem", authority_.Revocations({revoked.serial}));
  Reload();
  const auto as_revoked = [&] { return Identify(ConnectWith(revoked)); };
  EXPECT_EQ(Until(grpc::StatusCode::UNAVAILABLE, as_revoked), grpc::StatusCode::UNAVAILABLE);
  // The old connection ends of age.
  grpc::StatusCode code = grpc::StatusCode::OK;
  for (int i = 0; i < 600 && code == grpc::StatusCode::OK; ++i) {
    absl::SleepFor(absl::Milliseconds(100));
    code = Identify(channel);
  }
  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Identify(other), grpc::StatusCode::OK) << "the rest connect anew";
  // Taken back.
  WriteText(dir_ / "crl/ca.pem", authority_.Revocations({}));
  Reload();
  EXPECT_EQ(Until(grpc::StatusCode::OK, as_revoked), grpc::StatusCode::OK);
}

// gRPC hands out tickets, by which a client comes back without showing its certificate. New files make old tickets
// void.
TEST_F(GateTest, ARevokedClientDoesNotComeBackByATicket) {
  Start();
  const IssuedPair revoked = authority_.IssueClient("spiffe://t/all");
  const SessionShown first = ShakeHands(rpc_->address(), revoked, nullptr);
  ASSERT_NE(first.session, nullptr);
  ASSERT_TRUE(ShakeHands(rpc_->address(), revoked, first.session).resumed) << "else this test tests nothing";
  WriteText(dir_ / "crl/ca.pem", authority_.Revocations({revoked.serial}));
  Reload();
  const auto comes_back = [&] { return ShakeHands(rpc_->address(), revoked, first.session).session != nullptr; };
  for (const absl::Time end = absl::Now() + absl::Minutes(1); comes_back() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_FALSE(comes_back());
  EXPECT_NE(ShakeHands(rpc_->address(), authority_.IssueClient("spiffe://t/all"), nullptr).session, nullptr);
}

TEST_F(GateTest, WithoutTokensNobodyGetsPastTheHandshakeWithoutACertificate) {
  options_.tokens = "";
  Start();
  EXPECT_EQ(Identify(Connect("all")), grpc::StatusCode::OK);
  EXPECT_EQ(Identify(Connect()), grpc::StatusCode::UNAVAILABLE);
  const auto plain = grpc::CreateChannel(rpc_->address(), grpc::InsecureChannelCredentials());
  EXPECT_EQ(Identify(plain), grpc::StatusCode::UNAVAILABLE);
  EXPECT_GE(guard_->counters().denials[static_cast<size_t>(Denial::kNoTls)], 1u);
  ASSERT_TRUE(guard_->DrainAudit(absl::Minutes(1)));
  std::ifstream audit(options_.audit_log);
  const std::string lines((std::istreambuf_iterator<char>(audit)), {});
  EXPECT_THAT(lines, HasSubstr("call=handshake identity=\"\" kind=none peer=\"ipv4:127.0.0.1:"));
  EXPECT_THAT(lines, HasSubstr("why=no_tls"));
}

// gRPC itself says "Socket closed" of all this.
TEST_F(GateTest, ARefusedHandshakeNamesTheFaultOnBothSides) {
  options_.tokens = "";
  Start();
  Authority other("other-ca");
  const absl::Time now = absl::Now();
  const IssuedPair good = authority_.IssueClient("spiffe://t/all"), revoked = authority_.IssueClient("spiffe://t/gone");
  const IssuedPair expired = authority_.Issue(
      "old", {.alternative_names = "DNS:old", .not_before = now - absl::Hours(2), .not_after = now - absl::Hours(1)});
  const IssuedPair early =
      authority_.Issue("early", {.alternative_names = "DNS:early", .not_before = now + absl::Hours(1)});
  WriteText(dir_ / "crl/ca.pem", authority_.Revocations({revoked.serial}));
  Reload();
  const model::Address server = *model::ParseAddress(rpc_->address(), model::AddressUse::kConnect);
  const auto probe = [&](const std::string& ca, const IssuedPair& pair) {
    return model::ProbeTls(server, {ca, pair.certificate, pair.key, ""}, absl::Now() + absl::Seconds(20));
  };
  EXPECT_EQ(probe(trusted_, good), absl::OkStatus());
  const std::tuple<IssuedPair, Denial, std::string, std::string> clients[] = {
      {{}, Denial::kNoCertificate, "this client shows no certificate", "the client sent none"},
      {expired, Denial::kCertificateExpired, "the client's certificate has expired", "/CN=old"},
      {early, Denial::kCertificateEarly, "the client's certificate is not valid yet", "/CN=early"},
      {other.IssueClient("spiffe://t/all"), Denial::kUnknownCa, "by another CA", "issued by /CN=other-ca"},
      {revoked, Denial::kCertificateRevoked, "its log says why", "certificate revoked"}};
  for (const auto& [pair, why, told, logged] : clients) {
    SCOPED_TRACE(told);
    const absl::Status status = probe(trusted_, pair);
    EXPECT_EQ(model::ReasonOf(status), model::kTls) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr(told), HasSubstr("it wants a client's certificate by /CN=ca"), HasSubstr("the client shows")));
    EXPECT_EQ(guard_->counters().denials[static_cast<size_t>(why)], 1u);
    ASSERT_TRUE(guard_->DrainAudit(absl::Minutes(1)));
    std::ifstream audit(options_.audit_log);
    const std::string lines((std::istreambuf_iterator<char>(audit)), {});
    EXPECT_THAT(lines,
                AllOf(HasSubstr("call=handshake"),
                      HasSubstr(absl::StrCat("why=", kDenialNames[static_cast<size_t>(why)])), HasSubstr(logged)));
    EXPECT_EQ(Identify(ConnectWith(pair)), grpc::StatusCode::UNAVAILABLE) << "nobody gets past the handshake";
  }
  const auto expect = [](const absl::Status& status, const std::string& told) {
    EXPECT_EQ(model::ReasonOf(status), model::kTls) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(told));
  };
  expect(probe("", {}),
         "the server speaks TLS, and this client has no `ca`; the server shows /CN=server for DNS:localhost");
  expect(probe(other.certificate(), good), "wanted one for 127.0.0.1");
  Install(authority_.Issue("elsewhere", {.alternative_names = "DNS:elsewhere.example"}));
  Reload();
  absl::Status elsewhere = probe(trusted_, good);
  for (const absl::Time end = absl::Now() + absl::Minutes(1); elsewhere.ok() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(100));
    elsewhere = probe(trusted_, good);
  }
  expect(elsewhere, "the server shows /CN=elsewhere for DNS:elsewhere.example, issued by /CN=ca");
  rpc_.reset();
  EXPECT_EQ(probe(trusted_, good), absl::OkStatus()) << "nobody is there: nothing is known";
}

TEST_F(GateTest, AServerInTheClearIsNamedToAClientWithACa) {
  options_.tls = {};
  Start();
  const model::Address server = *model::ParseAddress(rpc_->address(), model::AddressUse::kConnect);
  const absl::Time soon = absl::Now() + absl::Seconds(20);
  EXPECT_THAT(std::string(model::ProbeTls(server, {trusted_, "", "", ""}, soon).message()),
              HasSubstr("the server answers in the clear"));
  EXPECT_EQ(model::ProbeTls(server, {}, soon), absl::OkStatus());
}

// The same of etcd, whose clients hear nothing else of it.
TEST_F(GateTest, AClientOfEtcdIsToldWhichCertificateWasWantedAndShown) {
  Start();
  const auto list = [this](const std::string& parts) {
    const auto url = registry::ParseRegistryUrl(absl::StrCat("etcd://", rpc_->address(), "/prefix", parts));
    EXPECT_TRUE(url.ok()) << url.status();
    const absl::Status status = registry::Registry(*url).List(absl::Now() + absl::Seconds(20)).status();
    EXPECT_EQ(model::ReasonOf(status), model::kServerDown) << "it may be mended";
    return std::string(status.message());
  };
  WriteText(dir_ / "other.crt", Authority("other-ca").certificate());
  EXPECT_THAT(list(absl::StrCat("?ca=", dir_ / "other.crt")),
              AllOf(HasSubstr("does not answer: "), HasSubstr("by /CN=other-ca (`ca`); the server shows /CN=server")));
  EXPECT_THAT(list(""), HasSubstr("the server speaks TLS, and this client has no `ca`"));
}

// Servers ask for chunks with their own certificates or tokens, and read the files anew when these change.
TEST_F(GateTest, AServerCopiesChunksWithItsOwnCertificateOrToken) {
  Start();
  const auto paths = [this](const std::string& identity) {
    const IssuedPair pair = authority_.IssueClient("spiffe://t/" + identity);
    WriteText(dir_ / "own.crt", pair.certificate);
    WriteText(dir_ / "own.key", pair.key);
    return model::Access{.ca = options_.tls.client_ca, .certificate = dir_ / "own.crt", .key = dir_ / "own.key"};
  };
  v1::Member member;
  member.set_server_id(server_->server_id());
  member.set_disk(server_->disk());
  member.set_address(rpc_->address());
  const auto fetch = [&](ChunkClient* client, const std::string& job) {
    v1::ExportRequest request;
    request.set_job(job);
    Answer<v1::ExportResponse> answer;
    client->Fetch(request, member, absl::Now() + absl::Minutes(1), answer.reply());
    return model::ReasonOf(answer.Wait().status());
  };
  ChunkClient client(paths("copy"));
  EXPECT_EQ(fetch(&client, "a-1"), model::kUnknownJob) << "let in: there is no such job";
  EXPECT_EQ(fetch(&client, "b-1"), model::kNoRight);
  paths("train");
  const absl::Time end = absl::Now() + absl::Minutes(1);
  while (fetch(&client, "a-1") != model::kNoRight && absl::Now() < end) absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(fetch(&client, "a-1"), model::kNoRight) << "the new certificate may train, and not copy";
  // The token counts before the certificate.
  WriteText(dir_ / "token", "abc");
  model::Access with_token = paths("copy");
  with_token.token_file = dir_ / "token";
  ChunkClient by_token(with_token);
  EXPECT_EQ(fetch(&by_token, "a-1"), model::kNoRight);
  ChunkClient bare{model::Access{.ca = options_.tls.client_ca}};
  EXPECT_EQ(fetch(&bare, "a-1"), model::kNoIdentity);
  // Without TLS there is no way in, and a token is not sent in the clear.
  member.set_address("192.0.2.1:7070");
  ChunkClient clear{model::Access{.token_file = dir_ / "token"}};
  EXPECT_EQ(fetch(&clear, "a-1"), model::kBadConfig);
}

TEST_F(GateTest, ATokenInTheClearIsRefusedToOthersThanThisMachine) {
  const std::string outside = OutsideAddress();
  if (outside.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  options_.tls = {};
  const auto call = [this] {
    std::string answer;
    const auto channel = grpc::CreateChannel(rpc_->address(), grpc::InsecureChannelCredentials());
    return FromGrpc(RawCall(channel, "/ballast.v1.StateService/Identify", "", &answer, "Bearer abc"));
  };
  Start();
  EXPECT_EQ(call(), absl::OkStatus());
  rpc_.reset();
  server_.Restart();
  Start(outside + ":0");
  const absl::Status refused = call();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("a token came in the clear from ipv4:" + outside));
  EXPECT_EQ(guard_->counters().denials[static_cast<size_t>(Denial::kTokenInClear)], 1u);
}

}  // namespace
}  // namespace ballast::services
