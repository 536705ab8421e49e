#include "ballast/services/gateway/shared_memory.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::services {
namespace {

// More clients than a host has ranks.
constexpr size_t kClientsMax = 256;
// Connections whose client has not handed memory over yet. Any process of this host may make some.
constexpr size_t kGuestsMax = 64;
// Every rank of a job asks, on whatever host it is, and most hosts cannot use the offer.
constexpr size_t kOffersMax = 16384;
constexpr int kLookIntervalMs = 1000;
constexpr absl::Duration kPause = absl::Milliseconds(20);  // after an error of the system that may pass
constexpr absl::Duration kWarningInterval = absl::Minutes(1);

}  // namespace

SharedRegion::SharedRegion(model::SharedMapping mapping, std::shared_ptr<SharedMemoryCounters> counters)
    : mapping_(std::move(mapping)), counters_(std::move(counters)) {
  counters_->mapped_bytes.fetch_add(bytes().size());
}

SharedRegion::~SharedRegion() { counters_->mapped_bytes.fetch_sub(bytes().size()); }

class SharedMemory::Desk {
 public:
  Desk(std::string host, std::string name, model::Descriptor listener, model::Descriptor stop, uint64_t bytes_max,
       std::shared_ptr<SharedMemoryCounters> counters)
      : host_(std::move(host)),
        name_(std::move(name)),
        listener_(std::move(listener)),
        stop_(std::move(stop)),
        bytes_max_(bytes_max),
        counters_(std::move(counters)) {
    counters_->mapped_bytes_max = bytes_max;
  }

  absl::StatusOr<v1::MemoryOffer> Offer() ABSL_LOCKS_EXCLUDED(offers_mutex_);
  absl::StatusOr<Part> Find(const v1::SharedPlace& place) const ABSL_LOCKS_EXCLUDED(regions_mutex_);
  SharedMemoryCounters* counters() const { return counters_.get(); }

  void Run();
  // Returns whether Run has ended.
  bool Stop(absl::Duration patience) {
    eventfd_write(stop_.get(), 1);
    return ended_.WaitForNotificationWithTimeout(patience);
  }

 private:
  struct Offered {
    std::string proof;
    absl::Time until;
  };
  // A client shows its ticket, hands its memory over, and stays connected.
  struct Connection {
    model::Descriptor socket;
    absl::Time until;    // by then the memory must be here; later on InfiniteFuture
    std::string ticket;  // once it was shown
    bool shares = false;
  };

  void Look();
  void Accept();
  // False: the connection ends.
  bool Serve(Connection* connection);
  bool ShowProof(Connection* connection, const std::string& ticket) ABSL_LOCKS_EXCLUDED(offers_mutex_);
  absl::Status Take(const Connection& connection, const model::Descriptor& memory) ABSL_LOCKS_EXCLUDED(regions_mutex_);
  void End(const Connection& connection) ABSL_LOCKS_EXCLUDED(regions_mutex_);
  void Warn(const absl::Status& refused);

  const std::string host_;
  const std::string name_;
  model::Descriptor listener_;  // the thread's
  const model::Descriptor stop_;
  const uint64_t bytes_max_;
  const std::shared_ptr<SharedMemoryCounters> counters_;
  absl::Mutex offers_mutex_;  // apart: pushes and pulls must not wait behind a crowd that asks
  absl::flat_hash_map<std::string, Offered> offers_ ABSL_GUARDED_BY(offers_mutex_);  // by ticket
  mutable absl::Mutex regions_mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<const SharedRegion>> regions_ ABSL_GUARDED_BY(regions_mutex_);
  absl::Notification ended_;
  // The thread's.
  std::list<Connection> connections_;
  bool stopping_ = false;
  absl::Time warned_ = absl::InfinitePast();
};

