// gRPC's health protocol (grpc.health.v1), for load balancers and probes, which have no identity. gRPC's own health
// service is not used: it reads messages of any size that the server allows, from anybody, at any number of calls at a
// time.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <atomic>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/gateway/call_reactor.h"
#include "ballast/services/gateway/reads.h"
#include "ballast/v1/health.pb.h"

namespace ballast::services {

// Threads: any.
class Health {
 public:
  // Streams at a time, over all callers, and of one host.
  static constexpr size_t kWatchesMax = 1024, kWatchesOfHostMax = 128;
  // Calls of all strangers together that wait until their messages are read: gRPC takes up to 20 KiB for each.
  static constexpr size_t kWaitingMax = 64;

  explicit Health(Trimmer* trimmer);
  static bool Has(const std::string& path);
  grpc::ServerGenericBidiReactor* MakeCall(const grpc::CallbackServerContext& context, const std::string& path);
  // As Reads::Look.
  bool Look(absl::Time now);
  // From now on the answer is NOT_SERVING. Streams are told so, and end.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  using Status = v1::HealthCheckResponse::Status;
  // A stream, whose first status is on its way or was sent.
  struct Watch {
    bool known;  // the service
    std::string host;
    bool sending = true;
    bool gone = false;  // the client
  };

  // A flood does not wait for Look.
  void LookSoon() ABSL_LOCKS_EXCLUDED(mu_);
  void Check(CallReactor* call, bool known) const ABSL_LOCKS_EXCLUDED(mu_);
  void BeginWatch(CallReactor* call, const std::string& host, bool known) ABSL_LOCKS_EXCLUDED(mu_);
  // The first status of the stream was sent.
  void BeSent(CallReactor* call) ABSL_LOCKS_EXCLUDED(mu_);
  // The stream's client is gone.
  void BeLeft(CallReactor* call) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends a stream whose client is gone, or all of them once nothing is served; not while a status is on its way.
  void EndIfDue(CallReactor* call) ABSL_LOCKS_EXCLUDED(mu_);
  Status StatusOf(bool known) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  Trimmer* const trimmer_;
  Reads reads_;
  std::atomic<bool> ended_reads_ = false;  // by LookSoon
  mutable absl::Mutex mu_;
  absl::Time looked_ ABSL_GUARDED_BY(mu_);
  bool serving_ ABSL_GUARDED_BY(mu_) = true;
  absl::flat_hash_map<CallReactor*, Watch> watches_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast::services
