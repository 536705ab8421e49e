// Calls over gRPC while they are under way, and their errors.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/client/transport.h"

namespace ballast::client {

// The server's status with its reason, if a server answered.
absl::Status FromGrpc(const grpc::Status& status);

// The calls under way: so that the destructor can cancel them and wait.
class CallSet {
 public:
  void Insert(grpc::ClientContext* context) {
    absl::MutexLock lock(&mutex_);
    cancelled_.emplace(context, false);
  }
  // Takes out a call that ended with `status`, and returns what to tell of it. A server that stops resets its calls,
  // and gRPC gives these the status CANCELLED as well. Here CANCELLED means Cancel(); the others become UNAVAILABLE, so
  // that they are sent again.
  grpc::Status Erase(grpc::ClientContext* context, const grpc::Status& status);
  // An erased context may still be inside its callback; Leave() ends the callback. Leave() comes after the context is
  // deleted: a context holds its channel, and if a callback's thread is the channel's last holder, the thread joins
  // itself. Uses a lock of its own, because TryCancel may end other calls on this thread.
  void Enter() {
    absl::MutexLock lock(&running_mutex_);
    ++running_;
  }
  void Leave() {
    absl::MutexLock lock(&running_mutex_);
    --running_;
  }
  void Cancel() {
    absl::MutexLock lock(&mutex_);
    for (auto& [context, cancelled] : cancelled_) {
      cancelled = true;
      context->TryCancel();
    }
  }
  void CancelAndWait() {
    Cancel();
    absl::MutexLock lock(&running_mutex_);
    running_mutex_.Await(absl::Condition(
        +[](int* running) { return *running == 0; }, &running_));
  }

 private:
  absl::Mutex mutex_;
  absl::flat_hash_map<grpc::ClientContext*, bool> cancelled_ ABSL_GUARDED_BY(mutex_);  // by Cancel()
  absl::Mutex running_mutex_;
  int running_ ABSL_GUARDED_BY(running_mutex_) = 0;
};

// A push under way. The payload is sent from the caller's memory, so the call ends when gRPC has both called back and
// released the slice. When a connection breaks amid a call, the context may hold the slice.
struct PushCall {
  std::optional<grpc::ClientContext> context = std::make_optional<grpc::ClientContext>();
  grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  CallSet* calls = nullptr;
  Callback<v1::PushResponse> done;
  grpc::Status status;
  std::atomic<int> holders{2};

  void CalledBack(const grpc::Status& ended) {
    status = calls->Erase(&*context, ended);
    context.reset();
    request.Clear();  // after a failed send gRPC leaves the slice with us
    Release();
  }

  void Release() {
    if (holders.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    CallSet* const set = calls;
    const absl::Status result = FromGrpc(status);
    if (result.ok()) {
      done(v1::PushResponse());
    } else {
      done(result);
    }
    delete this;
    set->Leave();
  }
};

// PushRequest's bytes: the header's, then field 15 with the payload where it lies. gRPC releases the payload to
// `owner`.
grpc::ByteBuffer EncodePush(const v1::PushRequest& header, absl::Span<const std::byte> payload, PushCall* owner);

}  // namespace ballast::client
