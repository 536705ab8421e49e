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
// Registered servers that are not members of a job with copies. A group that opens the job may make them members.
enum class Spares { kConnect, kPassOver };

// Makes a transport for each server that a user names: by addresses, or by the URL of a registry
// (etcd://host:port/prefix?servers=N). With a URL it waits for the registry's servers (client/discovery) until
// `timeout`, or until `interrupted` returns true. If `job` has a key there, it waits for the job's servers only;
// `spares` says whether it also connects to spares. `access`: files with this caller's identity and the expected
// identity of the servers. They are read again when they change. INVALID_ARGUMENT (BAD_CONFIG) for a text that is
// neither, for bad files, and for a token that would travel in the clear; with a URL also the errors of
// registry::AwaitServers.
absl::StatusOr<std::vector<std::unique_ptr<Transport>>> MakeGrpcTransports(
    const std::vector<std::string>& servers, const std::string& job, const model::Access& access = {},
    absl::Duration timeout = absl::Seconds(60), const std::function<bool()>& interrupted = nullptr,
    Spares spares = Spares::kConnect);

// Tunes the process for what a trainer does. Call it once at program start; a library must not. Calls
// model::StopDeadlockSearch, and sets M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_TOP_PAD: by default glibc trims its heap
// around gRPC's read buffers, at more cost than the transfer itself.
void TuneProgram();

}  // namespace ballast::client
