// Finds out why a TLS connection fails. gRPC mostly says only "Socket closed".
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/proto/base/access.h"
#include "ballast/proto/base/address.h"

namespace ballast::model {

// Makes one handshake with `server`, as gRPC would, and reads what the server shows and says. FAILED_PRECONDITION (TLS)
// if they cannot connect before somebody changes files or configuration; the message names what is wanted and what was
// shown. OK if the probe found no such conflict, or if nobody answered. Blocks until `deadline`, and while a name is
// looked up.
absl::Status ProbeTls(const Address& server, const AccessContent& access, absl::Time deadline);

}  // namespace ballast::model
