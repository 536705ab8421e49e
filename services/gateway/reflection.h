// gRPC's server reflection: which services there are, and the .proto files behind them. The library's own takes a
// thread per stream and asks nobody who calls.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <atomic>
#include <string>

#include "ballast/services/gateway/gate.h"

namespace ballast::services {

// Threads: any.
class Reflection {
 public:
  static constexpr int kStreamsMax = 4;  // at a time, over all callers

  explicit Reflection(const Gate* gate) : gate_(gate) {}
  static bool Has(const std::string& path);
  // Refuses callers that the guard does not know, and streams beyond kStreamsMax.
  grpc::ServerGenericBidiReactor* MakeStream(const grpc::CallbackServerContext& context);

 private:
  class Stream;
  const Gate* const gate_;
  std::atomic<int> streams_{0};
};

}  // namespace ballast::services
