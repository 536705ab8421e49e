// `ballastctl plan`: the memory, disk and step time that a job would need, before there are any machines.
#pragma once

#include <optional>
#include <string>

#include "ballast/storage/placement/tier_kind.h"

namespace ballast::services {

struct PlanCommand {
  std::string parameters;  // as ParseCount takes them
  uint32_t units = 32;     // layers of equal size
  uint32_t ranks = 1;
  uint32_t servers = 1;
  storage::TierBytes budget;  // of each server
  // By name, as proto/model/optimizer.h and names.h have them.
  std::string optimizer = "adamw", moments = "f32", master = "f32", gradient = "bf16", working = "bf16",
              durability = "step";
  bool amsgrad = false, momentum = false;
  uint64_t pin_interval = 0;
  uint64_t staging_bytes = 0;   // 0: a server's default
  uint64_t log_steps = 0;       // 0: a server's default
  std::string machine_profile;  // empty: ballast-profile.yaml here, if present
  int threads = 1;
  bool json = false;
};
// Exit code: 0 the job fits; 1 the job does not fit, or the plan could not be made; 2 usage.
int RunPlan(const PlanCommand& command);

// "7B" -> 7000000000. Suffixes: none, K, M, B, T; decimals and exponents. None if `text` is not a whole number.
std::optional<uint64_t> ParseCount(const std::string& text);

}  // namespace ballast::services
