// The channels to one server, made anew when the files of certificates and of the token change.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/proto/model/access.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::client {

// Two connections, so that a poll never waits behind slices, and what their calls show.
class Channels {
 public:
  Channels(const std::string& address, const model::AccessContent& access);
  // Before a call is sent.
  void Sign(grpc::ClientContext* context) const;
  v1::StateService::Stub* control() const { return control_.get(); }
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>* data() const { return &data_; }

 private:
  const std::string authorization_;
  const std::unique_ptr<v1::StateService::Stub> control_;
  mutable grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> data_;
};

// Threads: any.
class FreshChannels {
 public:
  FreshChannels(std::string address, model::Access access, const model::AccessContent& content);

  // For one call to begin. Looks at the files once a second at most. Files that are new and good give new channels;
  // calls under way end on the old ones. Files that are bad are tried again each second.
  std::shared_ptr<const Channels> Get();

 private:
  // Old channels are kept for a while: the last holder of a channel on a callback's thread would make this thread join
  // itself (gRPC 1.51), and calls on channels as old as the last of these have ended long ago.
  static constexpr size_t kRetiredMax = 8;

  const std::string address_;
  const model::Access access_;
  absl::Mutex mu_;
  std::shared_ptr<const Channels> now_ ABSL_GUARDED_BY(mu_);
  std::deque<std::shared_ptr<const Channels>> retired_ ABSL_GUARDED_BY(mu_);
  std::string stamp_ ABSL_GUARDED_BY(mu_);
  absl::Time looked_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast::client
