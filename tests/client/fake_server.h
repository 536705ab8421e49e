// A server for tests of the client's parts: keeps what it was sent, and answers as the test says.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "ballast/client/transport.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::client {

// A function that a test may exchange while other threads call it. Null: not set.
template <typename Signature>
class Exchangeable {
 public:
  Exchangeable() = default;
  Exchangeable(const Exchangeable& other) : function_(other.function()) {}
  template <typename Function>
  requires std::is_constructible_v<std::function<Signature>, Function> Exchangeable(Function function)
      : function_(std::make_shared<std::function<Signature>>(std::move(function))) {}
  Exchangeable(std::nullptr_t) {}
  Exchangeable& operator=(const Exchangeable& other) {
    std::shared_ptr<std::function<Signature>> function = other.function();
    absl::MutexLock lock(&mu_);
    function_.swap(function);
    return *this;
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return (*function())(std::forward<Arguments>(arguments)...);
  }
  std::shared_ptr<std::function<Signature>> function() const {
    absl::MutexLock lock(&mu_);
    return function_;
  }

 private:
  mutable absl::Mutex mu_;
  std::shared_ptr<std::function<Signature>> function_ ABSL_GUARDED_BY(mu_);
};

// Threads: any. Answers may be set at any time; the other public fields are set before the first call.
class FakeServer final : public Transport {
 public:
  explicit FakeServer(std::string name) : name_(std::move(name)) {}

  struct Pushed {
    v1::PushRequest header;
    std::string payload;
    const std::byte* from = nullptr;  // the caller's memory
  };
  template <typename Request, typename Response>
  using Answers = Exchangeable<absl::StatusOr<Response>(const Request&)>;

  uint64_t disk = 0;  // Member.disk
  registry::Registry* known_by = nullptr;
  bool shares_memory = false;  // as the last Identify asked for
  // Null: an empty answer.
  Answers<v1::GetJobRequest, v1::GetJobResponse> on_get_job;
  Answers<v1::FenceRequest, v1::FenceResponse> on_fence;
  Answers<v1::OpenRequest, v1::OpenResponse> on_open;
  Answers<v1::NormRequest, v1::NormResponse> on_norm;
  Answers<v1::SealRequest, v1::SealResponse> on_seal;
  Answers<v1::CommitRequest, v1::CommitResponse> on_commit;
  Answers<v1::DropJobRequest, v1::DropJobResponse> on_drop;
  Answers<v1::PinRequest, v1::PinResponse> on_pin;
  Answers<v1::UnpinRequest, v1::UnpinResponse> on_unpin;
  Answers<v1::PushRequest, v1::PushResponse> on_push;
  Exchangeable<absl::Status(const v1::PullRequest&, absl::Span<std::byte>)> on_pull;
  std::function<void(std::function<void()>)> later;                         // who it is, it says then
  std::function<std::unique_ptr<Transport>(const v1::Member&)> transports;  // to other servers
  std::function<absl::StatusOr<std::unique_ptr<model::Loan>>(const model::LoanRequest&)> on_lend;  // null: takes none
  std::function<absl::Status(int64_t version, std::optional<uint32_t> unit)> on_await_applied;

  std::vector<Pushed> pushed() const {
    absl::MutexLock lock(&mu_);
    return pushed_;
  }
  std::vector<v1::PullRequest> pulled() const {
    absl::MutexLock lock(&mu_);
    return pulled_;
  }
  // From now on pushes are answered by AnswerPushes alone.
  void HoldPushes() {
    absl::MutexLock lock(&mu_);
    holds_ = true;
  }
  void AnswerPushes(const absl::Status& status = absl::OkStatus()) {
    std::vector<Callback<v1::PushResponse>> held;
    {
      absl::MutexLock lock(&mu_);
      holds_ = false;
      held.swap(held_);
    }
    for (const auto& done : held) status.ok() ? done(v1::PushResponse()) : done(status);
  }

  // From now on these calls ("GetJob") are answered by GoOn alone, or cancelled.
  void Hang(std::set<std::string> calls) {
    absl::MutexLock lock(&mu_);
    hangs_ = std::move(calls);
  }
  void GoOn() {
    for (const auto& [answer, cancel] : TakeHung(/*goes_on=*/true)) answer();
  }
  void Cancel() override {
    for (const auto& [answer, cancel] : TakeHung(/*goes_on=*/false)) cancel();
  }

