// /metrics of a state server: its counters as Prometheus families, read at each scrape.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// Threads: any.
class MetricsServer {
 public:
  // Borrows `state`. `listen`: host:port; port 0 takes a free port. INVALID_ARGUMENT (BAD_CONFIG) if `listen` is not an
  // address, FAILED_PRECONDITION (BAD_CONFIG) if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen, const StateServer* state);
  ~MetricsServer();

  // "host:port" with the port really taken.
  const std::string& address() const;

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::services
