// `ballastctl doctor`: what of this machine, or of its peers, would stop a server or slow it down.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ballast/services/ctl/doctor/checks.h"

namespace ballast::services {

struct DoctorCommand {
  std::string config;                // the server's YAML file; empty: none
  std::vector<std::string> servers;  // peers, host:port
  Asking asking = {absl::Seconds(5), {}};
  bool json = false;
};
// Reads the configuration as ballastd does, BALLAST_* variables included, and prints a line per check, then the
// verdict. Exit code: 0 nothing stops a server; 1 something does.
int RunDoctor(const DoctorCommand& command);

// A line per check, with the verdict of all last; and JSON: {"checks":[...],"bad":N,"notes":N}.
std::string ShowText(const Checks& checks);
std::string ShowJson(const Checks& checks);

}  // namespace ballast::services
