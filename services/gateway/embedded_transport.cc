#include "ballast/services/gateway/embedded_transport.h"

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/threads/executor.h"

namespace ballast::services {
namespace {

// Counts calls whose callback has not returned.
class Outstanding {
 public:
  void Add() {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  void Remove() {
    absl::MutexLock lock(&mutex_);
    --count_;
  }
  void Wait() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* count) { return *count == 0; }, &count_));
  }

 private:
  absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The bytes of a pull: the caller's, or a place to waste them when the server has another count.
struct PullTarget {
  absl::Span<std::byte> to;
  std::vector<std::byte> misfit;
  bool fits = false;
};

// The threads that move bytes.
class Copies {
 public:
  using Moves = client::Transport::Moves;
  explicit Copies(int threads) : threads_(threads) {}

  absl::Status Prepare() { return threads_.Prepare(); }
  void Join() { threads_.Join(); }
  void Post(Moves moves, std::function<void()> work) {
    {
      absl::MutexLock lock(&mutex_);
      (moves == Moves::kPull ? pulls_ : pushes_).push_back(std::move(work));
    }
    threads_.Post([this] { Next()(); });
  }

 private:
  std::function<void()> Next() {
    absl::MutexLock lock(&mutex_);
    auto& queue = pulls_.empty() ? pushes_ : pulls_;
    std::function<void()> work = std::move(queue.front());
    queue.pop_front();
    return work;
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> pulls_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::function<void()>> pushes_ ABSL_GUARDED_BY(mutex_);
  ThreadExecutor threads_;  // runs as often as there is work
};

class EmbeddedTransport final : public client::Transport {
 public:
  EmbeddedTransport(StateServer* server, int threads) : server_(server), copies_(threads), made_(copies_.Prepare()) {}
  ~EmbeddedTransport() override {
    copies_.Join();
    outstanding_.Wait();
  }

  std::string name() const override { return "embedded"; }

  void Identify(const v1::IdentifyRequest& request, absl::Time, client::Callback<v1::IdentifyResponse> done) override {
    if (!made_.ok()) return done(made_);  // opening a session fails, and not a step
    server_->Identify(request, Counted(std::move(done)));
  }
  void GetJob(const v1::GetJobRequest& request, absl::Time, client::Callback<v1::GetJobResponse> done) override {
    server_->GetJob(request, Counted(std::move(done)));
  }
  void Fence(const v1::FenceRequest& request, absl::Time deadline, client::Callback<v1::FenceResponse> done) override {
    server_->Fence(request, deadline, Counted(std::move(done)));
  }
  void Open(const v1::OpenRequest& request, absl::Time deadline, client::Callback<v1::OpenResponse> done) override {
    server_->Open(request, deadline, Counted(std::move(done)));
  }
  void Norm(const v1::NormRequest& request, absl::Time, client::Callback<v1::NormResponse> done) override {
    server_->Norm(request, Counted(std::move(done)));
  }
  void Seal(const v1::SealRequest& request, absl::Time deadline, client::Callback<v1::SealResponse> done) override {
    server_->Seal(request, deadline,
                  Counted<model::SealAnswer>([done = std::move(done)](absl::StatusOr<model::SealAnswer> answer) {
                    answer.ok() ? done(***answer) : done(answer.status());
                  }));
  }
  void Commit(const v1::CommitRequest& request, absl::Time, client::Callback<v1::CommitResponse> done) override {
    server_->Commit(request, Counted(std::move(done)));
  }
  void Pin(const v1::PinRequest& request, absl::Time deadline, client::Callback<v1::PinResponse> done) override {
    server_->Pin(request, deadline, Counted(std::move(done)));
  }
  void Unpin(const v1::UnpinRequest& request, absl::Time, client::Callback<v1::UnpinResponse> done) override {
    server_->Unpin(request, Counted(std::move(done)));
  }
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
            client::Callback<v1::PushResponse> done) override {
    // The server reads the caller's own memory: there is nothing to check, unless the caller asks.
    server_->Push(header, payload, deadline, Counted(std::move(done)),
                  header.crc32c() == 0 ? Checksum::kNone : Checksum::kCrc32c);
  }
  void PushLent(const v1::PushRequest& header, absl::Span<const std::byte> payload,
                std::shared_ptr<model::LentGradients> lent, absl::Time deadline,
                client::Callback<v1::PushResponse> done) override {
    server_->Push(header, payload, deadline, Counted(std::move(done)), Checksum::kNone, std::move(lent));
  }

  void Schedule(Moves ends_in, std::function<void()> work) override { copies_.Post(ends_in, std::move(work)); }

  bool TakesLoans() const override { return server_->takes_loans(); }
  absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest& request) override {
    return server_->Lend(request);
  }
  void AwaitApplied(const std::string& job, int64_t version, std::optional<uint32_t> unit, absl::Time deadline,
                    std::function<void(absl::Status)> done) override {
    server_->AwaitApplied(
        job, version, unit, deadline,
        Counted<v1::CommitResponse>(
            [done = std::move(done)](const absl::StatusOr<v1::CommitResponse>& r) { done(r.status()); }));
  }

  void Pull(const v1::PullRequest& request, absl::Span<std::byte> to, absl::Time deadline,
            std::function<void(absl::Status)> done) override {
    auto target = std::make_shared<PullTarget>();
    target->to = to;
    outstanding_.Add();
    server_->Pull(
        request, deadline,
        [target](uint64_t bytes, const AnswerRoom::Lease&) {  // the caller's memory: nothing is on its way
          target->fits = bytes == target->to.size();
          if (target->fits) return target->to;
          target->misfit.resize(bytes);
          return absl::MakeSpan(target->misfit);
        },
        [this, target, done = std::move(done)](const absl::StatusOr<uint32_t>& crc) {
          done(Check(*target, crc));
          outstanding_.Remove();
        },
        Checksum::kNone);
  }
  void Lease(const v1::PullRequest& request, absl::Time deadline, client::Callback<model::LeasedBytes> done) override {
    server_->Lease(request, deadline, Counted(std::move(done)));
  }

 private:
  static absl::Status Check(const PullTarget& target, const absl::StatusOr<uint32_t>& crc) {
    if (!crc.ok()) return crc.status();
    if (!target.fits) {
      return model::Error(
          absl::StatusCode::kInvalidArgument, model::kBadLength,
          absl::StrCat("expected ", target.to.size(), " bytes, the server sent ", target.misfit.size()));
    }
    return absl::OkStatus();
  }

  template <typename Response>
  Reply<Response> Counted(client::Callback<Response> done) {
    outstanding_.Add();
    return [this, done = std::move(done)](absl::StatusOr<Response> answer) {
      done(std::move(answer));
      outstanding_.Remove();
    };
  }

  StateServer* server_;
  Outstanding outstanding_;
  Copies copies_;
  const absl::Status made_;  // its thread
};

}  // namespace

std::unique_ptr<client::Transport> MakeEmbeddedTransport(StateServer* server, int threads) {
  return std::make_unique<EmbeddedTransport>(server, threads);
}

}  // namespace ballast::services
