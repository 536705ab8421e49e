// TLS on the HTTP port: a server's side of each connection, by the newest checked certificates.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "ballast/services/gateway/security/guard.h"

struct ssl_ctx_st;
struct ssl_st;

namespace ballast::services {

// A connected socket that does not block, in the clear or by TLS. One thread.
class Line {
 public:
  // Takes over `fd`. `tls`: null, in the clear; else not yet shaken hands.
  Line(int fd, ssl_st* tls);
  Line(Line&& other) noexcept;
  Line& operator=(Line&& other) = delete;
  ~Line();

  // As recv(2) and send(2): -1 with errno, EAGAIN if nothing can be read or written now. Either may shake hands first,
  // so each is tried again whenever the socket can be read or written.
  ssize_t Receive(char* to, size_t size);
  ssize_t Send(const char* from, size_t size);
  // Nothing will be sent any more; Drain alone reads from here on.
  void EndSending();
  // Reads and drops what is there: 0 at the end, -1 with errno.
  ssize_t Drain();

  // Whether the client showed a certificate; a bad one does not get this far.
  bool certified() const;

 private:
  ssize_t Result(int returned) const;

  int fd_;
  ssl_st* tls_;
};

// Makes the TLS sessions of a port. Clients may show a certificate by `tls.client_ca`, and need none. No session is
// resumed: each handshake meets the CAs and revocations of now. Threads: one at a time.
class TlsSessions {
 public:
  // Borrows `guard`, which tells of clients that are refused. INTERNAL if OpenSSL does not take what was checked.
  // REQUIRES: guard->certificates().
  static absl::StatusOr<std::unique_ptr<TlsSessions>> Make(Guard* guard);

  // A session on `fd`, for Line. Null: out of memory.
  ssl_st* Accept(int fd);

 private:
  explicit TlsSessions(Guard* guard) : guard_(guard) {}
  absl::Status Renew(std::shared_ptr<const Certificates> certificates);

  Guard* const guard_;
  std::shared_ptr<const Certificates> of_;  // what context_ was made of, or refused
  std::shared_ptr<ssl_ctx_st> context_;
};

}  // namespace ballast::services
