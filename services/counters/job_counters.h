// Counters of one job since the server made it.
#pragma once

#include <atomic>
#include <cstdint>

#include "ballast/services/counters/step_log.h"

namespace ballast::services {

// The most decided steps that wait for the worker. More than one waits only if the steps touch few of this server's
// chunks, because a push waits until its chunk's update is done.
inline constexpr int kQueuedStepsMax = 8;

// Threads: any.
struct JobCounters {
  StepLog steps;
  std::atomic<uint64_t> received_bytes{0};           // payloads of pushes
  std::atomic<uint64_t> received_in_place_bytes{0};  // of these: read in the trainer's memory, not copied
  std::atomic<uint64_t> sent_bytes{0};               // payloads of pulls
  std::atomic<uint64_t> duplicate_pushes{0};         // slices that were held already, acknowledged once more
  std::atomic<uint64_t> fences{0};
  std::atomic<uint64_t> flushed_chunks{0};
  // States of whole chunks: sent to other servers, and taken from them.
  std::atomic<uint64_t> exported_bytes{0};
  std::atomic<uint64_t> imported_bytes{0};
  std::atomic<uint64_t> damaged_chunks{0};    // given up because of damage, and copied from other servers
  std::atomic<uint64_t> differing_copies{0};  // comparisons in which copies of a chunk differed
};

}  // namespace ballast::services
