#include "ballast/tests/services/gateway/rpc_fixture.h"

#include <arpa/inet.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

namespace ballast::services {

int ConnectTo(const std::string& address) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  ::inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) return fd;
  ::close(fd);
  return -1;
}

void SendRandomBytes(const std::string& address, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int connection = 0; connection < 20; ++connection) {
    const int fd = ConnectTo(address);
    ASSERT_GE(fd, 0) << "connection " << connection << ", seed " << seed;
    std::string bytes(1 + random() % 100'000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Some begin as HTTP/2 does, to get past the first check.
    if (connection % 2 == 1) bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes;
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  }
}

grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string* response, const std::string& authorization) {
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(1)));
  if (!authorization.empty()) context.AddMetadata("authorization", authorization);
  context.AddMetadata(model::kVersionMetadata, absl::StrCat(model::kProtocolVersion));
  const grpc::Slice sent(request);
  const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&sent, 1), &queue);
  grpc::ByteBuffer received;
  grpc::Status status;
  call->StartCall();
  call->Finish(&received, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  if (!queue.Next(&tag, &ok) || !ok) return grpc::Status(grpc::StatusCode::INTERNAL, "the completion queue ended");
  grpc::Slice whole;
  response->clear();
  if (status.ok() && received.DumpToSingleSlice(&whole).ok()) {
    response->assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
  }
  return status;
}

}  // namespace ballast::services
