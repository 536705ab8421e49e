// State servers that an etcd of the test's own names, on machines that may die.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/client/transport/small_etcd.h"

namespace ballast::client {

inline constexpr int kMachines = 3;

struct Machine {
  std::atomic<bool> dead{false};
  v1::Member member;
};

// What a test does before a call, on the thread that makes it. Empty: nothing.
struct BeforeCall {
  std::function<void(int server)> get_job, pull;
};

// To a server that etcd names, on a machine that may die.
class MortalTransport final : public ForwardingTransport {
 public:
  using Connect = std::function<std::unique_ptr<Transport>(const v1::Member&)>;
  MortalTransport(std::unique_ptr<Transport> server, const Machine* machine, registry::Registry* registry,
                  Connect connect, int index, const BeforeCall* before)
      : ForwardingTransport(std::move(server)),
        machine_(machine),
        registry_(registry),
        connect_(std::move(connect)),
        index_(index),
        before_(before) {}

  std::string name() const override { return machine_->member.address(); }
  registry::Registry* registry() const override { return registry_; }
  std::string registered_as() const override {
    return model::TargetOf(machine_->member.server_id(), machine_->member.disk());
  }
  absl::StatusOr<std::unique_ptr<Transport>> Another(const v1::Member& member) override { return connect_(member); }
  void Identify(const v1::IdentifyRequest& r, absl::Time t, Callback<v1::IdentifyResponse> done) override {
    Ask(&Transport::Identify, r, t, std::move(done));
  }
  void GetJob(const v1::GetJobRequest& r, absl::Time t, Callback<v1::GetJobResponse> done) override {
    if (before_->get_job) before_->get_job(index_);
    Ask(&Transport::GetJob, r, t, std::move(done));
  }
  void Fence(const v1::FenceRequest& r, absl::Time t, Callback<v1::FenceResponse> done) override {
    Ask(&Transport::Fence, r, t, std::move(done));
  }
  void Open(const v1::OpenRequest& r, absl::Time t, Callback<v1::OpenResponse> done) override {
    Ask(&Transport::Open, r, t, std::move(done));
  }
  void Norm(const v1::NormRequest& r, absl::Time t, Callback<v1::NormResponse> done) override {
    Ask(&Transport::Norm, r, t, std::move(done));
  }
  void Seal(const v1::SealRequest& r, absl::Time t, Callback<v1::SealResponse> done) override {
    Ask(&Transport::Seal, r, t, std::move(done));
  }
  void Commit(const v1::CommitRequest& r, absl::Time t, Callback<v1::CommitResponse> done) override {
    Ask(&Transport::Commit, r, t, std::move(done));
  }
  void Pin(const v1::PinRequest& r, absl::Time t, Callback<v1::PinResponse> done) override {
    Ask(&Transport::Pin, r, t, std::move(done));
  }
  void Unpin(const v1::UnpinRequest& r, absl::Time t, Callback<v1::UnpinResponse> done) override {
    Ask(&Transport::Unpin, r, t, std::move(done));
  }
  void Push(const v1::PushRequest& r, absl::Span<const std::byte> payload, absl::Time t,
            Callback<v1::PushResponse> done) override {
    if (machine_->dead) return done(Down());
    ForwardingTransport::Push(r, payload, t, std::move(done));
  }
  void Pull(const v1::PullRequest& r, absl::Span<std::byte> to, absl::Time t,
            std::function<void(absl::Status)> done) override {
    if (before_->pull) before_->pull(index_);
    if (machine_->dead) return done(Down());
    ForwardingTransport::Pull(r, to, t, std::move(done));
  }

 private:
  static absl::Status Down() {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "the machine is dead");
  }
  template <typename Request, typename Response>
  void Ask(void (Transport::*method)(const Request&, absl::Time, Callback<Response>), const Request& request,
           absl::Time deadline, Callback<Response> done) {
    if (machine_->dead) return done(Down());
    (server()->*method)(request, deadline, std::move(done));
  }

  const Machine* const machine_;
  registry::Registry* const registry_;
  const Connect connect_;
  const int index_;
  const BeforeCall* const before_;
};

// Servers "s0", "s1" and "s2". A machine's death ends its calls alone: its server has all that it had if it comes back.
class MortalServers {
 public:
  MortalServers() : registry_(etcd_.Connect()) {
    for (int i = 0; i < kMachines; ++i) {
      v1::Member& member = machines_[i].member;
      member.set_server_id(absl::StrCat("s", i));
      member.set_disk(servers_.server(i)->disk());
      member.set_address(absl::StrCat("s", i, ":7070"));
      v1::ServerEntry entry;
      entry.set_server_id(member.server_id());
      entry.set_disk(member.disk());
      entry.set_address(member.address());
      entry.set_state(v1::SERVER_STATE_SERVING);
      EXPECT_TRUE(*registry_.Put(entry, 0, 0, absl::Now() + absl::Minutes(1)));
    }
  }

  // `before`: borrowed by the transports, also those to servers that join later.
  std::vector<std::unique_ptr<Transport>> Connect(const BeforeCall* before) {
    std::vector<std::unique_ptr<Transport>> all;
    for (int i = 0; i < kMachines; ++i) all.push_back(ConnectTo(i, before));
    return all;
  }
  Machine& machine(int i) { return machines_[i]; }
  // Members of job "test" by its key; 0: it has none.
  int MembersByKey() {
    const auto key = registry_.FindJob("test", absl::Now() + absl::Minutes(1));
    return key.ok() && key->has_value() ? (*key)->value.table().members_size() : 0;
  }

 private:
  std::unique_ptr<Transport> ConnectTo(int i, const BeforeCall* before) {
    return std::make_unique<MortalTransport>(
        services::MakeEmbeddedTransport(servers_.server(i), 3), &machines_[i], &registry_,
        [this, before](const v1::Member& member) { return ConnectTo(member.server_id()[1] - '0', before); }, i, before);
  }

  SessionFixture servers_{kMachines};
  SmallEtcd etcd_;
  registry::Registry registry_;
  std::array<Machine, kMachines> machines_;
};

}  // namespace ballast::client
