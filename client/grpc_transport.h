// The client's transport over gRPC.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/transport.h"
#include "ballast/proto/base/access.h"

namespace ballast::client {

// `address`: "host:port". Connects lazily: a server that is down shows as UNAVAILABLE (SERVER_DOWN) on calls.
std::unique_ptr<Transport> MakeGrpcTransport(const std::string& address);
// Servers that are no members of a job with copies, and that a group which opens the job may make members.
enum class Spares { kConnect, kPassOver };

// Makes a transport per server given by a user: addresses, or the URL of a registry
// (etcd://host:port/prefix?servers=N), whose servers are waited for (client/discovery), those of `job` if it has a key
// there (and `spares`), until `timeout` or until `interrupted` says so. `access`: files that show who calls, and who
// the servers must be; they are read again when they change. INVALID_ARGUMENT (BAD_CONFIG) for a text that is neither,
// for bad files, and for a token that would travel in the clear; with a URL also the errors of registry::AwaitServers.
absl::StatusOr<std::vector<std::unique_ptr<Transport>>> MakeGrpcTransports(
    const std::vector<std::string>& servers, const std::string& job, const model::Access& access = {},
    absl::Duration timeout = absl::Seconds(60), const std::function<bool()>& interrupted = nullptr,
    Spares spares = Spares::kConnect);

// Tunes the process for what a trainer does. Call it once at program start; a library must not. Calls
// model::StopDeadlockSearch, and sets M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_TOP_PAD: by default glibc trims its heap
// around gRPC's read buffers, at more cost than the transfer itself.
void TuneProgram();

}  // namespace ballast::client
