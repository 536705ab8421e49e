// How sessions begin, continue and end each other.
#include <gmock/gmock.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/session.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/services/answer.h"
#include "ballast/tests/services/machine_with_disk.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const char* reason,
                  const std::vector<std::string>& texts) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(model::ReasonOf(status), reason) << status;
  for (const std::string& text : texts) EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

class SessionOpen : public ::testing::Test {
 protected:
  SessionOptions Options(Resume resume) const {
    SessionOptions options = TestOptions();
    options.resume = resume;
    return options;
  }
  // Opens with W ranks and does nothing else.
  absl::Status OpenOnly(int world_size, const SessionOptions& options, const std::vector<TensorSpec>& tensors) {
    return SessionFixture::RunRanks(
        world_size, [&](Collective* collective) { return servers_.Open(collective, options, tensors).status(); });
  }
  // A job at version `steps`.
  absl::Status Create(int world_size, int64_t steps) {
    return SessionFixture::RunRanks(world_size, [&](Collective* collective) -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, TestOptions(), TestTensors()));
      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
      for (int64_t step = 1; step <= steps; ++step) {
        StepOptions options = TestStep();
        options.blob = absl::StrCat("rank ", session->rank(), " step ", step);
        BALLAST_RETURN_IF_ERROR(TrainStep(*session, step, options).status());
      }
      return absl::OkStatus();
    });
  }

  SessionFixture servers_{2};
};

TEST_F(SessionOpen, NeverRefusesAnExistingJobAndNamesTheChoices) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  ExpectStatus(OpenOnly(2, Options(Resume::kNever), TestTensors()), absl::StatusCode::kAlreadyExists, model::kJobExists,
               {"'test'", "version 1", "never", "auto", "must"});
  // Refused without harm.
  EXPECT_EQ(OpenOnly(1, Options(Resume::kMust), TestTensors()), absl::OkStatus());
}

TEST_F(SessionOpen, MustRefusesAMissingJob) {
  ExpectStatus(OpenOnly(2, Options(Resume::kMust), TestTensors()), absl::StatusCode::kNotFound, model::kJobMissing,
               {"must", "'test'", "auto"});
  EXPECT_EQ(OpenOnly(2, Options(Resume::kAuto), TestTensors()), absl::OkStatus());
}

TEST_F(SessionOpen, ResumeContinuesWithAnyWorldSizeAndGivesBlobsBack) {
  ASSERT_EQ(Create(2, 2), absl::OkStatus());
  Reference reference(TestTensors());
  reference.Step(1, TestStep());
  reference.Step(2, TestStep());
  int64_t step = 2;
  size_t sealed_by = 2;
  for (const int world : {3, 1, 4}) {
    ++step;
    Reference next = reference;
    next.Step(step, TestStep());
    EXPECT_EQ(SessionFixture::RunRanks(world,
                                       [&](Collective* collective) -> absl::Status {
                                         BALLAST_ASSIGN_OR_RETURN(
                                             auto session,
                                             servers_.Open(collective, Options(Resume::kAuto), TestTensors()));
                                         if (session->version() != step - 1 || session->needs_values())
                                           return absl::InternalError("version");
                                         const auto& blobs = session->resumed_blobs();
                                         if (blobs.size() != sealed_by) return absl::InternalError("count of blobs");
                                         for (size_t r = 0; r < blobs.size(); ++r) {
                                           if (blobs[r] != absl::StrCat("rank ", r, " step ", step - 1))
                                             return absl::InternalError(blobs[r]);
                                         }
                                         Reference before = reference;
                                         BALLAST_RETURN_IF_ERROR(before.Compare(*session, step - 1));
                                         BALLAST_RETURN_IF_ERROR(collective->Exchange("read").status());
                                         StepOptions options = TestStep();
                                         options.blob = absl::StrCat("rank ", session->rank(), " step ", step);
                                         BALLAST_RETURN_IF_ERROR(TrainStep(*session, step, options).status());
                                         Reference after = next;
                                         return after.Compare(*session, step);
                                       }),
              absl::OkStatus())
        << "world " << world;
    reference = next;
    sealed_by = static_cast<size_t>(world);
  }
}

