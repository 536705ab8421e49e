// The client's side of shared memory: slots, false servers, and servers that end.
#include "ballast/client/transport/shared_slots.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/gateway/shared_memory.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/held_port.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::client {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

class SharedSlotsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = services::SharedMemory::Start(1024 * kMiB, counters_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    slots_ = HandOver();
    ASSERT_NE(slots_, nullptr);
  }
  std::shared_ptr<SharedSlots> HandOver() {
    const auto offer = server_->Offer();
    EXPECT_TRUE(offer.ok()) << offer.status();
    auto socket = SharedSlots::Connect(*offer);
    EXPECT_TRUE(socket.ok()) << socket.status();
    auto slots = SharedSlots::HandOver(&*socket, *offer, Soon());
    EXPECT_TRUE(slots.ok()) << slots.status();
    return slots.ok() ? *std::move(slots) : nullptr;
  }

  const std::shared_ptr<services::SharedMemoryCounters> counters_ = std::make_shared<services::SharedMemoryCounters>();
  std::unique_ptr<services::SharedMemory> server_;
  std::shared_ptr<SharedSlots> slots_;
};

TEST_F(SharedSlotsTest, ASlotIsWhereItsPlaceSays) {
  const auto first = slots_->Take(2 * kMiB), second = slots_->Take(100'000);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  std::fill(first->bytes().begin(), first->bytes().end(), std::byte{1});
  std::fill(second->bytes().begin(), second->bytes().end(), std::byte{2});
  for (const auto& slot : {first, second}) {
    const auto part = server_->Find(slot->place());
    ASSERT_TRUE(part.ok()) << part.status();
    ASSERT_EQ(part->bytes.size(), slot->bytes().size());
    EXPECT_EQ(std::memcmp(part->bytes.data(), slot->bytes().data(), part->bytes.size()), 0);
  }
}

TEST_F(SharedSlotsTest, SlotsDoNotOverlapAndAreUsedAgain) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::shared_ptr<SharedSlots::Slot>> taken;
    while (auto slot = slots_->Take(3 * kMiB)) taken.push_back(std::move(slot));
    EXPECT_EQ(taken.size(), 21u);  // 64 MiB in all
    EXPECT_EQ(slots_->Take(3 * kMiB), nullptr);
    EXPECT_NE(slots_->Take(kMiB), nullptr);
    std::vector<const std::byte*> begins;
    for (const auto& slot : taken) begins.push_back(slot->bytes().data());
    std::sort(begins.begin(), begins.end());
    for (size_t i = 1; i < begins.size(); ++i) EXPECT_GE(begins[i] - begins[i - 1], static_cast<ptrdiff_t>(3 * kMiB));
    // A hole in the middle is enough for what fits.
    taken.erase(taken.begin() + 10);
    EXPECT_NE(slots_->Take(3 * kMiB), nullptr);
  }
}

TEST_F(SharedSlotsTest, SmallAndHugeSlicesGoOverTheWire) {
  EXPECT_EQ(slots_->Take(0), nullptr);
  EXPECT_EQ(slots_->Take(SharedSlots::kSliceBytesMin - 1), nullptr);
  EXPECT_NE(slots_->Take(SharedSlots::kSliceBytesMin), nullptr);
  EXPECT_EQ(slots_->Take(~uint64_t{0}), nullptr);
}

TEST_F(SharedSlotsTest, AnAbandonedSlotIsNeverUsedAgain) {
  std::byte* place = nullptr;
  {
    const auto slot = slots_->Take(kMiB);
    ASSERT_NE(slot, nullptr);
    place = slot->bytes().data();
    slot->Abandon();
  }
  std::vector<std::shared_ptr<SharedSlots::Slot>> taken;
  while (auto slot = slots_->Take(kMiB)) taken.push_back(std::move(slot));
  EXPECT_EQ(taken.size(), 63u);
  for (const auto& slot : taken) EXPECT_NE(slot->bytes().data(), place);
  EXPECT_FALSE(slots_->ended());
  // Where most is abandoned, other memory is needed.
  for (size_t i = 0; i < 32; ++i) taken[i]->Abandon();
  taken.clear();
  EXPECT_TRUE(slots_->ended());
  EXPECT_EQ(slots_->Take(kMiB), nullptr);
}

TEST_F(SharedSlotsTest, NothingIsUsedAfterTheEnd) {
  const auto slot = slots_->Take(kMiB);
  ASSERT_NE(slot, nullptr);
  slot->EndAll();
  EXPECT_TRUE(slots_->ended());
  EXPECT_EQ(slots_->Take(kMiB), nullptr);
  EXPECT_EQ(slot->bytes().size(), kMiB);
}

TEST_F(SharedSlotsTest, KnowsWhenTheServerHasEnded) {
  EXPECT_FALSE(slots_->ended());
  server_.reset();
  EXPECT_TRUE(slots_->ended());
}

