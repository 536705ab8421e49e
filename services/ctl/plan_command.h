// `ballastctl plan`: what a job would take of machines, before there are any.
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
  // By name, as proto/model/names.h has them.
  std::string optimizer = "adamw", moments = "f32", gradient = "bf16", working = "bf16", durability = "step";
  bool amsgrad = false, momentum = false;
  uint64_t pin_interval = 0;
  uint64_t staging_bytes = 0;   // 0: a server's default
  std::string machine_profile;  // empty: ballast-profile.yaml here, if it is there
  int threads = 1;
  bool json = false;
};
// Exit code: 0 it fits; 1 it does not, or the plan could not be made; 2 usage.
int RunPlan(const PlanCommand& command);

// "7B" -> 7000000000. Suffixes: none, K, M, B, T; decimals and exponents. None for what is none, or no whole number.
std::optional<uint64_t> ParseCount(const std::string& text);

}  // namespace ballast::services
