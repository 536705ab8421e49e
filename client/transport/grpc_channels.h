// The channels to one server. If the files of certificates or of the token change, they are replaced.
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
#include "ballast/proto/base/access.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::client {

// Two connections, so that a poll never waits behind slices, and the credentials of their calls.
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

  // Returns the channels for a new call. Checks the files at most once a second. New, good files give new channels;
  // calls under way end on the old ones. It tries bad files again each second.
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
