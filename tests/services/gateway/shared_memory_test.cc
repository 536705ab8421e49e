// The server's side of shared memory, against clients that break the rules.
#include "ballast/services/gateway/shared_memory.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::services {
namespace {

constexpr uint64_t kBytes = model::kSharedBytes;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

class SharedMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto shared = SharedMemory::Start(2 * kBytes, counters_);
    ASSERT_TRUE(shared.ok()) << shared.status();
    shared_ = *std::move(shared);
  }

  v1::MemoryOffer Offer() {
    auto offer = shared_->Offer();
    EXPECT_TRUE(offer.ok()) << offer.status();
    return *offer;
  }
  static model::Descriptor Connect(const v1::MemoryOffer& offer) {
    auto socket = model::ConnectToMemorySocket(offer.socket());
    EXPECT_TRUE(socket.ok()) << socket.status();
    return *std::move(socket);
  }
  // Sends `text` and returns the answer; "" if the server ends the connection.
  static std::string Say(const model::Descriptor& socket, absl::string_view text, int descriptor = -1) {
    (void)model::SendSocketMessage(socket.get(), text, descriptor);
    const auto answer = model::ReceiveSocketMessage(socket.get(), Soon());
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? answer->text : "no answer";
  }
  struct Client {
    model::Descriptor socket;
    model::SharedMapping memory;
    std::string ticket;
    std::string answer;
  };
  Client HandOver() {
    const v1::MemoryOffer offer = Offer();
    model::Descriptor socket = Connect(offer), memfd;
    EXPECT_EQ(Say(socket, offer.ticket()), offer.proof());
    auto memory = model::SharedMapping::Make(&memfd);
    EXPECT_TRUE(memory.ok()) << memory.status();
    std::string answer = Say(socket, "memory", memfd.get());
    return {std::move(socket), *std::move(memory), offer.ticket(), std::move(answer)};
  }
  absl::StatusOr<SharedMemory::Part> Find(const std::string& ticket, uint64_t offset, uint64_t bytes) const {
    v1::SharedPlace place;
    place.set_ticket(ticket);
    place.set_offset(offset);
    place.set_bytes(bytes);
    return shared_->Find(place);
  }
  void ExpectGone(const std::string& ticket) const {
    const absl::Status status = Find(ticket, 0, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kMemoryGone) << status;
  }
  void AwaitMapped(uint64_t bytes) const {
    for (const absl::Time end = Soon(); counters_->mapped_bytes != bytes && absl::Now() < end;) {
      absl::SleepFor(absl::Milliseconds(1));  // the server hears of an end from its socket
    }
    EXPECT_EQ(counters_->mapped_bytes, bytes);
  }

  const std::shared_ptr<SharedMemoryCounters> counters_ = std::make_shared<SharedMemoryCounters>();
  std::unique_ptr<SharedMemory> shared_;
};

TEST_F(SharedMemoryTest, FindsTheClientsBytesAndNoOthers) {
  Client client = HandOver();
  ASSERT_EQ(client.answer, model::kTaken);
  EXPECT_EQ(counters_->mapped_bytes, kBytes);
  client.memory.bytes()[128] = std::byte{5};
  const auto part = Find(client.ticket, 128, 1000);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->bytes.size(), 1000u);
  EXPECT_EQ(part->bytes[0], std::byte{5});
  EXPECT_TRUE(Find(client.ticket, kBytes, 0).ok());
  const std::vector<std::pair<uint64_t, uint64_t>> outside = {
      {0, kBytes + 1},   {kBytes, 1},        {64, kBytes}, {kBytes + 64, 0},
      {~uint64_t{0}, 1}, {64, ~uint64_t{0}}, {1, 1},       {0, model::kMessageBytesMax + 1}};
  for (const auto& [offset, bytes] : outside) {
    const absl::Status status = Find(client.ticket, offset, bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << offset << " " << bytes;
    EXPECT_EQ(model::ReasonOf(status), model::kBadRange) << status;
  }
  ExpectGone("");
  ExpectGone(std::string(model::kSecretBytes, '\0'));
}

