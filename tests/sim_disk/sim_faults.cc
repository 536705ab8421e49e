#include "ballast/tests/sim_disk/sim_faults.h"

#include <numeric>

namespace ballast::storage {

bool SimFaultPlan::Possible(SimOperation operation, SimFault fault) {
  const bool transfer = operation == SimOperation::kRead || operation == SimOperation::kWrite;
  switch (fault) {
    case SimFault::kEio:
      return true;
    case SimFault::kEnospc:
      return operation == SimOperation::kOpen || operation == SimOperation::kWrite ||
             operation == SimOperation::kSync || operation == SimOperation::kReserve;
    case SimFault::kShort:
      return transfer;
    case SimFault::kStale:
    case SimFault::kBitFlip:
      return operation == SimOperation::kRead;
    case SimFault::kMisdirected:
    case SimFault::kLostWrite:
      return operation == SimOperation::kWrite;
    case SimFault::kRot:
      return transfer || operation == SimOperation::kSync;
    case SimFault::kLostSync:
      return operation == SimOperation::kSync;
  }
  return false;
}

bool SimFaultPlan::FailNext(SimOperation operation, uint64_t k, SimFault fault) {
  if (!Possible(operation, fault) || k == 0) return false;
  scripted_[{operation, operations(operation) + k}] = fault;
  return true;
}

bool SimFaultPlan::SetProbability(SimOperation operation, SimFault fault, double probability) {
  if (!Possible(operation, fault)) return false;
  if (probability > 0) {
    probabilities_[{operation, fault}] = probability;
  } else {
    probabilities_.erase({operation, fault});
  }
  return true;
}

std::optional<SimFault> SimFaultPlan::Next(SimOperation operation, sim::Random& random) {
  const uint64_t number = ++operations_[static_cast<int>(operation)];
  std::optional<SimFault> fault;
  for (const auto& [of, probability] : probabilities_) {
    if (of.first != operation) continue;
    // 53 bits: all that a double holds, so the comparison is the same on every machine.
    const bool hit = static_cast<double>(random.Next() >> 11) < probability * 0x1p53;
    if (hit && !fault.has_value()) fault = of.second;
  }
  if (const auto script = scripted_.find({operation, number}); script != scripted_.end()) {
    fault = script->second;
    scripted_.erase(script);
  }
  if (fault.has_value()) ++suffered_[static_cast<int>(*fault)];
  return fault;
}

uint64_t SimFaultPlan::operations() const {
  return std::accumulate(operations_.begin(), operations_.end(), uint64_t{0});
}

}  // namespace ballast::storage
