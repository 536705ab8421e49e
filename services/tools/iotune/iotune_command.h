// `ballastctl iotune`: measures this machine and writes its profile.
#pragma once

#include <string>

namespace ballast::services {

struct IotuneCommand {
  std::string directory = ".";
  std::string out;  // empty: ballast-profile.yaml in the directory
  bool json = false;
  double seconds = 20;
  int hbm_device = 0;
};
// Exit code: 0 measured and written; 1 not.
int RunIotune(const IotuneCommand& command);

}  // namespace ballast::services
