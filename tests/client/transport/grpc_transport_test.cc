// A transport ends its calls, whatever becomes of the connection: a server that is killed amid a push.
#include "ballast/client/grpc_transport.h"

#include <arpa/inet.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// Accepts HTTP/2 connections: a transport has one for its data, and others. Reads a fixed number of bytes from each,
// without granting more than the initial window, and then ends the connection like a killed process.
class DyingServer {
 public:
  explicit DyingServer(uint64_t reads) : reads_(reads) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_, 8), 0);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this] { Serve(); });
  }
  // REQUIRES: no client is connected.
  ~DyingServer() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    for (std::thread& served : served_) served.join();
    ::close(listener_);
  }
  const std::string& address() const { return address_; }
  // How many connections it has ended.
  int ended() const { return ended_; }

 private:
  void Serve() {
    for (;;) {
      const int connection = ::accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      served_.emplace_back([this, connection] { ServeOne(connection); });
    }
  }

  void ServeOne(int connection) {
    const unsigned char settings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};  // an empty frame: HTTP/2's defaults
    EXPECT_EQ(::send(connection, settings, sizeof(settings), MSG_NOSIGNAL), sizeof(settings));
    std::vector<char> buffer(4096);
    uint64_t left = reads_;
    while (left > 0) {
      const ssize_t got = ::recv(connection, buffer.data(), std::min<uint64_t>(left, buffer.size()), 0);
      if (got <= 0) break;  // its client has gone
      left -= static_cast<uint64_t>(got);
    }
    if (left == 0) ++ended_;
    const linger at_once = {.l_onoff = 1, .l_linger = 0};
    ::setsockopt(connection, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    ::close(connection);
  }

  const uint64_t reads_;
  int listener_ = -1;
  std::string address_;
  std::atomic<int> ended_ = 0;
  std::thread thread_;
  std::vector<std::thread> served_;  // thread_'s; the destructor's once that has ended
};

TEST(GrpcTransportTest, APushEndsWithItsConnection) {
  const std::vector<std::byte> payload(1 << 20);
  // Before and amid the call's headers, amid the first window of 65535 bytes, and where it is used up.
  for (const uint64_t reads : {1, 24, 100, 300, 500, 1000, 5000, 20000, 60000, 65000, 65600, 65700, 65900}) {
    DyingServer server(reads);
    std::unique_ptr<Transport> transport;
    for (int i = 0; i < 20; ++i) {
      if (i % 4 == 0)
        transport = MakeGrpcTransport(server.address());  // one that is kept waits longer for each connection
      auto ended = std::make_shared<std::promise<absl::Status>>();
      v1::PushRequest header;
      header.set_job("job");
      transport->Push(header, payload, absl::Now() + absl::Seconds(5),
                      [ended](const absl::StatusOr<v1::PushResponse>& r) { ended->set_value(r.status()); });
      std::future<absl::Status> status = ended->get_future();
      if (status.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
        std::fprintf(stderr, "a push did not end; its server read %lu bytes\n", reads);
        std::abort();  // the transport would wait for it
      }
      EXPECT_FALSE(status.get().ok());
    }
    transport.reset();
    EXPECT_GE(server.ended(), 5) << "it read " << reads << " bytes";
  }
}

// Resets every call, as a server does that stops; or keeps it until its client ends it.
class ResettingService final : public grpc::CallbackGenericService {
 public:
  explicit ResettingService(bool resets) : resets_(resets) {}
  absl::Notification* came() { return &came_; }

 private:
  class Call final : public grpc::ServerGenericBidiReactor {
    void OnCancel() override { Finish(grpc::Status::CANCELLED); }
    void OnDone() override { delete this; }
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    if (resets_) context->TryCancel();
    if (!any_came_.exchange(true)) came_.Notify();  // calls come on several threads
    return new Call;
  }

  const bool resets_;
  std::atomic<bool> any_came_ = false;
  absl::Notification came_;
};

// How a push, a pull and a fence end at a server with `service`. `meanwhile` runs once the first has come there.
std::vector<absl::Status> EndsOfCalls(ResettingService* service, const std::function<void(Transport*)>& meanwhile) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterCallbackGenericService(service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const auto transport = MakeGrpcTransport(absl::StrCat("127.0.0.1:", port));
  std::vector<std::byte> payload(100);
  std::vector<absl::Status> ends(3);
  std::vector<absl::Notification> ended(3);
  const auto end = [&](size_t call, absl::Status status) {
    ends[call] = std::move(status);
    ended[call].Notify();
  };
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  transport->Push({}, payload, deadline, [&](const absl::StatusOr<v1::PushResponse>& r) { end(0, r.status()); });
  transport->Pull({}, absl::MakeSpan(payload), deadline, [&](absl::Status status) { end(1, std::move(status)); });
  transport->Fence({}, deadline, [&](const absl::StatusOr<v1::FenceResponse>& r) { end(2, r.status()); });
  service->came()->WaitForNotification();
  meanwhile(transport.get());
  for (absl::Notification& one : ended) one.WaitForNotification();
  return ends;
}

// Seen as "Push of step 3: CANCELLED" of a server that was restarted: nobody had cancelled anything, and the push was
// not sent again.
TEST(GrpcTransportTest, CallsThatAServerResetsAreUnavailable) {
  ResettingService service(/*resets=*/true);
  for (const absl::Status& status : EndsOfCalls(&service, [](Transport*) {})) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kServerDown) << status;
  }
}

TEST(GrpcTransportTest, CallsThatCancelEndsAreCancelled) {
  ResettingService service(/*resets=*/false);
  for (const absl::Status& status : EndsOfCalls(&service, [](Transport* transport) { transport->Cancel(); })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  }
}

}  // namespace
}  // namespace ballast::client
