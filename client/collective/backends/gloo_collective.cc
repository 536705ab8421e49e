#include "ballast/client/collective/gloo_collective.h"

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/client/collective/backends/pairwise_collective.h"
#include "ballast/proto/base/broken_pipe.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using std::chrono::milliseconds;

// At least one, because Gloo takes zero for "no limit". Rounded up, so that the deadline has passed after the wait.
milliseconds Left(absl::Time deadline) {
  return milliseconds(std::max<int64_t>(1, 1 + absl::ToInt64Milliseconds(deadline - absl::Now())));
}

// Gloo's store over ours. Gloo hears of an error by exception only, so the status is kept for whoever catches it.
class RendezvousStore : public gloo::rendezvous::Store {
 public:
  RendezvousStore(Rendezvous* rendezvous, absl::Time deadline) : rendezvous_(rendezvous), deadline_(deadline) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    Check(rendezvous_->Set(absl::StrCat("gloo/", key), absl::string_view(data.data(), data.size())));
  }
  std::vector<char> get(const std::string& key) override {
    const absl::StatusOr<std::string> value = rendezvous_->Get(absl::StrCat("gloo/", key), deadline_);
    Check(value.status());
    return std::vector<char>(value->begin(), value->end());
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const milliseconds&) override { wait(keys); }

  const absl::Status& status() const { return status_; }

 private:
  void Check(const absl::Status& status) {
    if (status.ok()) return;
    status_ = status;
    throw std::runtime_error(std::string(status.message()));
  }

  Rendezvous* const rendezvous_;
  const absl::Time deadline_;
  absl::Status status_;
};

class GlooCollective : public PairwiseCollective {
 public:
  GlooCollective(std::shared_ptr<gloo::rendezvous::Context> context, absl::Duration timeout)
      : PairwiseCollective(context->rank, context->size), context_(std::move(context)), timeout_(timeout) {}

  ~GlooCollective() override {
    const model::BrokenPipeBlock block;
    try {
      context_->closeConnections();
    } catch (const std::exception&) {
      // The peer was faster.
    }
  }

 protected:
  absl::Status Transfer(absl::Span<const Source> to, absl::Span<const Target> from) override {
    const model::BrokenPipeBlock block;
    const absl::Time deadline = absl::Now() + timeout_;
    // Messages are matched by (peer, slot): one slot a call.
    const uint64_t slot = ++slot_;
    int peer = rank();
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> sends(world_size()), receives(world_size());
    try {
      // Receives are announced first, so that bytes go straight to their place. Each rank starts at its right
      // neighbour.
      for (int k = 1; k < world_size(); ++k) {
        peer = (rank() + k) % world_size();
        if (from[peer].empty()) continue;
        receives[peer] = context_->createUnboundBuffer(from[peer].data(), from[peer].size());
        receives[peer]->recv(peer, slot);
      }
      for (int k = 1; k < world_size(); ++k) {
        peer = (rank() + k) % world_size();
        if (to[peer].empty()) continue;
        // Gloo's pointer is not const, but a send only reads.
        sends[peer] = context_->createUnboundBuffer(const_cast<std::byte*>(to[peer].data()), to[peer].size());
        sends[peer]->send(peer, slot);
      }
      for (int k = 1; k < world_size(); ++k) {
        peer = (rank() + k) % world_size();
        if (receives[peer] != nullptr) receives[peer]->waitRecv(Left(deadline));
      }
      for (int k = 1; k < world_size(); ++k) {
        peer = (rank() + k) % world_size();
        if (sends[peer] != nullptr) sends[peer]->waitSend(Left(deadline));
      }
    } catch (const std::exception& e) {
      return Fail(peer, deadline, e.what());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Fail(int peer, absl::Time deadline, const char* what) {
    const bool late = absl::Now() >= deadline;
    // No thread may touch the caller's memory after return, and the other ranks must get the error now.
    try {
      context_->closeConnections();
    } catch (const std::exception&) {
      // Closed already.
    }
    if (late) {
      return model::Error(
          absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
          absl::StrCat("rank ", peer, " of ", world_size(), " did not answer rank ", rank(), " within ",
                       absl::FormatDuration(timeout_), "; stop the group and start it again (", what, ")"));
    }
    return model::Error(absl::StatusCode::kUnavailable, model::kRankMissing,
                        absl::StrCat("rank ", rank(), " lost rank ", peer, " of ", world_size(),
                                     "; stop the group and start it again (", what, ")"));
  }

  const std::shared_ptr<gloo::rendezvous::Context> context_;
  const absl::Duration timeout_;
  uint64_t slot_ = 0;
};

// The first address of `host` that this machine has, as text.
absl::StatusOr<std::string> LocalAddress(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &list); error != 0) {
    return absl::InvalidArgumentError(gai_strerror(error));
  }
  absl::StatusOr<std::string> found = absl::InvalidArgumentError("no address of it belongs to this machine");
  for (const addrinfo* at = list; at != nullptr && !found.ok(); at = at->ai_next) {
    const int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    if (fd < 0) continue;
    char text[NI_MAXHOST];
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        getnameinfo(at->ai_addr, at->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0) {
      found = std::string(text);
    }
    close(fd);
  }
  freeaddrinfo(list);
  return found;
}

absl::StatusOr<std::shared_ptr<gloo::transport::Device>> Listen(int rank, const GlooOptions& options) {
  const bool by_interface = !options.interface.empty();
  const auto refuse = [&](absl::string_view why) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("rank ", rank, " cannot listen at ", by_interface ? "interface '" : "host '",
                                     by_interface ? options.interface : options.host,
                                     "'; give an address or interface of this machine (", why, ")"));
  };
  gloo::transport::tcp::attr attr;
  attr.iface = options.interface;
  // Names are looked up here: Gloo 2022-05 crashes on a host that does not resolve, and leaks when an interface is
  // unknown.
  if (by_interface) {
    if (if_nametoindex(options.interface.c_str()) == 0) return refuse("there is no such interface");
  } else {
    absl::StatusOr<std::string> address = LocalAddress(options.host);
    if (!address.ok()) return refuse(address.status().message());
    attr.hostname = *std::move(address);
  }
  try {
    return gloo::transport::tcp::CreateDevice(attr);
  } catch (const std::exception& e) {
    return refuse(e.what());
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeGloo(Rendezvous* rendezvous, int rank, int world_size,
                                                     const GlooOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("rank ", rank, " of ", world_size, ": expected 0 <= rank < world size"));
  }
  const model::BrokenPipeBlock block;
  const absl::Time deadline = absl::Now() + options.timeout;
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<gloo::transport::Device> device, Listen(rank, options));
  RendezvousStore store(rendezvous, deadline);
  try {
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, world_size);
    // Gloo waits five times as long for a connection.
    context->setTimeout(std::max(milliseconds(1), Left(deadline) / 5));
    context->connectFullMesh(store, device);
    return std::make_unique<GlooCollective>(std::move(context), options.timeout);
  } catch (const std::exception& e) {
    if (!store.status().ok()) return model::Annotate(store.status(), "connecting the group");
    const bool late = absl::Now() >= deadline;
    return model::Error(
        late ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kUnavailable, model::kRankMissing,
        absl::StrCat("rank ", rank, " of ", world_size, " could not connect to all others: ", e.what()));
  }
}

}  // namespace ballast::client
