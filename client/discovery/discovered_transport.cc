#include "ballast/client/discovery/discovered_transport.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/proto/registry/roster.h"

namespace ballast::client {
namespace {

constexpr absl::Duration kLookInterval = absl::Milliseconds(500);
// Doubt that comes so soon after a look goes on from it.
constexpr absl::Duration kSameDoubt = absl::Seconds(5);
constexpr absl::Duration kLookTimeout = absl::Seconds(2);

// By which calls wake the thread that looks. Apart from that thread's owner: a call's end must not become its last
// holder.
class Doubt {
 public:
  void Raise() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      raised_ = true;
    }
    changed_.notify_all();
  }
  void Stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
  }
  // Blocks until somebody doubts. False: Stop was called.
  bool Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return raised_ || stopping_; });
    raised_ = false;
    return !stopping_;
  }
  // Rests for `time`. False: Stop was called.
  bool Rest(absl::Duration time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return !changed_.wait_for(lock, absl::ToChronoMilliseconds(time), [this] { return stopping_; });
  }

 private:
  // std's, whose waits go by the steady clock: absl's would last longer by as much as the machine's clock is set back.
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool raised_ = false;
  bool stopping_ = false;
};

// Where a server is now. Threads: any.
class Place {
 public:
  Place(const v1::Member& server, std::shared_ptr<Transport> transport, Connector connect, std::shared_ptr<Doubt> doubt)
      : id_(server.server_id()),
        disk_(server.disk()),
        connect_(std::move(connect)),
        doubt_(std::move(doubt)),
        address_(server.address()),
        name_(transport->name()),
        transport_(std::move(transport)) {}

  // Another server may have this one's name.
  bool IsOf(const v1::ServerEntry& entry) const { return entry.server_id() == id_ && entry.disk() == disk_; }

  void MeanFor(const std::string& target) {
    absl::MutexLock lock(&mutex_);
    target_ = target;
    transport_->MeanFor(target);
  }

  // Null once Close was called.
  std::shared_ptr<Transport> transport() const {
    absl::MutexLock lock(&mutex_);
    return transport_;
  }

  // Also for the last calls, which end within Close.
  std::string name() const {
    absl::MutexLock lock(&mutex_);
    return name_;
  }

  // Blocks while calls end at addresses that were left before.
  void Move(const std::string& address) {
    const absl::MutexLock moving(&moving_);
    std::vector<std::shared_ptr<Transport>> unused;
    std::shared_ptr<Transport> left;
    {
      absl::MutexLock lock(&mutex_);
      const auto used = std::partition(left_.begin(), left_.end(), [](const auto& one) { return one.use_count() > 1; });
      unused.assign(used, left_.end());
      left_.erase(used, left_.end());
      if (address != address_ && !ended_.load()) {
        if (auto next = connect_(address); next.ok()) {
          address_ = address;
          name_ = (*next)->name();
          if (!target_.empty()) (*next)->MeanFor(target_);
          left = std::exchange(transport_, *std::move(next));
          left_.push_back(left);
        }
      }
    }
    if (left != nullptr) left->Cancel();
  }

  // Ends calls under way with CANCELLED; a move then no longer sends calls again.
  void Cancel() {
    ended_ = true;
    transport()->Cancel();
  }

  void SetRecovers(bool recovers) { recovers_ = recovers; }
  bool recovers() const { return recovers_.load(); }

  // Waits for all calls. REQUIRES: no further calls.
  void Close() {
    const absl::MutexLock moving(&moving_);  // a move holds transports of its own
    std::vector<std::shared_ptr<Transport>> all;
    {
      absl::MutexLock lock(&mutex_);
      ended_ = true;
      all.swap(left_);
      all.push_back(std::move(transport_));
    }
  }

