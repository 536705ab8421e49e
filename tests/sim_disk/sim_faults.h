// Faults of a simulated disk's operations: scripted one by one, or drawn with the disk's seed.
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
  kEio,     // INTERNAL (IO). A read fills part of the buffer, a write stores some of its blocks, a sync loses some of
            // the covered writes for good. Other operations do nothing
  kEnospc,  // RESOURCE_EXHAUSTED (DISK_FULL), otherwise like kEio: open, write, sync and reserve only
  kShort,   // the transfer moved less than asked and the disk resubmitted the rest: only counted
  kStale,   // a read returns the durable bytes, without later writes
  kMisdirected,  // a write reports OK and lands on different blocks of the file; lost, if there are none
  kBitFlip,      // a read returns one wrong bit; the content is right
  kRot,          // a durable bit flips for good: in the transfer's range or, if none is durable there, in the file
  kLostWrite,    // a write reports OK and changes only the file's size
  kLostSync,     // a sync reports OK and makes nothing durable
};
inline constexpr int kSimFaults = 9;

// Threads: the caller holds the owner's lock.
class SimFaultPlan {
 public:
  // True if an operation of this kind can suffer the fault. If not, the next two return false and plan nothing: a
  // mistake of the test.
  static bool Possible(SimOperation operation, SimFault fault);

  // Plans a fault of the k-th operation of this kind from now on, counted from 1. A later call for the same operation
  // replaces an earlier call. False also if k is 0.
  [[nodiscard]] bool FailNext(SimOperation operation, uint64_t k, SimFault fault);
  // Sets the probability, 0 to 1, of the fault in each operation of this kind. 0 ends the fault.
  [[nodiscard]] bool SetProbability(SimOperation operation, SimFault fault, double probability);
  // Counts an operation at its start and returns its fault. Draws from `random` only for probabilities that are set, so
  // the rest do not change a schedule.
  std::optional<SimFault> Next(SimOperation operation, sim::Random& random);

  uint64_t operations() const;
  uint64_t operations(SimOperation operation) const { return operations_[static_cast<int>(operation)]; }
  // How often operations have suffered `fault`.
  uint64_t suffered(SimFault fault) const { return suffered_[static_cast<int>(fault)]; }

 private:
  std::array<uint64_t, kSimOperations> operations_ = {};
  std::array<uint64_t, kSimFaults> suffered_ = {};
  std::map<std::pair<SimOperation, uint64_t>, SimFault> scripted_;  // by kind and number of the operation
  std::map<std::pair<SimOperation, SimFault>, double> probabilities_;
};

}  // namespace ballast::storage