// Fences one server alone, so many times as far as a single fence may go.
absl::Status FenceFar(services::StateServer* server, uint64_t times) {
  for (uint64_t i = 1; i <= times; ++i) {
    v1::FenceRequest request;
    request.set_job("test");
    request.mutable_epoch()->set_counter(i * model::kEpochsSkippedMax);
    request.set_protocol_version(model::kProtocolVersion);
    services::Answer<v1::FenceResponse> answer;
    server->Fence(request, absl::InfiniteFuture(), answer.reply());
    BALLAST_RETURN_IF_ERROR(answer.Wait().status());
  }
  return absl::OkStatus();
}

v1::GetJobResponse JobOf(services::StateServer* server) {
  v1::GetJobRequest request;
  request.set_job("test");
  services::Answer<v1::GetJobResponse> answer;
  server->GetJob(request, answer.reply());
  return *answer.Wait();
}

uint64_t PromisedBy(services::StateServer* server) { return JobOf(server).promised().counter(); }

// Servers that never change: what came with tables, copies and groups' names is in no Open.
TEST_F(SessionOpen, WithoutARegistryAnOpenHasNoneOfTheFieldsOfMembersThatChange) {
  ASSERT_EQ(Create(2, 1), absl::OkStatus());
  ASSERT_EQ(OpenOnly(1, Options(Resume::kMust), TestTensors()), absl::OkStatus());
  for (int i = 0; i < 2; ++i) {
    const v1::OpenRequest open = JobOf(servers_.server(i)).open();
    EXPECT_FALSE(open.has_table());
    EXPECT_EQ(open.group(), "");
    EXPECT_EQ(open.tensor_steps_size(), 0);
    EXPECT_FALSE(open.continues());
    ASSERT_EQ(open.members_size(), 2);
    for (const v1::Member& member : open.members()) {
      v1::Member known;
      known.set_server_id(member.server_id());
      known.set_weight(member.weight());
      EXPECT_EQ(member.SerializeAsString(), known.SerializeAsString());
    }
  }
}

TEST_F(SessionOpen, AServerWhosePromiseLiesFarBehindIsFencedInSteps) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  ASSERT_EQ(FenceFar(servers_.server(0), 3), absl::OkStatus());
  EXPECT_EQ(OpenOnly(2, Options(Resume::kMust), TestTensors()), absl::OkStatus());
  for (int i = 0; i < 2; ++i) EXPECT_EQ(PromisedBy(servers_.server(i)), 3 * model::kEpochsSkippedMax + 1) << i;
}

TEST_F(SessionOpen, AJobThatOnlyOneServerHasPromisedFarBeginsAllTheSame) {
  ASSERT_EQ(FenceFar(servers_.server(1), 2), absl::OkStatus());
  EXPECT_EQ(Create(2, 1), absl::OkStatus());
}

TEST_F(SessionOpen, PromisesTooFarApartAreRefusedBeforeAnyFence) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  const uint64_t before = PromisedBy(servers_.server(1));
  ASSERT_EQ(FenceFar(servers_.server(0), 66), absl::OkStatus());
  ExpectStatus(OpenOnly(1, Options(Resume::kAuto), TestTensors()), absl::StatusCode::kFailedPrecondition,
               model::kBadRequest, {"promised epoch 1 of job 'test'", "64 fences", "who fences", "drop the job"});
  EXPECT_EQ(PromisedBy(servers_.server(1)), before);
}

