// Threads that may not be had: a system bounds them, and a program that ignores that ends at the bound.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <system_error>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast::model {

// The lowest bound on this process's threads, and who sets it: "pids.max", "ulimit -u", "kernel.threads-max".
struct ThreadLimit {
  uint64_t max = 0;
  std::string name;
};
ThreadLimit ThreadsAllowed();

// RESOURCE_EXHAUSTED (LIMIT), naming the limit: what a library threw because the system made no thread, or another
// refusal of the system.
absl::Status NoThread(const std::system_error& error);

// Starts a thread that runs `body`. RESOURCE_EXHAUSTED (LIMIT), naming the limit, if the system refuses the thread.
absl::StatusOr<std::thread> MakeThread(std::function<void()> body);

// RESOURCE_EXHAUSTED (LIMIT) if the system does not make `count` further threads: for libraries that do not tell.
absl::Status CheckThreads(int count);

}  // namespace ballast::model