absl::StatusOr<v1::MemoryOffer> SharedMemory::Desk::Offer() {
  BALLAST_ASSIGN_OR_RETURN(const std::string ticket, model::MakeSecret(model::kSecretBytes));
  BALLAST_ASSIGN_OR_RETURN(const std::string proof, model::MakeSecret(model::kSecretBytes));
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&offers_mutex_);
  if (offers_.size() >= kOffersMax) {
    absl::erase_if(offers_, [&](const auto& offer) { return offer.second.until < now; });
  }
  if (offers_.size() >= kOffersMax) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        "too many clients ask for shared memory; ask again in some seconds");
  }
  offers_[ticket] = {proof, now + model::kHandOverMax};
  v1::MemoryOffer offer;
  offer.set_socket(name_);
  offer.set_ticket(ticket);
  offer.set_proof(proof);
  offer.set_host(host_);
  return offer;
}

absl::StatusOr<SharedMemory::Part> SharedMemory::Desk::Find(const v1::SharedPlace& place) const {
  BALLAST_RETURN_IF_ERROR(model::CheckKnown(place));
  std::shared_ptr<const SharedRegion> region;
  {
    absl::MutexLock lock(&regions_mutex_);
    const auto found = regions_.find(place.ticket());
    if (found != regions_.end()) region = found->second;
  }
  if (region == nullptr) {
    return model::Error(absl::StatusCode::kUnavailable, model::kMemoryGone,
                        "this server no longer shares memory with the caller; send the same request over the network");
  }
  const uint64_t all = region->bytes().size();
  if (place.offset() > all || place.bytes() > all - place.offset() || place.bytes() > model::kMessageBytesMax ||
      place.offset() % model::kPlaceAlignment != 0) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRange,
                        absl::StrCat("the shared memory has ", all, " bytes, asked for ", place.bytes(), " from ",
                                     place.offset(), "; a place begins at a multiple of ", model::kPlaceAlignment,
                                     " and has at most ", model::kMessageBytesMax, " bytes"));
  }
  return Part{region, region->bytes().subspan(place.offset(), place.bytes())};
}

void SharedMemory::Desk::Run() {
  while (!stopping_) Look();
  for (const Connection& connection : connections_) End(connection);
  connections_.clear();
  listener_ = model::Descriptor();  // here: whoever waits in its queue may make the close last
  ended_.Notify();
}

void SharedMemory::Desk::Look() {
  std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  bool guests = false;
  for (const Connection& connection : connections_) {
    polled.push_back({connection.socket.get(), POLLIN, 0});
    guests = guests || !connection.shares;
  }
  if (poll(polled.data(), polled.size(), guests ? kLookIntervalMs : -1) < 0) {
    if (errno != EINTR) absl::SleepFor(kPause);
    return;
  }
  stopping_ = polled[0].revents != 0;
  size_t at = 2;
  const absl::Time now = absl::Now();
  for (auto it = connections_.begin(); it != connections_.end(); ++at) {
    const bool stays = (polled[at].revents == 0 || Serve(&*it)) && now < it->until;
    if (!stays) End(*it);
    it = stays ? std::next(it) : connections_.erase(it);
  }
  if (polled[1].revents != 0) Accept();
}

void SharedMemory::Desk::Accept() {
  // A client may have sent a descriptor with any message, even before it is accepted.
  model::Descriptor socket =
      model::Descriptor::Foreign(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket.get() < 0) {
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) absl::SleepFor(kPause);
    return;
  }
  // The oldest guest goes first, so that idle ones keep nobody out.
  const auto is_guest = [](const Connection& connection) { return !connection.shares; };
  const auto guests = static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), is_guest));
  if (connections_.size() - guests >= kClientsMax) return;
  if (guests >= kGuestsMax) connections_.erase(std::find_if(connections_.begin(), connections_.end(), is_guest));
  connections_.push_back({std::move(socket), absl::Now() + model::kHandOverMax, "", false});
}

bool SharedMemory::Desk::Serve(Connection* connection) {
  const int socket = connection->socket.get();
  absl::StatusOr<model::SocketMessage> message = model::ReceiveSocketMessage(socket, absl::InfinitePast());
  // A client that shares its memory says nothing more: it ends, or breaks the rules.
  if (!message.ok() || message->text.empty() || connection->shares) return false;
  if (connection->ticket.empty()) return ShowProof(connection, message->text);
  const absl::Status taken = Take(*connection, message->descriptor);
  if (!taken.ok()) {
    Warn(taken);
    (void)model::SendSocketMessage(socket, taken.message().substr(0, model::kSocketMessageBytesMax));
    return false;
  }
  connection->shares = true;
  connection->until = absl::InfiniteFuture();
  return model::SendSocketMessage(socket, model::kTaken).ok();
}