  // What a call's end tells of the place. The answer for the router.
  absl::Status Seen(const absl::Status& status) {
    const bool moved = absl::IsCancelled(status) && !ended_.load();
    const std::string reason = model::ReasonOf(status);
    const bool down = absl::IsUnavailable(status) && (reason == model::kServerDown || reason == model::kOtherServer);
    if (down || absl::IsDeadlineExceeded(status)) doubt_->Raise();
    if (!moved) return status;
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        "the server was registered at another address meanwhile");
  }

 private:
  const std::string id_;
  const uint64_t disk_;
  const Connector connect_;
  const std::shared_ptr<Doubt> doubt_;
  std::atomic<bool> ended_{false};
  std::atomic<bool> recovers_{false};
  absl::Mutex moving_;  // taken before mutex_
  mutable absl::Mutex mutex_;
  std::string address_ ABSL_GUARDED_BY(mutex_);
  std::string name_ ABSL_GUARDED_BY(mutex_);
  std::string target_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Transport> transport_ ABSL_GUARDED_BY(mutex_);
  // Of earlier addresses. Ended by the thread that looks, or by Close: never on a thread of gRPC's, for which a
  // transport's end waits.
  std::vector<std::shared_ptr<Transport>> left_ ABSL_GUARDED_BY(mutex_);
};

// Makes transports to servers of a registry, and looks into it when somebody doubts.
class Directory : public std::enable_shared_from_this<Directory> {
 public:
  Directory(std::unique_ptr<registry::Registry> registry, Connector connect)
      : registry_(std::move(registry)), connect_(std::move(connect)) {
    absl::StatusOr<std::thread> thread = model::MakeThread([this] { Run(); });
    made_ = thread.status();
    if (thread.ok()) thread_ = *std::move(thread);
  }
  // RESOURCE_EXHAUSTED (LIMIT) if the system made no thread.
  const absl::Status& made() const { return made_; }
  registry::Registry* registry() const { return registry_.get(); }
  absl::StatusOr<std::unique_ptr<Transport>> TransportTo(const v1::Member& server);
  ~Directory() {
    doubt_->Stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    registry::Pauses pauses;
    absl::Time looked = absl::InfinitePast();
    while (doubt_->Await()) {
      if (absl::Now() - looked > kSameDoubt) pauses = {};
      // A registry that does not answer changes nothing: all stay where they were. So does a server whose entry is
      // unreadable.
      const auto entries = registry_->List(absl::Now() + kLookTimeout, registry::Registry::OnUnreadable::kPassOver);
      if (entries.ok()) {
        for (const std::shared_ptr<Place>& place : Places()) Show(*entries, place.get());
      }
      looked = absl::Now();
      if (!doubt_->Rest(kLookInterval + pauses.Next())) return;
    }
  }

  // No entry of the server: it does not recover.
  static void Show(const std::vector<v1::ServerEntry>& entries, Place* place) {
    bool recovers = false;
    for (const v1::ServerEntry& entry : entries) {
      if (!place->IsOf(entry)) continue;
      recovers = recovers || entry.state() == v1::SERVER_STATE_RECOVERING;
      place->Move(entry.address());
    }
    place->SetRecovers(recovers);
  }

  // Of the transports that there are.
  std::vector<std::shared_ptr<Place>> Places() {
    absl::MutexLock lock(&mutex_);
    std::erase_if(places_, [](const std::weak_ptr<Place>& place) { return place.expired(); });
    std::vector<std::shared_ptr<Place>> places;
    for (const std::weak_ptr<Place>& place : places_) {
      if (auto used = place.lock(); used != nullptr) places.push_back(std::move(used));
    }
    return places;
  }

  const std::unique_ptr<registry::Registry> registry_;
  const Connector connect_;
  const std::shared_ptr<Doubt> doubt_ = std::make_shared<Doubt>();
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<Place>> places_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
  absl::Status made_;
};

class DiscoveredTransport final : public Transport {
 public:
  DiscoveredTransport(std::string target, std::shared_ptr<Place> place, std::shared_ptr<Directory> directory)
      : target_(std::move(target)), place_(std::move(place)), directory_(std::move(directory)) {}
  ~DiscoveredTransport() override {
    place_->Cancel();
    place_->Close();
  }

  std::string name() const override { return place_->name(); }
  void MeanFor(const std::string& target) override { place_->MeanFor(target); }
  registry::Registry* registry() const override { return directory_->registry(); }
  std::string registered_as() const override { return target_; }
  absl::StatusOr<std::unique_ptr<Transport>> Another(const v1::Member& server) override {
    return directory_->TransportTo(server);
  }
  bool recovers() const override { return place_->recovers(); }
  void Cancel() override { place_->Cancel(); }

