// A reader's transport whose answers a test changes, and which counts calls that no reader makes.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/forwarding_transport.h"

namespace ballast::client {

// What of a server's answers a test changes.
struct Spoils {
  std::function<void(v1::IdentifyResponse&)> identity;
  std::function<void(v1::GetJobResponse&)> job;
  std::atomic<bool> loses_unpins{false};
  absl::Duration pull;          // how long each pull takes
  std::atomic<int> changes{0};  // calls that only a group makes
};

class SpoiledTransport : public ForwardingTransport {
 public:
  SpoiledTransport(std::unique_ptr<Transport> server, Spoils* spoils)
      : ForwardingTransport(std::move(server)), spoils_(spoils) {}
  void Identify(const v1::IdentifyRequest& r, absl::Time t, Callback<v1::IdentifyResponse> done) override {
    ForwardingTransport::Identify(r, t, [this, done = std::move(done)](absl::StatusOr<v1::IdentifyResponse> answer) {
      if (answer.ok() && spoils_->identity) spoils_->identity(*answer);
      done(std::move(answer));
    });
  }
  void GetJob(const v1::GetJobRequest& r, absl::Time t, Callback<v1::GetJobResponse> done) override {
    ForwardingTransport::GetJob(r, t, [this, done = std::move(done)](absl::StatusOr<v1::GetJobResponse> answer) {
      if (answer.ok() && spoils_->job) spoils_->job(*answer);
      done(std::move(answer));
    });
  }
  void Unpin(const v1::UnpinRequest& r, absl::Time t, Callback<v1::UnpinResponse> done) override {
    if (!spoils_->loses_unpins) return ForwardingTransport::Unpin(r, t, std::move(done));
    done(model::Error(absl::StatusCode::kInternal, "", "lost"));
  }
  void Pull(const v1::PullRequest& r, absl::Span<std::byte> to, absl::Time t,
            std::function<void(absl::Status)> done) override {
    absl::SleepFor(spoils_->pull);
    ForwardingTransport::Pull(r, to, t, std::move(done));
  }
  void Fence(const v1::FenceRequest& r, absl::Time t, Callback<v1::FenceResponse> done) override {
    ++spoils_->changes;
    ForwardingTransport::Fence(r, t, std::move(done));
  }
  void Open(const v1::OpenRequest& r, absl::Time t, Callback<v1::OpenResponse> done) override {
    ++spoils_->changes;
    ForwardingTransport::Open(r, t, std::move(done));
  }
  void Commit(const v1::CommitRequest& r, absl::Time t, Callback<v1::CommitResponse> done) override {
    ++spoils_->changes;
    ForwardingTransport::Commit(r, t, std::move(done));
  }

 private:
  Spoils* const spoils_;
};

}  // namespace ballast::client
