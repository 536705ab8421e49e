// The connections of the rpc port. gRPC would accept them itself, and closes its listener for good when the process has
// no descriptor left. Here connections are bounded, idle ones end, and the listener never does.
#pragma once

#include <grpcpp/server_builder.h>

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/proto/base/address.h"

namespace ballast::services {

// Threads: any. A thread of its own accepts, and hands a connection to gRPC once its client has said something.
class Connections {
 public:
  // The age of a silent connection, and of a connection without a call that was let in.
  static constexpr absl::Duration kSilentMax = absl::Seconds(10), kStrangerMax = absl::Seconds(60);

  // `max`: 0 for as many as the process's descriptors allow.
  static absl::StatusOr<std::unique_ptr<Connections>> Listen(const model::Address& address, uint64_t max);
  ~Connections();

  const model::Address& address() const { return address_; }
  uint64_t max() const { return max_; }
  // Accepts from now on, and calls `tick` ten times a second or more, on the same thread. `refuse_plain`: called with
  // the peer (in gRPC's spelling) of each connection that begins without TLS, and ends; null: TLS is not needed.
  absl::Status Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc, std::function<void()> tick,
                     std::function<void(const std::string& peer)> refuse_plain);
  // Calls `tick` soon.
  void Wake();
  // Accepts no more, and ticks no more. Before gRPC's shutdown.
  void Stop();

  // A call of this connection is let in. `peer`: as gRPC spells it; `who`: the caller. UNAVAILABLE (BUSY) if the caller
  // has seven eighths already of the connections that others leave: then this one stays a stranger.
  absl::Status Know(const std::string& peer, const std::string& who);
  // Whether a connection from this machine is accepted now; waits for up to `patience`.
  absl::Status Try(absl::Duration patience);

 private:
  struct Connection {
    uint64_t cookie = 0;  // the kernel's number of the socket: a descriptor's number may be another's by now
    absl::Time since;
    std::string peer;
    std::string who;  // of the first call that was let in; empty: a stranger
    bool silent = true;
    bool known() const { return !who.empty(); }
  };
  using ByDescriptor = std::map<int, Connection>;

  Connections(model::Address address, std::vector<int> listeners, uint64_t max);
  void Run();
  void Accept(int listener);
  // False: there is no room, and nobody to make room.
  bool MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Greet(int fd);
  void EndOld();
  void Forget(ByDescriptor::iterator at) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(ByDescriptor::iterator at) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ListenAgain(bool on);

  model::Address address_;
  const std::vector<int> listeners_;
  const uint64_t max_;
  const int epoll_, wake_, spare_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc_;
  std::function<void()> tick_;
  std::function<void(const std::string&)> refuse_plain_;
  bool listening_ = true;  // the thread's

  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  ByDescriptor connections_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, int> by_peer_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, uint64_t> known_ ABSL_GUARDED_BY(mu_);  // connections by caller
  uint64_t all_known_ ABSL_GUARDED_BY(mu_) = 0;
  std::string tried_ ABSL_GUARDED_BY(mu_);  // the peer that Try comes from; empty: none, or accepted
  std::thread thread_;
};

}  // namespace ballast::services