  void Identify(const v1::IdentifyRequest& request, absl::Time deadline, Callback<v1::IdentifyResponse> done) override {
    Call(&Transport::Identify, request, deadline, std::move(done));
  }
  void GetJob(const v1::GetJobRequest& request, absl::Time deadline, Callback<v1::GetJobResponse> done) override {
    Call(&Transport::GetJob, request, deadline, std::move(done));
  }
  void Fence(const v1::FenceRequest& request, absl::Time deadline, Callback<v1::FenceResponse> done) override {
    Call(&Transport::Fence, request, deadline, std::move(done));
  }
  void Open(const v1::OpenRequest& request, absl::Time deadline, Callback<v1::OpenResponse> done) override {
    Call(&Transport::Open, request, deadline, std::move(done));
  }
  void Norm(const v1::NormRequest& request, absl::Time deadline, Callback<v1::NormResponse> done) override {
    Call(&Transport::Norm, request, deadline, std::move(done));
  }
  void Seal(const v1::SealRequest& request, absl::Time deadline, Callback<v1::SealResponse> done) override {
    Call(&Transport::Seal, request, deadline, std::move(done));
  }
  void Commit(const v1::CommitRequest& request, absl::Time deadline, Callback<v1::CommitResponse> done) override {
    Call(&Transport::Commit, request, deadline, std::move(done));
  }
  void Pin(const v1::PinRequest& request, absl::Time deadline, Callback<v1::PinResponse> done) override {
    Call(&Transport::Pin, request, deadline, std::move(done));
  }
  void Unpin(const v1::UnpinRequest& request, absl::Time deadline, Callback<v1::UnpinResponse> done) override {
    Call(&Transport::Unpin, request, deadline, std::move(done));
  }
  void DropJob(const v1::DropJobRequest& request, absl::Time deadline, Callback<v1::DropJobResponse> done) override {
    Call(&Transport::DropJob, request, deadline, std::move(done));
  }
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
            Callback<v1::PushResponse> done) override {
    place_->transport()->Push(header, payload, deadline, Watched(std::move(done)));
  }
  void Pull(const v1::PullRequest& request, absl::Span<std::byte> to, absl::Time deadline,
            std::function<void(absl::Status)> done) override {
    place_->transport()->Pull(request, to, deadline, [place = place_, done = std::move(done)](const absl::Status& s) {
      done(place->Seen(s));
    });
  }

 private:
  template <typename Response>
  Callback<Response> Watched(Callback<Response> done) {
    return [place = place_, done = std::move(done)](absl::StatusOr<Response> answer) {
      if (answer.ok()) return done(std::move(answer));
      done(place->Seen(answer.status()));
    };
  }

  template <typename Request, typename Response>
  void Call(void (Transport::*method)(const Request&, absl::Time, Callback<Response>), const Request& request,
            absl::Time deadline, Callback<Response> done) {
    (place_->transport().get()->*method)(request, deadline, Watched(std::move(done)));
  }

  const std::string target_;
  const std::shared_ptr<Place> place_;
  const std::shared_ptr<Directory> directory_;
};

absl::StatusOr<std::unique_ptr<Transport>> Directory::TransportTo(const v1::Member& server) {
  BALLAST_ASSIGN_OR_RETURN(auto transport, connect_(server.address()));
  auto place = std::make_shared<Place>(server, std::move(transport), connect_, doubt_);
  {
    absl::MutexLock lock(&mutex_);
    places_.push_back(place);
  }
  return std::make_unique<DiscoveredTransport>(model::TargetOf(server.server_id(), server.disk()), std::move(place),
                                               shared_from_this());
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Transport>>> DiscoverTransports(const registry::RegistryUrl& url,
                                                                           Connector connect, const std::string& job,
                                                                           absl::Duration timeout,
                                                                           const std::function<bool()>& interrupted,
                                                                           registry::Servers which) {
  auto registry = std::make_unique<registry::Registry>(url);
  BALLAST_ASSIGN_OR_RETURN(const auto entries,
                           registry::AwaitServers(registry.get(), job, timeout, interrupted, which));
  const auto directory = std::make_shared<Directory>(std::move(registry), std::move(connect));
  BALLAST_RETURN_IF_ERROR(directory->made());
  std::vector<std::unique_ptr<Transport>> transports;
  for (const v1::ServerEntry& entry : entries) {
    v1::Member server;
    server.set_server_id(entry.server_id());
    server.set_disk(entry.disk());
    server.set_address(entry.address());
    BALLAST_ASSIGN_OR_RETURN(transports.emplace_back(), directory->TransportTo(server));
  }
  return transports;
}

}  // namespace ballast::client
