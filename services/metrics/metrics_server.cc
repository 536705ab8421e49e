#include "ballast/services/metrics/metrics_server.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/metrics/families.h"

namespace ballast::services {
namespace {

// Scrapes are rare and small.
constexpr size_t kThreads = 2;

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
  auto impl = std::make_unique<Impl>();
  impl->collectable = std::make_shared<StateCollectable>(state);
  try {
    impl->exposer = std::make_unique<prometheus::Exposer>(listen, kThreads);
  } catch (const std::exception& error) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadConfig,
                        absl::StrCat("cannot serve metrics on '", listen,
                                     "': the port is in use, or the address is none of this machine's; choose another "
                                     "`metrics_listen` (",
                                     error.what(), ")"));
  }
  impl->exposer->RegisterCollectable(impl->collectable);
  impl->address = absl::StrCat(listen.substr(0, listen.rfind(':')), ":", impl->exposer->GetListeningPorts().at(0));
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

const std::string& MetricsServer::address() const { return impl_->address; }

}  // namespace ballast::services
