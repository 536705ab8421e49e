// Why a connection by TLS comes to nothing. gRPC says "Socket closed" for most of it.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/proto/model/access.h"
#include "ballast/proto/model/address.h"

namespace ballast::model {

// Makes one handshake with `server`, as gRPC would, and reads what the server shows and says. FAILED_PRECONDITION (TLS)
// if server and client will not meet before somebody changes files or configuration: names what is wanted and what was
// shown. OK: nothing of that kind was found, as when nobody answers. Blocks until `deadline`.
absl::Status ProbeTls(const Address& server, const AccessContent& access, absl::Time deadline);

}  // namespace ballast::model