TEST_F(SessionOpen, ServersInAnotherOrderAreTheSameServers) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  EXPECT_EQ(SessionFixture::RunRanks(2,
                                     [&](Collective* collective) -> absl::Status {
                                       auto servers = servers_.Connect();
                                       if (collective->rank() == 1) std::swap(servers[0], servers[1]);
                                       BALLAST_ASSIGN_OR_RETURN(auto session,
                                                                Session::Open(Options(Resume::kMust), TestTensors(),
                                                                              std::move(servers), collective));
                                       BALLAST_RETURN_IF_ERROR(TrainStep(*session, 2).status());
                                       Reference reference(TestTensors());
                                       reference.Step(1, TestStep());
                                       reference.Step(2, TestStep());
                                       return reference.Compare(*session, 2);
                                     }),
            absl::OkStatus());
}

struct Traffic {
  std::atomic<int> identifies{0};
  std::atomic<int> jobs{0};   // answers of GetJob
  std::atomic<int> opens{0};  // answers of GetJob and Fence that carry the job's Open
};

class CountingTransport final : public ForwardingTransport {
 public:
  CountingTransport(std::unique_ptr<Transport> server, Traffic* traffic)
      : ForwardingTransport(std::move(server)), traffic_(traffic) {}
  void Identify(const v1::IdentifyRequest& r, absl::Time t, Callback<v1::IdentifyResponse> done) override {
    ++traffic_->identifies;
    ForwardingTransport::Identify(r, t, std::move(done));
  }
  void GetJob(const v1::GetJobRequest& r, absl::Time t, Callback<v1::GetJobResponse> done) override {
    ++traffic_->jobs;
    ForwardingTransport::GetJob(r, t, [this, done](absl::StatusOr<v1::GetJobResponse> answer) {
      if (answer.ok() && answer->has_open()) ++traffic_->opens;
      done(std::move(answer));
    });
  }
  void Fence(const v1::FenceRequest& r, absl::Time t, Callback<v1::FenceResponse> done) override {
    ForwardingTransport::Fence(r, t, [this, done](absl::StatusOr<v1::FenceResponse> answer) {
      if (answer.ok() && answer->job().has_open()) ++traffic_->opens;
      done(std::move(answer));
    });
  }

 private:
  Traffic* const traffic_;
};

// The Open of a large job has megabytes. Rank 0 fetches it, and the ranks share it.
TEST_F(SessionOpen, OnlyRankZeroFetchesTheOpen) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  constexpr int kRanks = 3, kServers = 2;
  Traffic opening[kRanks], later[kRanks];
  EXPECT_EQ(SessionFixture::RunRanks(
                kRanks,
                [&](Collective* collective) -> absl::Status {
                  Traffic& traffic = opening[collective->rank()];
                  std::vector<std::unique_ptr<Transport>> servers;
                  for (auto& server : servers_.Connect()) {
                    servers.push_back(std::make_unique<CountingTransport>(std::move(server), &traffic));
                  }
                  BALLAST_ASSIGN_OR_RETURN(auto session, Session::Open(Options(Resume::kMust), TestTensors(),
                                                                       std::move(servers), collective));
                  later[collective->rank()].opens = -traffic.opens;
                  BALLAST_RETURN_IF_ERROR(session->TensorSteps("layer.up", 1).status());
                  BALLAST_RETURN_IF_ERROR(session->DurablePins().status());
                  later[collective->rank()].opens += traffic.opens;
                  return absl::OkStatus();
                }),
            absl::OkStatus());
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(opening[rank].identifies, kServers) << "rank " << rank;
    // Asked before the fence, and told with the promise.
    EXPECT_EQ(opening[rank].opens, rank == 0 ? 2 * kServers : 0) << "rank " << rank;
    EXPECT_GT(opening[rank].jobs, 0) << "rank " << rank << " counts nothing";
    EXPECT_EQ(later[rank].opens, 0) << "step counts and pins came with an Open for rank " << rank;
  }
}

TEST_F(SessionOpen, AServerNamedTwiceIsToldToEveryRank) {
  for (int twice = 0; twice < 2; ++twice) {
    SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
      auto servers = servers_.Connect();
      if (collective->rank() == twice) servers[1] = std::move(servers_.Connect()[0]);
      ExpectStatus(Session::Open(TestOptions(), TestTensors(), std::move(servers), collective).status(),
                   absl::StatusCode::kInvalidArgument, model::kBadSpec, {"server 's0' is named twice"});
      return absl::OkStatus();
    }).IgnoreError();
  }
}

