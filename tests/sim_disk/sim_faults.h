// Which operations of a simulated disk go wrong, and how: scripted one by one, or by chance from the disk's seed.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "ballast/tests/sim/random.h"

namespace ballast::storage {

enum class SimOperation { kOpen, kRemove, kRead, kWrite, kSync, kReserve, kDiscard, kTruncate };
inline constexpr int kSimOperations = 8;

enum class SimFault {
  kEio,     // INTERNAL (IO). A read fills some of the buffer, a write writes some of its blocks; a sync loses some of
            // what it covers for good. Else nothing was done
  kEnospc,  // RESOURCE_EXHAUSTED (IO), like kEio otherwise: of what takes space
  kShort,   // the transfer moved less than asked and was resubmitted inside the disk: only counted
  kStale,   // a read returns what was durable before the writes since
  kMisdirected,  // a write says OK and lands on other blocks of the file; lost, if the file has no others
  kBitFlip,      // a read returns one wrong bit; the content is right
  kRot,          // one bit of the durable content is flipped for good: in the range of the transfer, else in the file
  kLostWrite,    // a write says OK, and only the file's size knows
  kLostSync,     // a sync says OK, and nothing is durable
};
inline constexpr int kSimFaults = 9;

// Threads: the owner's lock.
class SimFaultPlan {
 public:
  // False if an operation of that kind cannot suffer it, which is a mistake of the test: nothing is planned then.
  static bool Possible(SimOperation operation, SimFault fault);

  // The k-th operation of that kind from now on, from 1. A later call for the same operation replaces an earlier one.
  [[nodiscard]] bool FailNext(SimOperation operation, uint64_t k, SimFault fault);
  // Of each operation of that kind, 0 to 1; 0 ends it.
  [[nodiscard]] bool SetProbability(SimOperation operation, SimFault fault, double probability);
  // Counts an operation that begins. Draws from `random` only for the probabilities that are set, so that those which
  // are not change no schedule.
  std::optional<SimFault> Next(SimOperation operation, sim::Random& random);

  uint64_t operations() const;
  uint64_t operations(SimOperation operation) const { return operations_[static_cast<int>(operation)]; }
  // That operations have suffered.
  uint64_t suffered(SimFault fault) const { return suffered_[static_cast<int>(fault)]; }

 private:
  std::array<uint64_t, kSimOperations> operations_ = {};
  std::array<uint64_t, kSimFaults> suffered_ = {};
  std::map<std::pair<SimOperation, uint64_t>, SimFault> scripted_;  // by kind and number of the operation
  std::map<std::pair<SimOperation, SimFault>, double> probabilities_;
};

}  // namespace ballast::storage
