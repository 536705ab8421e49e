// Threads that may not be had: a system bounds them, and a program that ignores that ends at the bound.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace ballast::model {

// The lowest bound on this process's threads, and who sets it: "pids.max", "ulimit -u", "kernel.threads-max".
struct ThreadLimit {
  uint64_t max = 0;
  std::string name;
};
ThreadLimit ThreadsAllowed();

// A thread that runs `body`. RESOURCE_EXHAUSTED (LIMIT), naming the limit, if the system makes none.
absl::StatusOr<std::thread> MakeThread(std::function<void()> body);

}  // namespace ballast::model