class TransportOfVersion final : public ForwardingTransport {
 public:
  TransportOfVersion(std::unique_ptr<Transport> server, uint32_t version)
      : ForwardingTransport(std::move(server)), version_(version) {}
  void Identify(const v1::IdentifyRequest& r, absl::Time t, Callback<v1::IdentifyResponse> done) override {
    ForwardingTransport::Identify(r, t, [this, done](absl::StatusOr<v1::IdentifyResponse> answer) {
      if (answer.ok()) answer->set_protocol_version(version_);
      done(std::move(answer));
    });
  }

 private:
  const uint32_t version_;
};

// Refused before the fence: the group at work goes on.
TEST_F(SessionOpen, AServerOfAnotherVersionIsNamedToEveryRank) {
  std::atomic<int> told = 0;
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* working) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto first, servers_.Open(working, TestOptions(), TestTensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*first));
                  SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
                    auto servers = servers_.Connect();
                    servers[1] = std::make_unique<TransportOfVersion>(std::move(servers[1]), 41);
                    ExpectStatus(
                        Session::Open(Options(Resume::kAuto), TestTensors(), std::move(servers), collective).status(),
                        absl::StatusCode::kFailedPrecondition, model::kVersionsDiffer,
                        {"server 's1' at embedded speaks protocol version 41",
                         absl::StrCat("expected version ", model::kProtocolVersion),
                         "run the same version of Ballast on all servers and trainers"});
                    ++told;
                    return absl::OkStatus();
                  }).IgnoreError();
                  return TrainStep(*first, 1).status();
                }),
            absl::OkStatus());
  EXPECT_EQ(told, 2);
}

TEST_F(SessionOpen, TensorsThatDifferFromTheJobsAreNamed) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  std::vector<TensorSpec> tensors = TestTensors();
  tensors[2].shape = {701, 100};
  ExpectStatus(OpenOnly(2, Options(Resume::kAuto), tensors), absl::StatusCode::kInvalidArgument, model::kBadSpec,
               {"layer.up", "700", "701"});
  tensors = TestTensors();
  tensors.push_back({.name = "more", .unit = "layer", .shape = {4}});
  ExpectStatus(OpenOnly(1, Options(Resume::kAuto), tensors), absl::StatusCode::kInvalidArgument, model::kTensorsDiffer,
               {"more", "register others later"});
  tensors = TestTensors();
  tensors.pop_back();
  ExpectStatus(OpenOnly(1, Options(Resume::kAuto), tensors), absl::StatusCode::kInvalidArgument, model::kTensorsDiffer,
               {"layer.down"});
}

TEST_F(SessionOpen, AllNamesThatDifferAreInTheDetailsOnEveryRank) {
  ASSERT_EQ(Create(1, 1), absl::OkStatus());
  std::vector<TensorSpec> tensors = TestTensors();
  const std::string missing = tensors[1].name, missing_too = tensors[2].name;
  tensors.erase(tensors.begin() + 1, tensors.begin() + 3);
  tensors.push_back({.name = "more\nlines", .unit = "layer", .shape = {4}});
  tensors.push_back({.name = "more", .unit = "layer", .shape = {4}});
  std::vector<std::string> names = {missing, missing_too};
  std::sort(names.begin(), names.end());
  std::atomic<int> told = 0;
  SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    const absl::Status status = servers_.Open(collective, Options(Resume::kAuto), tensors).status();
    ExpectStatus(status, absl::StatusCode::kInvalidArgument, model::kTensorsDiffer, {"and 1 more"});
    const model::Details details = model::DetailsOf(status);
    EXPECT_EQ(details.at(model::kMissing), names[0] + std::string(1, '\0') + names[1]);
    EXPECT_EQ(details.at(model::kUnknown), std::string("more\nlines\0more", 15));
    ++told;
    return absl::OkStatus();
  }).IgnoreError();
  EXPECT_EQ(told, 2);
}

