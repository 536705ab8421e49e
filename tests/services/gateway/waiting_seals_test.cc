// What 4,096 ranks that wait for one another cost a server, over the real wire: the server has a process of its own, so
// that memory and processor time are the server's alone. The memory is judged, the processor time printed.
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

constexpr uint32_t kMost = 4096;
// More than the 64 MiB that one would like: of a call that waits gRPC 1.51 itself takes 16.8 KiB, which is 67 MiB of
// all. 11.4 are the call's first arena, 3.1 what that has no room for, 1.4 the context, 0.9 metadata. The filters that
// settings turn off (idle age, deadlines, compression) are 0.75 of them. The server adds less than 2 KiB.
constexpr uint64_t kWaitingBytesMax = kMost * (uint64_t{21} << 10);

// What both processes see.
struct Board {
  std::atomic<int> ready = 0;  // -1: the step could not be made
  std::atomic<bool> over = false;
  std::atomic<uint64_t> waiting = 0, evaluated = 0;
  std::atomic<uint64_t> heap = 0;  // malloc's bytes in use
  char address[64] = {}, server_id[64] = {};
  uint64_t disk = 0;
  // Of the seal of all ranks, without rank and blobs.
  uint32_t seal_bytes = 0;
  char seal[1 << 16] = {};
};

// A job whose ranks have pushed all that their next step needs.
absl::Status MakeStep(TestServer* server, TrainerGroup* group, const std::vector<std::string>& blobs,
                      v1::SealRequest* seal) {
  const auto tensors = static_cast<uint32_t>(SmallModel().size());
  BALLAST_RETURN_IF_ERROR(group->Start());
  BALLAST_RETURN_IF_ERROR(group->Initialise(Ones));
  BALLAST_RETURN_IF_ERROR(group->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones));
  AwaitIdle(server->get(), "job");
  *seal = group->SealOf(1, UpdateHeader(tensors), /*wait_ms=*/600'000);
  seal->set_plan_hash(model::PlanHash(group->plan(), group->step(), 0, seal->header(), blobs));
  return absl::OkStatus();
}

std::vector<std::string> BlobsOf(size_t bytes) { return std::vector<std::string>(kMost, std::string(bytes, 'b')); }

Board* MapBoard(int fd) {
  void* const shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return shared == MAP_FAILED ? nullptr : static_cast<Board*>(shared);
}

// The server's process.
int Serve(Board* board, const std::vector<std::string>& blobs) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  {
    TestServer server("s");
    TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), kMost);
    v1::SealRequest seal;
    const absl::Status made = MakeStep(&server, &group, blobs, &seal);
    auto rpc = RpcServer::Start({}, server.get());
    if (!made.ok() || !rpc.ok() || seal.ByteSizeLong() > sizeof board->seal) {
      std::cerr << made << " " << rpc.status() << " " << seal.ByteSizeLong() << "\n";
      board->ready = -1;
      return 1;
    }
    board->seal_bytes = static_cast<uint32_t>(seal.ByteSizeLong());
    seal.SerializeToArray(board->seal, sizeof board->seal);
    (*rpc)->address().copy(board->address, sizeof board->address - 1);
    server->server_id().copy(board->server_id, sizeof board->server_id - 1);
    board->disk = server->disk();
    const uint64_t evaluated = server->counters().evaluated_seals;
    // What the job's making left behind would hide what seals take.
    malloc_trim(0);
    while (!board->over) {
      board->waiting = server->counters().waiting_requests.load();
      board->evaluated = server->counters().evaluated_seals - evaluated;
      board->heap = mallinfo2().uordblks;
      if (board->ready == 0) board->ready = 1;
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  return 0;
}

