// The state of a server as a whole, and how much of its last run's jobs a start has recovered.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ballast::services {

enum class ServerState { kRecovering, kReady, kStopping };
inline constexpr std::array<ServerState, 3> kServerStates = {ServerState::kRecovering, ServerState::kReady,
                                                             ServerState::kStopping};
constexpr const char* ServerStateName(ServerState state) {
  constexpr std::array<const char*, 3> kNames = {"recovering", "ready", "stopping"};
  return kNames[static_cast<size_t>(state)];
}

// Threads: any. Bytes that are read: states from their extents, and logs, first by a scan for their records, then by
// the updates that replay the logs' slices, chunk by chunk. Until a job's log has been scanned, the file's size stands
// for both. `done_bytes` never shrinks, and never exceeds `total_bytes`; a started server has done all.
struct RecoveryProgress {
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<uint64_t> total_bytes{0};
};

}  // namespace ballast::services
