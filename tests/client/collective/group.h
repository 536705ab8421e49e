// Groups of threads for tests of collectives.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/collective/file_rendezvous.h"
#include "ballast/client/collective/gloo_collective.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::client {

// Runs body(rank) on one thread per rank and joins them.
inline void OnEveryRank(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) threads.emplace_back(body, r);
  for (std::thread& thread : threads) thread.join();
}

enum class Backend { kLoopback, kGloo };

// The seats of a connected group, by rank.
inline std::vector<std::unique_ptr<Collective>> MakeGroup(Backend backend, int world_size, absl::Duration timeout) {
  if (backend == Backend::kLoopback) return MakeLoopbackGroup(world_size, timeout);
  const ScratchDirectory directory;
  std::vector<std::unique_ptr<Collective>> group(world_size);
  OnEveryRank(world_size, [&](int r) {
    auto rendezvous = FileRendezvous::Join({.directory = directory.path(), .rank = r, .world_size = world_size});
    ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
    GlooOptions options;
    options.timeout = timeout;
    auto seat = MakeGloo(rendezvous->get(), r, world_size, options);
    ASSERT_TRUE(seat.ok()) << seat.status();
    group[r] = *std::move(seat);
  });
  return group;
}

}  // namespace ballast::client
