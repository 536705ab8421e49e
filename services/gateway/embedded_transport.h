// A state server inside the trainer's process: the client's transport interface over a StateServer, no network between.
#pragma once

#include <memory>

#include "ballast/client/transport.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// Borrows `server`, which must outlive the transport. Several transports may share one server. `threads` copy the bytes
// of pushes and pulls, and compute norms: callers do not wait for that. Bytes have checksums only in a job's log.
std::unique_ptr<client::Transport> MakeEmbeddedTransport(StateServer* server, int threads = 1);

}  // namespace ballast::services