// Whoever has taken the name of a socket does not get the memory.
TEST(SharedSlotsHandOver, AFalseServerGetsNothing) {
  v1::MemoryOffer offer;
  offer.set_socket(absl::StrCat("ballast-test/false/", getpid()));
  offer.set_ticket(std::string(model::kSecretBytes, 't'));
  offer.set_proof(std::string(model::kSecretBytes, 'p'));
  offer.set_host(*model::HostName());
  const auto listener = model::ListenAtMemorySocket(offer.socket());
  ASSERT_TRUE(listener.ok()) << listener.status();
  for (const std::string& answer : {std::string(model::kSecretBytes, 'x'), std::string(), std::string("p")}) {
    auto socket = SharedSlots::Connect(offer);
    ASSERT_TRUE(socket.ok()) << socket.status();
    model::Descriptor other(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (answer.empty()) {
      other = model::Descriptor();
    } else {
      ASSERT_EQ(model::SendSocketMessage(other.get(), answer), absl::OkStatus());
    }
    const auto slots = SharedSlots::HandOver(&*socket, offer, Soon());
    socket = model::Descriptor();
    EXPECT_EQ(slots.status().code(), absl::StatusCode::kUnavailable) << slots.status();
    if (answer.empty()) continue;
    EXPECT_EQ(model::ReceiveSocketMessage(other.get(), Soon())->text, offer.ticket());
    const auto rest = model::ReceiveSocketMessage(other.get(), Soon());
    ASSERT_TRUE(rest.ok()) << rest.status();
    EXPECT_LT(rest->descriptor.get(), 0);
    EXPECT_EQ(rest->text, "");
  }
}

// Where the server is not, anybody may have taken the name, and may hand ticket and proof on.
TEST(SharedSlotsHandOver, NobodyIsAskedOnAnotherHost) {
  v1::MemoryOffer offer;
  offer.set_socket(absl::StrCat("ballast-test/elsewhere/", getpid()));
  const auto listener = model::ListenAtMemorySocket(offer.socket());
  ASSERT_TRUE(listener.ok()) << listener.status();
  for (const std::string& host : {std::string(), *model::HostName() + "1", std::string("other")}) {
    offer.set_host(host);
    EXPECT_EQ(SharedSlots::Connect(offer).status().code(), absl::StatusCode::kFailedPrecondition) << host;
  }
  EXPECT_LT(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK), 0);
  offer.set_host(*model::HostName());
  EXPECT_TRUE(SharedSlots::Connect(offer).ok());
}

TEST(SharedSlotsHandOver, AServerThatSaysNothingIsGivenUp) {
  v1::MemoryOffer offer;
  offer.set_socket(absl::StrCat("ballast-test/silent/", getpid()));
  offer.set_ticket(std::string(model::kSecretBytes, 't'));
  offer.set_proof(std::string(model::kSecretBytes, 'p'));
  offer.set_host(*model::HostName());
  const auto listener = model::ListenAtMemorySocket(offer.socket());
  ASSERT_TRUE(listener.ok()) << listener.status();
  auto socket = SharedSlots::Connect(offer);
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_FALSE(SharedSlots::HandOver(&*socket, offer, absl::Now() + absl::Milliseconds(50)).ok());
}

// A server that restarts at the same address.
TEST(SharedSlotsTransport, SharesAgainWithARestartedServer) {
  const ScratchDirectory directory;
  const HeldPort port;
  std::unique_ptr<services::StateServer> state;
  std::unique_ptr<services::RpcServer> rpc;
  const auto start = [&](uint64_t shared_bytes) {
    services::StateServerOptions options;
    options.data_directory = directory.path();
    options.budget.dram = 64 * kMiB;
    auto started = services::StateServer::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    state = *std::move(started);
    services::RpcServerOptions rpc_options;
    rpc_options.listen = port.address();
    rpc_options.shared_memory_bytes = shared_bytes;
    auto serving = services::RpcServer::Start(rpc_options, state.get());
    ASSERT_TRUE(serving.ok()) << serving.status();
    rpc = *std::move(serving);
  };
  start(1024 * kMiB);
  const std::unique_ptr<Transport> transport = MakeGrpcTransport(port.address());
  v1::IdentifyRequest ask;
  const auto identify = [&] {
    for (const absl::Time end = Soon(); absl::Now() < end;) {
      absl::Notification done;
      absl::Status status;
      transport->Identify(ask, Soon(), [&](const absl::StatusOr<v1::IdentifyResponse>& answer) {
        status = answer.status();
        done.Notify();
      });
      done.WaitForNotification();
      if (status.ok()) return;
    }
    FAIL() << "the server does not answer";
  };
  const auto mapped = [&] { return state->counters().shared_memory->mapped_bytes.load(); };
  identify();
  EXPECT_EQ(mapped(), 0) << "nobody asked for memory";
  ask.set_shares_memory(true);
  identify();
  EXPECT_EQ(mapped(), 64 * kMiB);
  identify();
  EXPECT_EQ(mapped(), 64 * kMiB) << "one memory is enough";
  for (const uint64_t shared_bytes : {1024 * kMiB, uint64_t{0}, 1024 * kMiB}) {
    rpc.reset();
    state.reset();
    start(shared_bytes);
    identify();
    EXPECT_EQ(mapped(), shared_bytes > 0 ? 64 * kMiB : 0);
  }
  // Without Identify: calls notice, go over the wire, and have the memory replaced.
  rpc.reset();
  state.reset();
  start(1024 * kMiB);
  std::vector<std::byte> to(kMiB);
  for (const absl::Time end = Soon(); mapped() == 0 && absl::Now() < end;) {
    absl::Notification done;
    transport->Pull({}, absl::MakeSpan(to), Soon(), [&](const absl::Status& status) {
      EXPECT_NE(model::ReasonOf(status), model::kMemoryGone) << status;
      done.Notify();
    });
    done.WaitForNotification();
  }
  EXPECT_EQ(mapped(), 64 * kMiB);
}

}  // namespace
}  // namespace ballast::client