TEST_F(SessionOpen, AJobNameThatNoServerTakesIsRefusedByEveryRank) {
  for (const std::string name : {"my run", "", "a/b"}) {
    SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
      SessionOptions options = TestOptions();
      options.job = name;
      ExpectStatus(servers_.Open(collective, options, TestTensors()).status(), absl::StatusCode::kInvalidArgument,
                   model::kBadSpec, {"1 to 128 letters, digits"});
      return absl::OkStatus();
    }).IgnoreError();
  }
}

TEST_F(SessionOpen, RanksThatOpenDifferentThingsAreNamed) {
  const auto open = [&](const std::function<void(int, SessionOptions&, std::vector<TensorSpec>&)>& change) {
    return SessionFixture::RunRanks(2, [&](Collective* collective) {
      SessionOptions options = TestOptions();
      std::vector<TensorSpec> tensors = TestTensors();
      change(collective->rank(), options, tensors);
      return servers_.Open(collective, options, tensors).status();
    });
  };
  ExpectStatus(open([](int rank, auto& options, auto&) { options.resume = rank == 1 ? Resume::kMust : Resume::kAuto; }),
               absl::StatusCode::kInvalidArgument, model::kBadSpec, {"ranks 1 and 0", "resume=must"});
  ExpectStatus(open([](int rank, auto&, auto& tensors) {
                 if (rank == 1) tensors[0].shape = {1};
               }),
               absl::StatusCode::kInvalidArgument, model::kBadSpec, {"ranks 1 and 0", "embed.weight"});
  ExpectStatus(open([](int rank, auto&, auto& tensors) {
                 if (rank == 1) tensors[1].name = tensors[0].name;
               }),
               absl::StatusCode::kInvalidArgument, model::kBadSpec, {"rank 1", "embed.weight"});
}

TEST_F(SessionOpen, BudgetErrorReachesEveryRank) {
  SessionFixture small(2, uint64_t{1} << 20);
  for (int world = 1; world <= 2; ++world) {
    SessionFixture::RunRanks(world, [&](Collective* collective) -> absl::Status {
      const absl::Status status = small.Open(collective, TestOptions(), TestTensors()).status();
      ExpectStatus(status, absl::StatusCode::kResourceExhausted, model::kBudget, {"byte"});
      return absl::OkStatus();
    }).IgnoreError();
  }
}

std::vector<double> WeightsOf(services::StateServer* server) {
  std::vector<double> weights;
  const v1::OpenRequest open = JobOf(server).open();
  for (const v1::Member& member : open.members()) weights.push_back(member.weight());
  return weights;
}

TEST(SessionWeights, BudgetsWeighTheMembersOfANewJobAndThenStay) {
  SessionFixture servers(std::vector<uint64_t>{uint64_t{96} << 20, uint64_t{32} << 20});
  SessionOptions options = TestOptions();
  options.resume = Resume::kAuto;
  const auto open = [&](Collective* collective) { return servers.Open(collective, options, TestTensors()).status(); };
  ASSERT_EQ(SessionFixture::RunRanks(1, open), absl::OkStatus());
  const std::vector<double> weights = {96.0 / 1024, 32.0 / 1024};
  EXPECT_EQ(WeightsOf(servers.server(0)), weights);
  v1::SetBudgetRequest more;
  more.set_dram_bytes(uint64_t{128} << 20);
  services::Answer<v1::SetBudgetResponse> answer;
  servers.server(1)->SetBudget(more, answer.reply());
  ASSERT_EQ(answer.Wait().status(), absl::OkStatus());
  ASSERT_EQ(SessionFixture::RunRanks(1, open), absl::OkStatus());
  EXPECT_EQ(WeightsOf(servers.server(1)), weights) << "other weights would move the job's chunks";
}

