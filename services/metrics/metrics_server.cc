#include "ballast/services/metrics/metrics_server.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/address.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/metrics/families.h"

namespace ballast::services {
namespace {

// civetweb reads a request on the thread that will answer, so each silent client occupies a thread for
// kRequestTimeoutMs. A scrape behind 300 of them begins within 300 / 128 seconds; Prometheus waits 10 s by default.
constexpr char kThreads[] = "128";
constexpr char kRequestTimeoutMs[] = "1000";
// Connections that wait for a thread. An accepted connection takes a descriptor of the process; a connection in the
// kernel's backlog does not.
constexpr char kAcceptedMax[] = "128";
constexpr char kBacklog[] = "1024";

class StateCollectable final : public prometheus::Collectable {
 public:
  explicit StateCollectable(const StateServer* state) : state_(state) {}
  std::vector<prometheus::MetricFamily> Collect() const override { return CollectFamilies(*state_); }

 private:
  const StateServer* const state_;
};

}  // namespace

struct MetricsServer::Impl {
  std::shared_ptr<StateCollectable> collectable;  // the exposer keeps a weak reference
  std::unique_ptr<prometheus::Exposer> exposer;
  std::string address;
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& listen,
                                                                    const StateServer* state) {
  BALLAST_ASSIGN_OR_RETURN(model::Address address, model::ParseAddress(listen, model::AddressUse::kListen));
  auto impl = std::make_unique<Impl>();
  impl->collectable = std::make_shared<StateCollectable>(state);
  try {
    impl->exposer = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", model::FormatAddress(address), "num_threads", kThreads, "request_timeout_ms",
        kRequestTimeoutMs, "connection_queue", kAcceptedMax, "listen_backlog", kBacklog});
  } catch (const std::exception& error) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadConfig,
                        absl::StrCat("cannot serve metrics on '", listen,
                                     "': the port is in use, or the address is none of this machine's; choose another "
                                     "`metrics_listen` (",
                                     error.what(), ")"));
  }
  impl->exposer->RegisterCollectable(impl->collectable);
  address.port = static_cast<uint16_t>(impl->exposer->GetListeningPorts().at(0));
  impl->address = model::FormatAddress(address);
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

const std::string& MetricsServer::address() const { return impl_->address; }

}  // namespace ballast::services