uint64_t ResidentBytes(pid_t process) {
  std::ifstream status(absl::StrCat("/proc/", process, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (absl::StartsWith(line, "VmRSS:")) return std::strtoull(line.c_str() + 6, nullptr, 10) << 10;
  }
  return 0;
}

double ProcessorSeconds(pid_t process) {
  std::ifstream file(absl::StrCat("/proc/", process, "/stat"));
  std::string text;
  std::getline(file, text);
  const std::vector<std::string> words = absl::StrSplit(text.substr(text.rfind(')') + 2), ' ');
  return static_cast<double>(std::stoul(words[11]) + std::stoul(words[12])) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void Await(const std::function<bool()>& met) {
  for (const absl::Time end = absl::Now() + absl::Minutes(1); !met() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// A few connections, by which all ranks send their seals.
class Ranks {
 public:
  explicit Ranks(const Board& board)
      : version_(absl::StrCat(model::kProtocolVersion)), target_(model::TargetOf(board.server_id, board.disk)) {
    for (int i = 0; i < 4; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
      stubs_.push_back(v1::StateService::NewStub(
          grpc::CreateCustomChannel(board.address, grpc::InsecureChannelCredentials(), arguments)));
    }
    taker_ = std::thread([this] {
      void* tag = nullptr;
      bool ok = false;
      while (queue_.Next(&tag, &ok)) ++answered_;
    });
  }
  ~Ranks() {
    for (Sealing& sealing : sealings_) sealing.context.TryCancel();
    queue_.Shutdown();
    taker_.join();
  }

  void Seal(const v1::SealRequest& request) {
    Sealing& sealing = sealings_.emplace_back();
    sealing.context.AddMetadata(model::kVersionMetadata, version_);
    sealing.context.AddMetadata(model::kServerMetadata, target_);
    sealing.call = stubs_[request.rank() % stubs_.size()]->AsyncSeal(&sealing.context, request, &queue_);
    sealing.call->Finish(&sealing.response, &sealing.status, &sealing);
  }
  // Answers that have come.
  uint32_t answered() const { return answered_; }
  // The answers to all seals, by rank.
  void AwaitAnswers() {
    Await([this] { return answered_ == sealings_.size(); });
    ASSERT_EQ(answered_, sealings_.size());
    for (size_t rank = 0; rank < sealings_.size(); ++rank) {
      ASSERT_TRUE(sealings_[rank].status.ok()) << FromGrpc(sealings_[rank].status);
      ASSERT_TRUE(sealings_[rank].response.has_prepared()) << rank;
      ASSERT_EQ(sealings_[rank].response.prepared().blobs_size(), rank == 0 ? static_cast<int>(kMost) : 0);
    }
  }

 private:
  struct Sealing {
    grpc::ClientContext context;
    v1::SealResponse response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::SealResponse>> call;
  };
  const std::string version_, target_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<v1::StateService::Stub>> stubs_;
  std::deque<Sealing> sealings_;
  std::atomic<uint32_t> answered_ = 0;
  std::thread taker_;  // without it the connections stand still
};

class WaitingSeals : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    const int fd = ::memfd_create("board", 0);  // which the server's process inherits
    ASSERT_EQ(::ftruncate(fd, sizeof(Board)), 0);
    board_ = MapBoard(fd);
    ASSERT_NE(board_, nullptr);
    const std::string number = absl::StrCat(fd), bytes = absl::StrCat(GetParam());
    const char* const command[] = {"server", number.c_str(), bytes.c_str(), nullptr};
    process_ = ::fork();
    ASSERT_GE(process_, 0);
    if (process_ == 0) {
      ::execv("/proc/self/exe", const_cast<char**>(command));
      ::_exit(127);
    }
    ::close(fd);
    Await([&] { return board_->ready != 0; });
    ASSERT_EQ(board_->ready, 1);
  }
  void TearDown() override {
    board_->over = true;
    if (process_ > 0) ::waitpid(process_, nullptr, 0);
    ::munmap(board_, sizeof(Board));
  }

  const std::vector<std::string> blobs_ = BlobsOf(GetParam());
  Board* board_ = nullptr;
  pid_t process_ = -1;
};

TEST_P(WaitingSeals, TakeLittleMemory) {
  Ranks ranks(*board_);
  v1::SealRequest seal;
  ASSERT_TRUE(seal.ParseFromArray(board_->seal, static_cast<int>(board_->seal_bytes)));
  const uint64_t before = ResidentBytes(process_), heap = board_->heap;
  const double worked = ProcessorSeconds(process_);
  // Rank 0 sends the blobs of all. The last rank comes once all others wait.
  for (uint32_t rank = 0; rank < kMost; ++rank) {
    if (rank + 1 == kMost) Await([&] { return board_->waiting == kMost - 1 && board_->evaluated >= kMost - 1; });
    if (rank == 0) seal.mutable_blobs()->Assign(blobs_.begin(), blobs_.end());
    seal.set_rank(rank);
    if (rank + 1 == kMost) {
      ASSERT_EQ(board_->waiting, kMost - 1) << ranks.answered() << " answers without the last seal";
      absl::SleepFor(absl::Milliseconds(50));  // the board is up to date
      const uint64_t taken = ResidentBytes(process_) - before, in_use = board_->heap - heap;
      std::cout << kMost - 1 << " waiting seals of " << board_->seal_bytes << " bytes, blobs of " << GetParam()
                << " bytes: " << taken << " bytes more resident (" << taken / kMost << " each), " << in_use
                << " of malloc's (" << in_use / kMost << " each), " << ProcessorSeconds(process_) - worked
                << " s of the server's processor\n";
      EXPECT_LE(taken, kWaitingBytesMax);
    }
    ranks.Seal(seal);
    seal.clear_blobs();
  }
  ranks.AwaitAnswers();
  const uint64_t with_answers = ResidentBytes(process_) - before;
  std::cout << "with all answers: " << with_answers << " bytes more resident, " << ProcessorSeconds(process_) - worked
            << " s of the server's processor\n";
  EXPECT_LE(with_answers, kWaitingBytesMax + (uint64_t{4} << 20)) << "an answer is held once, not by each call";
}

INSTANTIATE_TEST_SUITE_P(Blobs, WaitingSeals, ::testing::Values(0, 16));

}  // namespace

int ServeBoard(int fd, size_t blob_bytes) {
  Board* const board = MapBoard(fd);
  return board == nullptr ? 1 : Serve(board, BlobsOf(blob_bytes));
}

}  // namespace ballast::services

// With a board's descriptor and the bytes of a blob: the server's process of a test.
int main(int argc, char** argv) {
  if (argc == 3) return ballast::services::ServeBoard(std::atoi(argv[1]), static_cast<size_t>(std::atoi(argv[2])));
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
