// A transport that hands every call on. Tests override the calls that they count or spoil.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ballast/client/transport.h"

namespace ballast::client {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> server) : server_(std::move(server)) {}
  std::string name() const override { return server_->name(); }
  void MeanFor(const std::string& target) override { server_->MeanFor(target); }
  void Identify(const v1::IdentifyRequest& r, absl::Time t, Callback<v1::IdentifyResponse> done) override {
    server_->Identify(r, t, std::move(done));
  }
  void GetJob(const v1::GetJobRequest& r, absl::Time t, Callback<v1::GetJobResponse> done) override {
    server_->GetJob(r, t, std::move(done));
  }
  void Fence(const v1::FenceRequest& r, absl::Time t, Callback<v1::FenceResponse> done) override {
    server_->Fence(r, t, std::move(done));
  }
  void Open(const v1::OpenRequest& r, absl::Time t, Callback<v1::OpenResponse> done) override {
    server_->Open(r, t, std::move(done));
  }
  void Norm(const v1::NormRequest& r, absl::Time t, Callback<v1::NormResponse> done) override {
    server_->Norm(r, t, std::move(done));
  }
  void Seal(const v1::SealRequest& r, absl::Time t, Callback<v1::SealResponse> done) override {
    server_->Seal(r, t, std::move(done));
  }
  void Commit(const v1::CommitRequest& r, absl::Time t, Callback<v1::CommitResponse> done) override {
    server_->Commit(r, t, std::move(done));
  }
  void Pin(const v1::PinRequest& r, absl::Time t, Callback<v1::PinResponse> done) override {
    server_->Pin(r, t, std::move(done));
  }
  void Unpin(const v1::UnpinRequest& r, absl::Time t, Callback<v1::UnpinResponse> done) override {
    server_->Unpin(r, t, std::move(done));
  }
  void Push(const v1::PushRequest& r, absl::Span<const std::byte> payload, absl::Time t,
            Callback<v1::PushResponse> done) override {
    server_->Push(r, payload, t, std::move(done));
  }
  void PushLent(const v1::PushRequest& r, absl::Span<const std::byte> payload,
                std::shared_ptr<model::LentGradients> lent, absl::Time t, Callback<v1::PushResponse> done) override {
    server_->PushLent(r, payload, std::move(lent), t, std::move(done));
  }
  void Pull(const v1::PullRequest& r, absl::Span<std::byte> to, absl::Time t,
            std::function<void(absl::Status)> done) override {
    server_->Pull(r, to, t, std::move(done));
  }
  void Schedule(Moves ends_in, std::function<void()> work) override { server_->Schedule(ends_in, std::move(work)); }
  void Cancel() override { server_->Cancel(); }

 protected:
  Transport* server() const { return server_.get(); }

 private:
  const std::unique_ptr<Transport> server_;
};

}  // namespace ballast::client
