// `ballastctl verify`: the scrub of services/tools/verify on the command line.
#pragma once

#include <string>
#include <vector>

#include "ballast/services/tools/verify/verify.h"

namespace ballast::services {

struct VerifyCommand {
  std::string directory;
  std::vector<std::string> nvme;  // more directories to search for NVMe files, in addition to those in the catalog
  bool json = false;
  bool rebuild = false;
};
// Exit code: 0 clean; 1 damage found, or the directory could not be read; 2 no data directory; 3 a server has the
// directory.
int RunVerify(const VerifyCommand& command);

// A line per finding, then the verdict and counts.
std::string ShowText(const ScrubReport& report);
std::string ShowJson(const ScrubReport& report, const RebuildResult* rebuilt);

}  // namespace ballast::services