TEST_F(SharedMemoryTest, MemoryGoesWithItsClientButNotUnderACall) {
  std::optional<Client> client = HandOver();
  ASSERT_EQ(client->answer, model::kTaken);
  client->memory.bytes()[0] = std::byte{3};
  std::optional<SharedMemory::Part> call = *Find(client->ticket, 0, 100);
  const std::string ticket = client->ticket;
  client.reset();
  // The server hears of the end from its socket.
  for (const absl::Time end = Soon(); Find(ticket, 0, 1).ok() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ExpectGone(ticket);
  EXPECT_EQ(call->bytes[0], std::byte{3});
  EXPECT_EQ(counters_->mapped_bytes, kBytes) << "memory in use still counts";
  shared_.reset();
  EXPECT_EQ(call->bytes[0], std::byte{3});
  call.reset();
  EXPECT_EQ(counters_->mapped_bytes, 0u);
}

TEST_F(SharedMemoryTest, AllMemoryTogetherIsBounded) {
  EXPECT_EQ(counters_->mapped_bytes_max, 2 * kBytes);
  std::optional<Client> first = HandOver();
  const Client second = HandOver();
  ASSERT_EQ(first->answer, model::kTaken);
  ASSERT_EQ(second.answer, model::kTaken);
  const Client refused = HandOver();
  EXPECT_NE(refused.answer.find("raise `shared_memory`"), std::string::npos) << refused.answer;
  ExpectGone(refused.ticket);
  first.reset();
  AwaitMapped(kBytes);
  EXPECT_EQ(HandOver().answer, model::kTaken);
}

TEST_F(SharedMemoryTest, FieldsOfALaterVersionAreRefused) {
  const Client client = HandOver();
  v1::SharedPlace place;
  place.set_ticket(client.ticket);
  place.set_bytes(100);
  ASSERT_TRUE(shared_->Find(place).ok());
  place.GetReflection()->MutableUnknownFields(&place)->AddVarint(99, 1);
  EXPECT_EQ(model::ReasonOf(shared_->Find(place).status()), model::kVersionsDiffer);
}

TEST_F(SharedMemoryTest, ATicketIsForOneClient) {
  const v1::MemoryOffer offer = Offer();
  const model::Descriptor first = Connect(offer), second = Connect(offer);
  EXPECT_EQ(Say(first, offer.ticket()), offer.proof());
  EXPECT_EQ(Say(second, offer.ticket()), "");
}

TEST_F(SharedMemoryTest, WhoBreaksTheRulesIsLetGo) {
  const v1::MemoryOffer offer = Offer();
  EXPECT_EQ(Say(Connect(offer), "a guess of 16 by"), "");
  EXPECT_EQ(Say(Connect(offer), std::string(model::kSocketMessageBytesMax + 1, 'x')), "");
  // Memory before the ticket.
  model::Descriptor memfd;
  const auto memory = model::SharedMapping::Make(&memfd);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(Say(Connect(offer), "memory", memfd.get()), "");
  // No memory, or a socket.
  for (const bool with : {false, true}) {
    const v1::MemoryOffer other = Offer();
    const model::Descriptor socket = Connect(other);
    ASSERT_EQ(Say(socket, other.ticket()), other.proof());
    const std::string answer = Say(socket, "memory", with ? socket.get() : -1);
    EXPECT_NE(answer.find("cannot be shared"), std::string::npos) << answer;
    ExpectGone(other.ticket());
  }
  // A second word from a client that shares memory already.
  Client client = HandOver();
  ASSERT_EQ(client.answer, model::kTaken);
  EXPECT_EQ(Say(client.socket, "more", memfd.get()), "");
  ExpectGone(client.ticket);
  // All of it left the server in order.
  EXPECT_EQ(HandOver().answer, model::kTaken);
}

TEST_F(SharedMemoryTest, SilentClientsAreForgotten) {
  const v1::MemoryOffer offer = Offer();
  const model::Descriptor silent = Connect(offer);
  const auto end = model::ReceiveSocketMessage(silent.get(), Soon());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->text, "");
  EXPECT_EQ(Say(Connect(offer), offer.ticket()), "") << "an offer ends too";
}

TEST_F(SharedMemoryTest, IdleConnectionsKeepNobodyOut) {
  const v1::MemoryOffer offer = Offer();
  std::vector<model::Descriptor> idle;
  for (int i = 0; i < 400; ++i) {
    auto socket = model::ConnectToMemorySocket(offer.socket());
    if (socket.ok()) idle.push_back(*std::move(socket));
  }
  ASSERT_GT(idle.size(), 64u);
  for (const absl::Time end = Soon(); absl::Now() < end;) {
    const v1::MemoryOffer later = Offer();
    auto socket = model::ConnectToMemorySocket(later.socket());
    if (socket.ok()) {
      EXPECT_EQ(Say(*socket, later.ticket()), later.proof());
      return;
    }
    absl::SleepFor(absl::Milliseconds(1));  // until the queue of the socket is shorter
  }
  FAIL() << "the server lets nobody in any more";
}

TEST_F(SharedMemoryTest, ItsEndIsToldToClients) {
  const Client client = HandOver();
  ASSERT_EQ(client.answer, model::kTaken);
  EXPECT_FALSE(model::SocketEnded(client.socket.get()));
  const std::string name = Offer().socket();
  shared_.reset();  // which waits for its thread for some seconds alone
  for (const absl::Time end = Soon(); model::ConnectToMemorySocket(name).ok() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_FALSE(model::ConnectToMemorySocket(name).ok());
  EXPECT_TRUE(model::SocketEnded(client.socket.get()));
  AwaitMapped(0);
}

}  // namespace
}  // namespace ballast::services
