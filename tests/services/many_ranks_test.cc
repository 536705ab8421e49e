// What a server does for a job of many ranks: its cost follows what the job does, not how many ranks watch. Each test
// prints what it took; it asserts counts and sizes.
#include <malloc.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <new>

#include "ballast/proto/model/step_header.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace {

// What this thread has allocated.
thread_local uint64_t allocated_bytes = 0;

}  // namespace

void* operator new(size_t bytes) {
  allocated_bytes += bytes;
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace ballast::services {
namespace {

constexpr uint32_t kRanks = 1000;
constexpr int kUnits = 262;

// So many units that 1,000 ranks have 262,000 slices of them.
std::vector<TestTensor> ManySlices() {
  std::vector<TestTensor> tensors;
  for (int i = 0; i < kUnits; ++i) {
    tensors.push_back(
        {absl::StrCat("t", i), absl::StrCat("u", i), uint64_t{kRanks} * 256, static_cast<uint32_t>(i % 2)});
  }
  return tensors;
}

absl::Duration CpuOfProcess() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return absl::DurationFromTimeval(usage.ru_utime) + absl::DurationFromTimeval(usage.ru_stime);
}

class ManyRanksTest : public RpcTest {
 protected:
  ManyRanksTest() {
    server_.options().budget.dram = uint64_t{8} << 30;
    server_.Restart();
  }

  // A seal that waits at the server.
  struct Sealing {
    grpc::ClientContext context;
    v1::SealResponse response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::SealResponse>> call;
  };
  Sealing* BeginSeal(const v1::SealRequest& request) {
    Sealing& sealing = sealings_.emplace_back();
    NameTarget(*server_.get(), &sealing.context);
    sealing.call = state_->AsyncSeal(&sealing.context, request, &queue_);
    sealing.call->Finish(&sealing.response, &sealing.status, &sealing);
    return &sealing;
  }
  Sealing* NextSealed() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) ? static_cast<Sealing*>(tag) : nullptr;
  }
  // Waits until so many seals have been evaluated, once as they came and once as they were filed, and wait. One that
  // found the job's lock taken waits before it is evaluated.
  void AwaitSeals(uint64_t count) {
    const absl::Time patience = absl::Now() + absl::Minutes(2);
    const auto all = [&] {
      return server_->counters().evaluated_seals >= 2 * count && server_->counters().waiting_requests == count;
    };
    bool wait = false;
    while (!(wait = all()) && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_TRUE(wait) << server_->counters().waiting_requests.load() << " of " << count;
  }

  grpc::CompletionQueue queue_;
  std::deque<Sealing> sealings_;
};

TEST_F(ManyRanksTest, AStaleSealWakesNobody) {
  TrainerGroup other({server_.get()}, MakeSpec("other", SmallModel()), 1);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  TrainerGroup group({server_.get()}, MakeSpec("job", ManySlices()), kRanks, /*epoch_counter=*/2);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_GE(group.plan().slices().size(), 262'000u);
  v1::SealRequest seal = group.SealOf(0, ValuesHeader(kUnits), /*wait_ms=*/600'000);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    seal.set_rank(rank);
    BeginSeal(seal);
  }
  AwaitSeals(kRanks);
  const uint64_t evaluated = server_->counters().evaluated_seals;

  seal.mutable_epoch()->set_counter(1);
  Sealing* const stale = BeginSeal(seal);
  // Others ask about the job meanwhile: all of gRPC's threads would stand at its lock.
  std::vector<std::thread> asking;
  v1::GetJobRequest get_job;
  get_job.set_job("job");
  get_job.set_without_open(true);
  for (int i = 0; i < 20; ++i) {
    asking.emplace_back([&] {
      v1::GetJobResponse answer;
      EXPECT_EQ(Call(&v1::StateService::Stub::GetJob, get_job, &answer), absl::OkStatus());
    });
  }
  v1::GetJobRequest of_other;
  of_other.set_job("other");
  const absl::Time asked = absl::Now();
  absl::Duration longest;
  for (int i = 0; i < 20; ++i) {
    const absl::Time began = absl::Now();
    v1::GetJobResponse answer;
    EXPECT_EQ(Call(&v1::StateService::Stub::GetJob, of_other, &answer), absl::OkStatus());
    longest = std::max(longest, absl::Now() - began);
  }
  std::cout << "longest GetJob of another job beside a stale seal, " << kRanks << " seals that wait, "
            << group.plan().slices().size() << " slices: " << longest << " of 20 in " << absl::Now() - asked << "\n";
  EXPECT_EQ(NextSealed(), stale);
  EXPECT_EQ(model::ReasonOf(FromGrpc(stale->status)), model::kStaleEpoch);
  for (std::thread& thread : asking) thread.join();
  EXPECT_EQ(server_->counters().evaluated_seals, evaluated + 1) << "a refusal looked at the seals that wait";
  EXPECT_EQ(server_->counters().told_pending, 0u);
  EXPECT_EQ(server_->counters().waiting_requests, kRanks);
  rpc_->Stop(absl::ZeroDuration());
  for (uint32_t rank = 0; rank < kRanks; ++rank) ASSERT_NE(NextSealed(), nullptr);
}

// What the step waits for is looked up once, and each rank hears of its own slices.
TEST_F(ManyRanksTest, EachRankHearsOfItsOwnSlices) {
  TrainerGroup group({server_.get()}, MakeSpec("job", ManySlices()), kRanks);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  v1::SealRequest seal = group.SealOf(0, ValuesHeader(kUnits), /*wait_ms=*/0);
  const absl::Duration began = CpuOfProcess();
  for (uint32_t rank = 0; rank < kRanks; rank += 2) {
    seal.set_rank(rank);
    Answer<v1::SealResponse> answer;
    server_->Seal(seal, absl::Now() + absl::Minutes(1), answer.reply());
    const auto response = answer.Wait();
    ASSERT_TRUE(response.ok()) << response.status();
    const v1::SealResponse::Pending& pending = response->pending();
    ASSERT_EQ(pending.missing_count(), group.plan().slices().size());
    ASSERT_EQ(static_cast<size_t>(pending.missing_size()), group.plan().slices_of_rank(rank).size());
    for (const v1::RankRange& range : pending.missing()) ASSERT_EQ(range.rank(), rank);
    ASSERT_EQ(pending.unsealed_count(), kRanks - rank / 2 - 1);
    ASSERT_EQ(pending.unsealed_ranks_size(), 16);
    ASSERT_EQ(pending.unsealed_ranks(0), 1u);
  }
  std::cout << "CPU of " << kRanks / 2 << " answers about " << group.plan().slices().size()
            << " slices: " << CpuOfProcess() - began << "\n";
  EXPECT_EQ(server_->counters().told_pending, kRanks / 2);
}

// 4,096 ranks wait for one another, with blobs of no bytes and of 16. Their seals come over the wire's bytes, and the
// calls are direct: waiting_seals_test has what gRPC takes for them.
void WaitWithBlobs(TestServer* server, const std::vector<TestTensor>& model, size_t blob_bytes, uint64_t epoch) {
  constexpr uint32_t kMost = 4096;
  const auto tensors = static_cast<uint32_t>(model.size());
  TrainerGroup group({server->get()}, MakeSpec("job", model), kMost, epoch);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  if (group.step() == 0) {
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  }
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones), absl::OkStatus());
  AwaitIdle(server->get(), "job");
  const std::vector<std::string> blobs(kMost, std::string(blob_bytes, 'b'));
  v1::SealRequest seal = group.SealOf(1, UpdateHeader(tensors), /*wait_ms=*/600'000);
  seal.set_plan_hash(model::PlanHash(group.plan(), group.step(), 0, seal.header(), blobs));
  std::vector<std::string> sent(kMost);
  for (uint32_t rank = 0; rank < kMost; ++rank) {
    seal.set_rank(rank);
    if (rank == 0) seal.mutable_blobs()->Assign(blobs.begin(), blobs.end());
    sent[rank] = seal.SerializeAsString();
    seal.clear_blobs();
  }
  std::vector<model::SealAnswer> answers(kMost);
  std::atomic<uint32_t> answered = 0;
  const absl::Duration cpu = CpuOfProcess();
  const size_t heap = mallinfo2().uordblks;
  size_t heap_of_waiting = 0;
  for (uint32_t rank = 0; rank < kMost; ++rank) {
    if (rank + 1 == kMost) {
      heap_of_waiting = mallinfo2().uordblks - heap;
      EXPECT_EQ(server->get()->counters().waiting_requests, kMost - 1);
      EXPECT_LT(server->get()->counters().waiting_request_bytes, uint64_t{1} << 20);
    }
    v1::SealRequest come;
    ASSERT_TRUE(come.ParseFromString(sent[rank]));
    server->get()->Seal(come, absl::InfiniteFuture(), [&, rank](absl::StatusOr<model::SealAnswer> answer) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      answers[rank] = *answer;
      ++answered;
    });
  }
  const absl::Time patience = absl::Now() + absl::Minutes(1);
  while (answered < kMost && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
  ASSERT_EQ(answered, kMost);
  const auto one_answer = answers[1]->bytes().size() + (*answers[1])->SpaceUsedLong();
  const size_t heap_of_answers = mallinfo2().uordblks - heap;
  std::cout << kMost << " ranks, " << tensors << " tensors, blobs of " << blob_bytes << " bytes: heap of waiting seals "
            << heap_of_waiting << " bytes, with all answers " << heap_of_answers << " bytes, of which one takes "
            << one_answer << ", CPU of the step's seals " << CpuOfProcess() - cpu << "\n";
  EXPECT_LT(heap_of_answers, (size_t{64} << 20) + 4 * one_answer) << "an answer is held once, not by each rank";
  EXPECT_LT(heap_of_waiting, size_t{64} << 20);
  ASSERT_TRUE((*answers[0])->has_prepared());
  EXPECT_EQ((*answers[0])->prepared().blobs_size(), static_cast<int>(kMost));
  EXPECT_EQ((*answers[1])->prepared().blobs_size(), 0);
  for (uint32_t rank = 2; rank < kMost; ++rank) ASSERT_EQ(answers[rank], answers[1]) << "rank " << rank;
}

TEST(ManyRanks, SealsAreNotQuadratic) {
  TestServer server("s");
  WaitWithBlobs(&server, SmallModel(), 0, 1);
  WaitWithBlobs(&server, SmallModel(), 16, 2);
}

TEST(ManyRanks, AnswersOfManyTensorsAreHeldOnce) {
  std::vector<TestTensor> tensors;
  for (uint32_t i = 0; i < 32'768; ++i)
    tensors.push_back({absl::StrCat("t", i), absl::StrCat("u", i / 1024), 256, i % 2});
  TestServer server("s", {0, uint64_t{1} << 30, 0});
  WaitWithBlobs(&server, tensors, 0, 1);
}

// Scrapes and fences with a quota ask for the status of all jobs: it copies nothing of a job's size.
TEST(ManyTensors, AStatusCopiesNoOpen) {
  std::vector<TestTensor> tensors;
  for (uint32_t i = 0; i < 20'000; ++i) tensors.push_back({absl::StrCat("tensor", i), "u", 256, i % 2});
  TestServer server("s", {0, uint64_t{1} << 30, 0});
  TrainerGroup group({server.get()}, MakeSpec("job", tensors), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  const uint64_t before = allocated_bytes;
  const v1::GetServerStatusResponse status = server->Status();
  std::cout << "a status of a job of 20,000 tensors allocates " << allocated_bytes - before << " bytes\n";
  EXPECT_LT(allocated_bytes - before, 100'000u);
  ASSERT_EQ(status.jobs_size(), 1);
  EXPECT_EQ(status.jobs(0).world_size(), 1u);
  v1::GetJobRequest request;
  request.set_job("job");
  request.set_without_open(true);
  Answer<v1::GetJobResponse> brief, whole;
  server->GetJob(request, brief.reply());
  EXPECT_FALSE(brief.Wait()->has_open());
  request.set_without_open(false);
  server->GetJob(request, whole.reply());
  EXPECT_EQ(whole.Wait()->open().spec().registrations(0).tensors_size(), 20'000);
}

}  // namespace
}  // namespace ballast::services