bool SharedMemory::Desk::ShowProof(Connection* connection, const std::string& ticket) {
  std::string proof;
  {
    absl::MutexLock lock(&offers_mutex_);
    const auto offer = offers_.find(ticket);
    if (offer == offers_.end()) return false;
    if (absl::Now() < offer->second.until) proof = offer->second.proof;
    offers_.erase(offer);  // a ticket is for one client
  }
  connection->ticket = ticket;
  return !proof.empty() && model::SendSocketMessage(connection->socket.get(), proof).ok();
}

absl::Status SharedMemory::Desk::Take(const Connection& connection, const model::Descriptor& memory) {
  // Only this thread takes memory, so nobody else can use up what is left.
  const uint64_t used = counters_->mapped_bytes;
  if (used + model::kSharedBytes > bytes_max_) {
    return model::Error(
        absl::StatusCode::kResourceExhausted, model::kBudget,
        absl::StrCat("trainers on this host already share ", used, " bytes, one more needs ", model::kSharedBytes,
                     ", and the limit is ", bytes_max_, "; raise `shared_memory`"));
  }
  BALLAST_ASSIGN_OR_RETURN(model::SharedMapping mapping, model::SharedMapping::Map(memory));
  auto region = std::make_shared<const SharedRegion>(std::move(mapping), counters_);
  absl::MutexLock lock(&regions_mutex_);
  regions_[connection.ticket] = std::move(region);
  return absl::OkStatus();
}

void SharedMemory::Desk::End(const Connection& connection) {
  if (!connection.shares) return;
  std::shared_ptr<const SharedRegion> region;  // unmapped without the lock
  absl::MutexLock lock(&regions_mutex_);
  const auto found = regions_.find(connection.ticket);
  if (found == regions_.end()) return;
  region = std::move(found->second);
  regions_.erase(found);
}

void SharedMemory::Desk::Warn(const absl::Status& refused) {
  const absl::Time now = absl::Now();
  if (now - warned_ < kWarningInterval) return;
  warned_ = now;
  spdlog::warn("a trainer on this host sends its slices over the network: {}", std::string(refused.message()));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Start(uint64_t bytes_max,
                                                                  std::shared_ptr<SharedMemoryCounters> counters) {
  BALLAST_ASSIGN_OR_RETURN(std::string host, model::HostName());
  BALLAST_ASSIGN_OR_RETURN(const std::string secret, model::MakeSecret(model::kSecretBytes));
  const std::string name = absl::StrCat("ballast/", absl::BytesToHexString(secret));
  BALLAST_ASSIGN_OR_RETURN(model::Descriptor listener, model::ListenAtMemorySocket(name));
  model::Descriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (stop.get() < 0) return model::Error(absl::StatusCode::kUnavailable, model::kIo, "no eventfd");
  auto desk = std::make_shared<Desk>(std::move(host), name, std::move(listener), std::move(stop), bytes_max,
                                     std::move(counters));
  BALLAST_ASSIGN_OR_RETURN(std::thread thread, model::MakeThread([desk] { desk->Run(); }));
  return std::unique_ptr<SharedMemory>(new SharedMemory(std::move(desk), std::move(thread)));
}

SharedMemory::SharedMemory(std::shared_ptr<Desk> desk, std::thread thread)
    : desk_(std::move(desk)), thread_(std::move(thread)) {}

SharedMemory::~SharedMemory() {
  // The close of a descriptor that a hostile process sent may last for hours. Nothing depends on the thread then.
  constexpr absl::Duration kPatience = absl::Seconds(2);
  if (desk_->Stop(kPatience)) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

absl::StatusOr<v1::MemoryOffer> SharedMemory::Offer() { return desk_->Offer(); }
absl::StatusOr<SharedMemory::Part> SharedMemory::Find(const v1::SharedPlace& place) const { return desk_->Find(place); }
SharedMemoryCounters* SharedMemory::counters() const { return desk_->counters(); }

}  // namespace ballast::services