TEST_F(SessionOpen, SecondGroupFencesTheFirst) {
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto first, servers_.Open(collective, TestOptions(), TestTensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*first));
                  BALLAST_RETURN_IF_ERROR(first->Push(0, OwnedGradient(*first, 0, 1)));
                  BALLAST_ASSIGN_OR_RETURN(auto second,
                                           servers_.Open(collective, Options(Resume::kMust), TestTensors()));
                  BALLAST_RETURN_IF_ERROR(TrainStep(*second, 1).status());
                  const absl::Status stale = TrainStep(*first, 1).status();
                  // The unit that was pushed is refused as pushed twice; Step hears of the fence.
                  EXPECT_EQ(model::ReasonOf(stale), model::kBadRequest) << stale;
                  const absl::Status step = first->Step(TestStep()).status();
                  EXPECT_EQ(model::ReasonOf(step), model::kStaleEpoch) << step;
                  const absl::Status after = first->Drop();
                  EXPECT_EQ(model::ReasonOf(after), model::kStaleEpoch) << after;
                  Reference reference(TestTensors());
                  reference.Step(1, TestStep());
                  BALLAST_RETURN_IF_ERROR(reference.Compare(*second, 1));
                  BALLAST_RETURN_IF_ERROR(TrainStep(*second, 2).status());
                  return absl::OkStatus();
                }),
            absl::OkStatus());
}

TEST_F(SessionOpen, RegisteredButNotInitialisedIsKnownAfterARestart) {
  const TensorSpec added = {.name = "adapter", .unit = "adapter", .shape = {50, 30}, .group = 1};
  EXPECT_EQ(SessionFixture::RunRanks(2,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(
                                           auto session, servers_.Open(collective, TestOptions(), TestTensors()));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       return session->Register({added});
                                     }),
            absl::OkStatus());
  std::vector<TensorSpec> tensors = TestTensors();
  tensors.push_back(added);
  EXPECT_EQ(SessionFixture::RunRanks(1,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(
                                           auto session, servers_.Open(collective, Options(Resume::kMust), tensors));
                                       EXPECT_TRUE(session->needs_values());
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       EXPECT_FALSE(session->needs_values());
                                       Reference reference(tensors);
                                       return reference.Compare(*session, 1);
                                     }),
            absl::OkStatus());
}

TEST(SessionConnect, ServerThatIsDownIsNamedToEveryRank) {
  SessionFixture servers(1);
  auto rpc = services::RpcServer::Start({}, servers.server(0));
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  const std::string down = "127.0.0.1:1";
  std::vector<absl::Status> told(2);
  const auto of_the_other = [&](const absl::Status& status) {
    return absl::IsUnavailable(status) && absl::StrContains(status.message(), absl::StrCat("server ", down, ":"));
  };
  // On a busy machine the server that runs may need longer than the session waits for the other.
  for (absl::Duration wait = absl::Milliseconds(700);
       wait < absl::Minutes(1) && !std::all_of(told.begin(), told.end(), of_the_other); wait *= 4) {
    SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
      SessionOptions options = TestOptions();
      options.open_timeout = wait;
      told[static_cast<size_t>(collective->rank())] =
          Session::Connect(options, TestTensors(), {(*rpc)->address(), down}, collective).status();
      return absl::OkStatus();
    }).IgnoreError();
  }
  for (const absl::Status& status : told) {
    ExpectStatus(status, absl::StatusCode::kUnavailable, model::kServerDown, {down, "no answer within"});
  }
}

