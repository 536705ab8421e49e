// `ballastctl verify`: the scrub of services/verify on the command line.
#pragma once

#include <string>

#include "ballast/services/verify/verify.h"

namespace ballast::services {

struct VerifyCommand {
  std::string directory;
  bool json = false;
  bool rebuild = false;
};
// Exit code: 0 clean; 1 damage found, or it could not be looked at; 2 no data directory; 3 a server has it.
int RunVerify(const VerifyCommand& command);

// One line per finding, then the verdict and counts.
std::string ShowText(const ScrubReport& report);
std::string ShowJson(const ScrubReport& report, const RebuildResult* rebuilt);

}  // namespace ballast::services
