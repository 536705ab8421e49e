// The sockets of an HTTP port: one thread reads all requests and writes all answers, and waits for no client.
//
// A connection carries one request. Only a whole request reaches the threads that answer, and these hand a whole answer
// back; so a client that is silent, sends byte by byte or does not read costs a place in a table and no thread. When
// the table is full, the oldest connection that has not sent a whole request makes room; without one, the oldest.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/monitoring/tls.h"
#include "ballast/services/threads/executor.h"

namespace ballast::services {

// Threads: any.
class Doorman {
 public:
  static constexpr size_t kConnectionsMax = 256;
  static constexpr size_t kRequestBytesMax = size_t{16} << 10;  // line and headers; a longer request is not answered
  static constexpr size_t kUnsentBytesMax = size_t{64} << 20;   // of all answers; beyond, the oldest is given up

  // Makes the bytes of an answer from those of a request's line and headers. `certified`: the client showed a
  // certificate by TLS. Runs on two threads, and on one for requests that are quick.
  using Answer = std::function<std::string(const std::string& request, bool certified)>;
  // Whether the answer to a request takes no time: such a request waits for none that may. Null: no request's.
  using IsQuick = std::function<bool(const std::string& request)>;

  // `listen`: host:port; port 0 takes a free one. `tls`: null, in the clear. INVALID_ARGUMENT (BAD_CONFIG) if `listen`
  // is no address, FAILED_PRECONDITION (BAD_CONFIG) if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<Doorman>> Start(const std::string& listen, Answer answer,
                                                        std::unique_ptr<TlsSessions> tls = nullptr,
                                                        IsQuick is_quick = nullptr);
  ~Doorman();  // waits for the answers under way

  // "host:port" with the port really taken.
  const std::string& address() const;

 private:
  struct Impl;
  explicit Doorman(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::services