// gRPC itself answers UNIMPLEMENTED, as a server does that has the service without the call.
TEST(SessionConnect, AServerThatDoesNotKnowIdentifyIsOfAnOlderVersion) {
  SessionFixture servers(1);
  auto rpc = services::RpcServer::Start({}, servers.server(0));
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  grpc::CallbackGenericService nothing;  // every call is unimplemented
  builder.RegisterCallbackGenericService(&nothing);
  const std::unique_ptr<grpc::Server> older = builder.BuildAndStart();
  ASSERT_NE(older, nullptr);
  const std::string address = absl::StrCat("127.0.0.1:", port);
  SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    const absl::Status status =
        Session::Connect(TestOptions(), TestTensors(), {(*rpc)->address(), address}, collective).status();
    ExpectStatus(status, absl::StatusCode::kFailedPrecondition, model::kVersionsDiffer,
                 {absl::StrCat("server ", address, " speaks protocol version 0 (it does not know Identify)"),
                  absl::StrCat("expected version ", model::kProtocolVersion),
                  "run the same version of Ballast on all servers and trainers"});
    return absl::OkStatus();
  }).IgnoreError();
}

TEST(SessionConnect, RefusesWhatIsNoAddress) {
  const auto group = MakeLoopbackGroup(1);
  ExpectStatus(
      Session::Connect(TestOptions(), TestTensors(), {"127.0.0.1:1", "localhost:99999"}, group.front().get()).status(),
      absl::StatusCode::kInvalidArgument, model::kBadConfig, {"'localhost:99999' has no port from 1 to 65535"});
}

// A disk that needs so long for a job's log.
class SlowLogs : public services::MachineWithDisk {
 public:
  explicit SlowLogs(absl::Duration time) : time_(time) {}

 private:
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> Open(const std::string& path, Mode mode) override {
    if (absl::StrContains(path, "/log-")) absl::SleepFor(time_);
    return storage::SystemDisk()->Open(path, mode);
  }

  const absl::Duration time_;
};

// Opens a new job whose log takes three times as long as the session waits for servers that are down.
absl::Status OpenOnSlowLogs(absl::Duration wait) {
  SlowLogs foundation(3 * wait);
  const ScratchDirectory directory;
  services::StateServerOptions server;
  server.data_directory = directory.path();
  server.server_id = "s";
  server.budget = {0, uint64_t{64} << 20, uint64_t{512} << 20};
  server.foundation = &foundation;
  BALLAST_ASSIGN_OR_RETURN(const auto state, services::StateServer::Start(server));
  BALLAST_ASSIGN_OR_RETURN(const auto rpc, services::RpcServer::Start({}, state.get()));
  return SessionFixture::RunRanks(2, [&](Collective* collective) {
    SessionOptions options = TestOptions();
    options.durability = v1::DURABILITY_STEP;
    options.open_timeout = wait;
    return Session::Connect(options, TestTensors(), {rpc->address()}, collective).status();
  });
}

TEST(SessionConnect, AServerThatWritesAJobsLogIsNotDown) {
  // On a busy machine all else may take longer than the session waits.
  absl::Status opened = absl::UnknownError("not tried");
  for (absl::Duration wait = absl::Milliseconds(500); wait < absl::Seconds(10) && !opened.ok(); wait *= 4) {
    opened = OpenOnSlowLogs(wait);
  }
  EXPECT_EQ(opened, absl::OkStatus());
}

TEST(SessionConnect, TrainsOverGrpc) {
  SessionFixture servers(2);
  std::vector<std::unique_ptr<services::RpcServer>> rpcs;
  std::vector<std::string> addresses;
  for (int i = 0; i < 2; ++i) {
    auto rpc = services::RpcServer::Start({}, servers.server(i));
    ASSERT_TRUE(rpc.ok()) << rpc.status();
    addresses.push_back((*rpc)->address());
    rpcs.push_back(*std::move(rpc));
  }
  EXPECT_EQ(SessionFixture::RunRanks(2,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(
                                           auto session,
                                           Session::Connect(TestOptions(), TestTensors(), addresses, collective));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       Reference reference(TestTensors());
                                       for (int64_t step = 1; step <= 3; ++step) {
                                         BALLAST_RETURN_IF_ERROR(TrainStep(*session, step).status());
                                         reference.Step(step, TestStep());
                                       }
                                       BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 3));
                                       return collective->Exchange("done").status();
                                     }),
            absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
