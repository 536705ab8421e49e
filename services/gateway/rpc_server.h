// A StateServer on the wire: StateService, AdminService, and grpc.health.v1 on one port.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

struct RpcServerOptions {
  std::string listen = "127.0.0.1:0";  // host:port; port 0 takes a free port
  Guard* guard = nullptr;              // borrowed, and watching; null: everybody may do everything, without TLS
  // Bytes of memory that clients on this host may share with the server, all clients together. 0: none may.
  uint64_t shared_memory_bytes = uint64_t{4} << 30;
  uint32_t protocol_version = model::kProtocolVersion;  // another one: for tests of versions to come
  uint64_t connections_max = 0;                         // 0: as many as the process's descriptors allow
  bool reflection = false;                              // server reflection, for whoever the guard knows
};

// Threads: any.
class RpcServer {
 public:
  // Borrows `state`. INVALID_ARGUMENT (BAD_CONFIG) if `listen` is not an address, FAILED_PRECONDITION (BAD_CONFIG) if
  // the address cannot be bound: in use, or none of this machine's.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options, StateServer* state);
  ~RpcServer();  // as Stop

  // "host:port" with the port really taken.
  const std::string& address() const;
  // OK, or why clients on this host have to send all bytes over the wire.
  const absl::Status& shared_memory_status() const;

  // Whether a client could connect and call now: connects to its own port, and calls itself. Blocks for up to twice
  // `patience`.
  absl::Status Try(absl::Duration patience);
  // From now on gRPC's and protobuf's lines go to the program's log, and no thread of gRPC's writes to standard error.
  static void TakeLogs();

  // Turns health to NOT_SERVING, stops `state` (waiting requests are answered SERVER_DOWN), and gives further calls
  // `grace` to end. Blocks.
  void Stop(absl::Duration grace);

 private:
  struct Impl;
  explicit RpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::services