  std::string name() const override { return name_; }
  registry::Registry* registry() const override { return known_by; }
  std::string registered_as() const override { return disk == 0 ? "" : model::TargetOf(name_, disk); }
  absl::StatusOr<std::unique_ptr<Transport>> Another(const v1::Member& member) override { return transports(member); }
  void Identify(const v1::IdentifyRequest& request, absl::Time, Callback<v1::IdentifyResponse> done) override {
    shares_memory = request.shares_memory();
    v1::IdentifyResponse identity;
    identity.set_server_id(name_);
    identity.set_protocol_version(model::kProtocolVersion);
    identity.set_disk(disk);
    const auto answers = [identity](const v1::IdentifyRequest&) { return identity; };
    if (later) return later([=] { done(identity); });
    Answer<v1::IdentifyRequest, v1::IdentifyResponse>("Identify", answers, request, done);
  }
  void GetJob(const v1::GetJobRequest& request, absl::Time, Callback<v1::GetJobResponse> done) override {
    Answer("GetJob", on_get_job, request, done);
  }
  void Fence(const v1::FenceRequest& request, absl::Time, Callback<v1::FenceResponse> done) override {
    Answer("Fence", on_fence, request, done);
  }
  void Open(const v1::OpenRequest& request, absl::Time, Callback<v1::OpenResponse> done) override {
    Answer("Open", on_open, request, done);
  }
  void DropJob(const v1::DropJobRequest& request, absl::Time, Callback<v1::DropJobResponse> done) override {
    Answer("DropJob", on_drop, request, done);
  }
  void Norm(const v1::NormRequest& request, absl::Time, Callback<v1::NormResponse> done) override {
    Answer("Norm", on_norm, request, done);
  }
  void Seal(const v1::SealRequest& request, absl::Time, Callback<v1::SealResponse> done) override {
    Answer("Seal", on_seal, request, done);
  }
  void Commit(const v1::CommitRequest& request, absl::Time, Callback<v1::CommitResponse> done) override {
    Answer("Commit", on_commit, request, done);
  }
  void Pin(const v1::PinRequest& request, absl::Time, Callback<v1::PinResponse> done) override {
    Answer("Pin", on_pin, request, done);
  }
  void Unpin(const v1::UnpinRequest& request, absl::Time, Callback<v1::UnpinResponse> done) override {
    Answer("Unpin", on_unpin, request, done);
  }
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time,
            Callback<v1::PushResponse> done) override {
    {
      absl::MutexLock lock(&mu_);
      pushed_.push_back(
          {header, std::string(reinterpret_cast<const char*>(payload.data()), payload.size()), payload.data()});
      if (holds_) {
        held_.push_back(std::move(done));
        return;
      }
    }
    Answer("Push", on_push, header, done);
  }
  void Pull(const v1::PullRequest& request, absl::Span<std::byte> to, absl::Time,
            std::function<void(absl::Status)> done) override {
    {
      absl::MutexLock lock(&mu_);
      pulled_.push_back(request);
    }
    const auto pulls = on_pull.function();
    done(pulls ? (*pulls)(request, to) : absl::OkStatus());
  }
  bool TakesLoans() const override { return on_lend != nullptr; }
  absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest& request) override {
    return on_lend(request);
  }
  void AwaitApplied(const std::string&, int64_t version, std::optional<uint32_t> unit, absl::Time,
                    std::function<void(absl::Status)> done) override {
    done(on_await_applied ? on_await_applied(version, unit) : absl::OkStatus());
  }

 private:
  using Hung = std::vector<std::pair<std::function<void()>, std::function<void()>>>;

  template <typename Request, typename Response>
  void Answer(const std::string& call, const Answers<Request, Response>& answers, const Request& request,
              const Callback<Response>& done) {
    const auto answer = [=, answers = answers.function()] {
      done(answers ? (*answers)(request) : absl::StatusOr<Response>(Response()));
    };
    {
      absl::MutexLock lock(&mu_);
      if (hangs_.contains(call)) {
        hung_.emplace_back(answer, [=] { done(absl::CancelledError("cancelled")); });
        return;
      }
    }
    answer();
  }
  Hung TakeHung(bool goes_on) {
    absl::MutexLock lock(&mu_);
    if (goes_on) hangs_.clear();
    return std::exchange(hung_, {});
  }

  const std::string name_;
  mutable absl::Mutex mu_;
  std::vector<Pushed> pushed_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::PullRequest> pulled_ ABSL_GUARDED_BY(mu_);
  bool holds_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Callback<v1::PushResponse>> held_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> hangs_ ABSL_GUARDED_BY(mu_);
  Hung hung_ ABSL_GUARDED_BY(mu_);
};

// Servers "s0", "s1", ..., and a router to them.
struct FakeServers {
  explicit FakeServers(int count, uint64_t disk = 0) {
    std::vector<std::unique_ptr<Transport>> transports;
    for (int i = 0; i < count; ++i) {
      auto server = std::make_unique<FakeServer>("s" + std::to_string(i));
      server->disk = disk;
      servers.push_back(server.get());
      transports.push_back(std::move(server));
    }
    router = std::make_unique<Router>(std::move(transports), RouterOptions{});
  }
  FakeServer& operator[](size_t i) { return *servers[i]; }

  std::vector<FakeServer*> servers;  // the router's
  std::unique_ptr<Router> router;
};

// An Open over these servers: unit "u" with tensors "a" (70000 elements) and "b" (10), unit "v" with "c" (300).
inline v1::OpenRequest OpenOnFakes(int servers, uint32_t world_size) {
  v1::OpenRequest open;
  open.mutable_epoch()->set_counter(3);
  open.set_base(-1);
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name("job");
  spec->set_chunk_elements(1 << 16);
  spec->set_optimizer(v1::OPTIMIZER_ADAMW);
  spec->set_gradient_dtype(v1::DTYPE_BF16);
  spec->set_working_dtype(v1::DTYPE_BF16);
  spec->set_durability(v1::DURABILITY_NONE);
  spec->set_group_count(1);
  v1::Registration* batch = spec->add_registrations();
  batch->set_version(-1);
  for (const auto& [name, unit, elements] :
       {std::tuple("a", "u", 70000), std::tuple("b", "u", 10), std::tuple("c", "v", 300)}) {
    v1::TensorSpec* tensor = batch->add_tensors();
    tensor->set_name(name);
    tensor->set_unit(unit);
    tensor->add_shape(static_cast<uint64_t>(elements));
  }
  for (int i = 0; i < servers; ++i) {
    v1::Member* member = open.add_members();
    member->set_server_id("s" + std::to_string(i));
    member->set_weight(1);
  }
  *open.mutable_tiling() = model::EvenTiling(world_size);
  open.set_spec_digest(model::SpecDigest(*spec));
  open.set_protocol_version(model::kProtocolVersion);
  return open;
}

}  // namespace ballast::client
