// The state of a server as a whole, and how far its start is with the jobs of its last run.
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

// Threads: any. Bytes: states that are read from their extents, and slices that are replayed from the logs. Until a
// job's log has been scanned, the file's size stands for its slices; so the total becomes smaller, never larger.
struct RecoveryProgress {
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<uint64_t> total_bytes{0};
};

}  // namespace ballast::services
